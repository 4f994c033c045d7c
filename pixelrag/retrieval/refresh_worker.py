"""A worker of a refresh: ``python -m pixelrag.retrieval.refresh_worker WORK JOB ...``.

encode DEVICE SHARD...   vectors of shards of passages, one file a shard
build DEVICE             all vectors in one file, the index, the tables
validate DEVICE          what must hold before the generation is published

Each job leaves whole files or none, and may be repeated. It exits with 0 when it is done, with
`PERMANENT` when it would fail again however often it were tried, and otherwise with 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pixelrag.errors import DataError, IndexError_, PixelragError, ProvenanceError
from pixelrag.retrieval.background import settle_down
from pixelrag.retrieval.durable import put
from pixelrag.retrieval.generation import VECTORS, index_names, shard_bounds, write_tables
from pixelrag.retrieval.hits import Hits, exact_search, merge_top_k, recall_at_k
from pixelrag.retrieval.index import IndexSettings, build_index, open_index
from pixelrag.retrieval.refresh_spec import (
    VALIDATION,
    WEIGHTS,
    RefreshSpec,
    shard_name,
    write_json,
)

PERMANENT = 3
_PARITY_ROWS = 32
_PROBES = 64
_BLOCK_ROWS = 16_384


def alive_file(work: Path, job: str) -> Path:
    """The file whose time stamp a job renews while it gets on."""
    return work / f"alive-{job}"


def encode(
    work: Path, spec: RefreshSpec, device: str, shards: Sequence[int], beat: Callable[[], None]
) -> None:
    """Encode shards of passages.

    Raises:
        ProvenanceError: the passages are not those that the run began with.
        IndexError_: a vector is not finite.
    """
    store = _passages(spec)
    encoder = spec.encoder(weights=work / WEIGHTS, device=device, progress=beat)
    for shard in shards:
        rows = spec.rows_of(shard)
        vectors_MD = _vectors(encoder([store[row] for row in rows]), len(rows), spec.dim)
        _require_finite(vectors_MD, rows.start, store)
        put(work / shard_name(shard), lambda path, v=vectors_MD: save_vectors(path, v))
        beat()


def build(work: Path, spec: RefreshSpec, device: str, beat: Callable[[], None]) -> None:
    """Join the shards and build the index over them.

    Raises:
        IndexError_: a shard does not fit, or the index cannot be built as asked.
    """
    part = work.parent
    if not (part / VECTORS).exists():
        put(part / VECTORS, lambda path: _join(path, work, spec, beat))
    for shard in range(spec.num_shards):
        (work / shard_name(shard)).unlink(missing_ok=True)
    vectors_ND = np.load(part / VECTORS, mmap_mode="r")
    settings = IndexSettings(**spec.index)
    bounds = shard_bounds(spec.num_passages, spec.num_index_shards)
    for number, name in enumerate(index_names(spec.num_index_shards)):
        if not (part / name).exists():
            rows = vectors_ND[bounds[number] : bounds[number + 1]]
            index = build_index(rows, settings, threads=spec.threads, device=device, progress=beat)
            put(part / name, index.write)
        beat()
    write_tables(part, list(_passages(spec).ids), spec.dim, settings)


def validate(work: Path, spec: RefreshSpec, device: str, beat: Callable[[], None]) -> None:
    """Check the whole, and write the figures down.

    Raises:
        IndexError_: a count, a norm, the recall or the parity is not what it must be.
    """
    part = work.parent
    store = _passages(spec, images=True)
    vectors_ND = np.load(part / VECTORS, mmap_mode="r")
    if vectors_ND.shape != (len(store), spec.dim):
        raise IndexError_(
            f"vectors of shape {list(vectors_ND.shape)}, expected {[len(store), spec.dim]}"
        )
    norms = _norms(vectors_ND, store, beat)
    rng = np.random.default_rng(spec.seed)
    probes = _choose(rng, spec.num_passages, _PROBES)
    queries_QD = np.ascontiguousarray(vectors_ND[probes])
    settings = IndexSettings(**spec.index)
    bounds = shard_bounds(spec.num_passages, spec.num_index_shards)
    parts = []
    for number, name in enumerate(index_names(spec.num_index_shards)):
        index = open_index(part / name, settings, threads=spec.threads)
        if index.num_rows != bounds[number + 1] - bounds[number]:
            raise IndexError_(f"{name} holds {index.num_rows} vectors, not those of its rows")
        hits = index.search(queries_QD, spec.recall_k)
        parts.append(Hits(hits.scores_Qk, hits.rows_Qk + bounds[number]))
        beat()
    exact = exact_search(vectors_ND, queries_QD, spec.recall_k)
    found = merge_top_k(parts, spec.recall_k)
    recall = recall_at_k(vectors_ND, queries_QD, found, exact)
    if recall < spec.min_recall:
        raise IndexError_(
            f"the index finds {recall:.3f} of the true best {spec.recall_k}, less than "
            f"refresh.min_recall {spec.min_recall}. Raise index.ef_search or index.nprobe, or "
            f"choose another index.factory than {spec.index['factory']!r}"
        )
    beat()
    parity = _parity(work, spec, device, store, vectors_ND, rng, beat)
    figures = {f"recall@{spec.recall_k}": recall, "parity": parity, **norms}
    write_json(work / VALIDATION, figures)


def _parity(
    work: Path,
    spec: RefreshSpec,
    device: str,
    store: Any,
    vectors_ND: np.ndarray,
    rng: np.random.Generator,
    beat: Callable[[], None],
) -> float:
    """Largest relative difference to the same passages encoded alone, without any padding."""
    encoder = spec.encoder(weights=work / WEIGHTS, device=device, progress=beat)
    worst = 0.0
    for row in _choose(rng, spec.num_passages, _PARITY_ROWS):
        again_D = _vectors(encoder([store[int(row)]]), 1, spec.dim)[0]
        error = np.linalg.norm(again_D - vectors_ND[row]) / np.linalg.norm(vectors_ND[row])
        worst = max(worst, float(error))
        if not error <= spec.parity_tolerance:
            raise IndexError_(
                f"passage {store[int(row)].id} encoded once more differs by {error:.2g} of its "
                f"length, expected at most {spec.parity_tolerance:g}: dropout that is on, a mask "
                "that is ignored, or a truncation that depends on the batch"
            )
    return worst


def _passages(spec: RefreshSpec, *, images: bool = False) -> Any:
    """The passages, checked to be the run's own; what images show only with ``images``."""
    store = spec.passages()
    got = expected = spec.fingerprints["passages"]
    # Images are hashed byte by byte: once a refresh will do.
    if images or not getattr(store, "has_images", False):
        got = store.fingerprint
    if (len(store), got) != (spec.num_passages, expected):
        raise ProvenanceError(
            f"the passages have changed since the run began: {len(store)} with fingerprint "
            f"{got}, expected {spec.num_passages} with {expected}. Restore them, or start a new run"
        )
    return store


