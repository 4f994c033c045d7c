"""A worker of a refresh: ``python -m pixelrag.retrieval.refresh_worker WORK JOB ...``.

encode DEVICE SHARD...   vectors of shards of passages, one file a shard; `ray`: of other hosts
build DEVICE             all vectors in one file, the index, the tables
validate DEVICE          what must hold before the generation is published

Each job leaves whole files or none, and may be repeated. It exits with 0 when it is done, with
`PERMANENT` when it would fail again however often it were tried, and otherwise with 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pixelrag.data.array_file import map_array
from pixelrag.errors import DataError, IndexError_, PixelragError
from pixelrag.retrieval.background import settle_down
from pixelrag.retrieval.durable import put
from pixelrag.retrieval.generation import VECTORS, index_names, shard_bounds, write_tables
from pixelrag.retrieval.index import IndexSettings, build_index
from pixelrag.retrieval.refresh_encode import ShardEncoder, checked_vectors, open_passages
from pixelrag.retrieval.refresh_spec import BUILT, RefreshSpec, read_json, shard_name, write_json
from pixelrag.retrieval.refresh_validate import validate

PERMANENT = 3


def alive_file(work: Path, job: str) -> Path:
    """The file whose time stamp a job renews while it gets on."""
    return work / f"alive-{job}"


def encode(
    work: Path, spec: RefreshSpec, device: str, shards: Sequence[int], beat: Callable[[], None]
) -> None:
    """Encode shards of passages here, or have them encoded where the device is `ray`.

    Raises:
        ProvenanceError: the passages are not those that the run began with.
        IndexError_: a vector is not finite.
    """
    if device == "ray":
        from pixelrag.retrieval.ray_cluster import encode_shards  # Ray is an extra

        encoded: Iterable[tuple[int, np.ndarray]] = encode_shards(work, spec, shards, beat)
    else:
        encoder = ShardEncoder(work, spec, device, beat)
        encoded = ((shard, encoder(shard)) for shard in shards)
    for shard, vectors_MD in encoded:
        put(work / shard_name(shard), partial(save_vectors, vectors_MD=vectors_MD))
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
    vectors_ND = map_array(part / VECTORS)
    settings = IndexSettings(**spec.index)
    bounds = shard_bounds(spec.num_passages, spec.num_index_shards)
    for number, name in enumerate(index_names(spec.num_index_shards)):
        if not (part / name).exists():
            rows = vectors_ND[bounds[number] : bounds[number + 1]]
            index = build_index(rows, settings, threads=spec.threads, device=device, progress=beat)
            put(part / name, index.write)
            if index.fallback:
                told = read_json(work / BUILT) or {}
                write_json(work / BUILT, told | {"built on the CPU": index.fallback})
        beat()
    ids = list(open_passages(spec).ids)
    write_tables(part, ids, spec.dim, settings, spec.num_index_shards)


def _join(path: Path, work: Path, spec: RefreshSpec, beat: Callable[[], None]) -> None:
    with open(path, "wb") as stream:
        _write_header(stream, (spec.num_passages, spec.dim))
        for shard in range(spec.num_shards):
            name = shard_name(shard)
            try:
                vectors = map_array(work / name)
            except ValueError as error:
                raise IndexError_(f"{name}: cannot be read ({error})") from error
            stream.write(checked_vectors(vectors, len(spec.rows_of(shard)), spec.dim).data)
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
