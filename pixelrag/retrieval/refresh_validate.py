"""What must hold before a generation is published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pixelrag.data.array_file import map_array, read_arrays
from pixelrag.errors import IndexError_
from pixelrag.retrieval.durable import sha256
from pixelrag.retrieval.generation import VECTORS, index_names, shard_bounds
from pixelrag.retrieval.hits import Hits, exact_search, merge_top_k, recall_at_k
from pixelrag.retrieval.index import IndexSettings, open_index
from pixelrag.retrieval.refresh_encode import checked_vectors, open_passages, require_finite
from pixelrag.retrieval.refresh_spec import TRAINING, VALIDATION, WEIGHTS, RefreshSpec, write_json

_PARITY_ROWS = 32
_PROBES = 64
_BLOCK_ROWS = 16_384


def validate(work: Path, spec: RefreshSpec, device: str, beat: Callable[[], None]) -> None:
    """Check the whole, and write the figures down.

    Raises:
        IndexError_: a count, a norm, the recall or the parity is not what it must be.
    """
    part = work.parent
    store = open_passages(spec, images=True)
    vectors_ND = map_array(part / VECTORS)
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
    if spec.witness is not None:
        figures["training_parity"] = _training_parity(work, spec, store, vectors_ND)
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
    rows = set(_choose(rng, spec.num_passages, _PARITY_ROWS).tolist())
    if spec.ray is not None:  # hosts may differ: at least one of each shard
        shards = map(spec.rows_of, range(spec.num_shards))
        rows |= {int(rng.integers(shard.start, shard.stop)) for shard in shards}
    worst = 0.0
    for row in sorted(rows):
        again_D = checked_vectors(encoder([store[row]]), 1, spec.dim)[0]
        error = _relative_error(again_D, vectors_ND[row])
        worst = max(worst, error)
        if not error <= spec.parity_tolerance:
            raise IndexError_(
                f"passage {store[row].id} encoded once more differs by {error:.2g} of its "
                f"length, expected at most {spec.parity_tolerance:g}: dropout that is on, a mask "
                "that is ignored, a truncation that depends on the batch, or a host that encodes "
                "otherwise"
            )
    return worst


def _training_parity(work: Path, spec: RefreshSpec, store: Any, vectors_ND: np.ndarray) -> float:
    """Largest relative difference to what the training made of some passages."""
    if not (work / TRAINING).exists() or sha256(work / TRAINING) != spec.witness:
        raise IndexError_(
            f"{work / TRAINING}: missing, or not what the training wrote with its snapshot; there "
            "is nothing to compare the passages' vectors with"
        )
    arrays = read_arrays(work / TRAINING)
    rows, vectors_PD = arrays["rows"].tolist(), arrays["vectors"]
    errors = [_relative_error(v, vectors_ND[row]) for row, v in zip(rows, vectors_PD, strict=True)]
    worst = int(np.argmax(errors))
    if not errors[worst] <= spec.parity_tolerance:
        raise IndexError_(
            f"the vector of passage {store[rows[worst]].id} differs by {errors[worst]:.2g} of its "
            f"length from what the training makes of it, expected at most "
            f"{spec.parity_tolerance:g}: another template, truncation, mask or pooling, or weights "
            "that are not the snapshot's"
        )
    return errors[worst]


def _relative_error(got_D: np.ndarray, stored_D: np.ndarray) -> float:
    return float(np.linalg.norm(got_D - stored_D) / np.linalg.norm(stored_D))


def _norms(vectors_ND: np.ndarray, store: Any, beat: Callable[[], None]) -> dict[str, float]:
    low, high = np.inf, 0.0
    for start in range(0, len(vectors_ND), _BLOCK_ROWS):
        block = np.asarray(vectors_ND[start : start + _BLOCK_ROWS])
        require_finite(block, start, store)
        norms = np.linalg.norm(block, axis=1)
        if norms.min() == 0:
            row = start + int(norms.argmin())
            raise IndexError_(f"the vector of passage {store[row].id} is zero")
        low, high = min(low, float(norms.min())), max(high, float(norms.max()))
        beat()
    return {"min_norm": low, "max_norm": high}


def _choose(rng: Any, num_rows: int, count: int) -> np.ndarray:
    return rng.choice(num_rows, min(count, num_rows), replace=False)