def _vectors(vectors: Any, num_rows: int, dim: int) -> np.ndarray:
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    if vectors.shape != (num_rows, dim):
        raise IndexError_(
            f"the encoder made vectors of shape {list(vectors.shape)}, expected {[num_rows, dim]}"
        )
    return vectors


def _require_finite(vectors_MD: np.ndarray, first_row: int, store: Any) -> None:
    bad = np.flatnonzero(~np.isfinite(vectors_MD).all(axis=1))
    if len(bad):
        passage = store[first_row + int(bad[0])]
        raise IndexError_(
            f"the vector of passage {passage.id} is not finite ({len(bad)} of "
            f"{len(vectors_MD)}); the document encoder has diverged"
        )


def _norms(vectors_ND: np.ndarray, store: Any, beat: Callable[[], None]) -> dict[str, float]:
    low, high = np.inf, 0.0
    for start in range(0, len(vectors_ND), _BLOCK_ROWS):
        block = np.asarray(vectors_ND[start : start + _BLOCK_ROWS])
        _require_finite(block, start, store)
        norms = np.linalg.norm(block, axis=1)
        if norms.min() == 0:
            row = start + int(norms.argmin())
            raise IndexError_(f"the vector of passage {store[row].id} is zero")
        low, high = min(low, float(norms.min())), max(high, float(norms.max()))
        beat()
    return {"min_norm": low, "max_norm": high}


def _join(path: Path, work: Path, spec: RefreshSpec, beat: Callable[[], None]) -> None:
    with open(path, "wb") as stream:
        _write_header(stream, (spec.num_passages, spec.dim))
        for shard in range(spec.num_shards):
            name = shard_name(shard)
            try:
                vectors = np.load(work / name, mmap_mode="r", allow_pickle=False)
            except ValueError as error:
                raise IndexError_(f"{name}: cannot be read ({error})") from error
            stream.write(_vectors(vectors, len(spec.rows_of(shard)), spec.dim).data)
            beat()


def save_vectors(path: Path, vectors_MD: np.ndarray) -> None:
    """Write float32 vectors as .npy; unlike `np.save`, which loses the error of a full disk."""
    with open(path, "wb") as stream:
        _write_header(stream, vectors_MD.shape)
        stream.write(vectors_MD.data)


def _write_header(stream: BinaryIO, shape: tuple[int, ...]) -> None:
    descr = np.lib.format.dtype_to_descr(np.dtype(np.float32))
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)


def _choose(rng: Any, num_rows: int, count: int) -> np.ndarray:
    return rng.choice(num_rows, min(count, num_rows), replace=False)


def main(arguments: Sequence[str]) -> int:
    """Run one job; the process's exit code."""
    settle_down()
    work, job, device, *rest = Path(arguments[0]), *arguments[1:]
    alive = alive_file(work, job if not rest else f"{job}-{rest[0]}")

    def beat() -> None:
        os.utime(alive)

    try:
        alive.touch()
        spec = RefreshSpec.read(work)
        if job == "encode":
            encode(work, spec, device, [int(shard) for shard in rest], beat)
        elif job == "build":
            build(work, spec, device, beat)
        elif job == "validate":
            validate(work, spec, device, beat)
        else:
            raise ValueError(f"job: got {job!r}, expected encode, build or validate")
    except PixelragError as error:
        # A file that is unreadable now may be readable later; the data's own faults stay.
        retry = isinstance(error, DataError) and isinstance(error.__cause__, OSError)
        print(" ".join(str(error).split()), flush=True)  # noqa: T201 - the coordinator reads it
        return 1 if retry else PERMANENT
    except OSError as error:
        print(f"{type(error).__name__}: {error}", flush=True)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
