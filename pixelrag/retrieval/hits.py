"""What a search found, exact search, and how much of it an index finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pixelrag.errors import IndexError_

if TYPE_CHECKING:
    import torch

_BLOCK_ROWS = 65_536
# Scores within this of the k-th best count as equal to it: sums differ in their order.
_TIE = 1e-5


class Hits(NamedTuple):
    """The best rows for each query, best first.

    Attributes:
        scores_Qk: float32; -inf where nothing was found.
        rows_Qk: int64, always rows that exist: where nothing was found it repeats the query's best
            (row 0 if it has none), so that no lookup can mistake -1 for the last row.
    """

    scores_Qk: np.ndarray
    rows_Qk: np.ndarray

    @property
    def found_Qk(self) -> np.ndarray:
        """bool: whether the place holds a hit."""
        return self.scores_Qk > -np.inf

    @classmethod
    def of(cls, scores_Qk: np.ndarray, rows_Qk: np.ndarray) -> Hits:
        """From scores and rows that say -1 where nothing was found."""
        missing_Qk = rows_Qk < 0
        best_Q1 = np.maximum(rows_Qk[:, :1], 0)
        scores = np.where(missing_Qk, np.float32(-np.inf), scores_Qk).astype(np.float32, copy=False)
        return cls(scores, np.where(missing_Qk, best_Q1, rows_Qk).astype(np.int64, copy=False))


def check_queries(queries_QD: np.ndarray, dim: int, k: int) -> np.ndarray:
    """The queries as contiguous float32.

    Raises:
        IndexError_: not [Q, dim], or not finite, or ``k`` is not positive.
    """
    queries_QD = np.ascontiguousarray(queries_QD, dtype=np.float32)
    if queries_QD.ndim != 2 or queries_QD.shape[1] != dim:
        raise IndexError_(
            f"queries of shape {list(queries_QD.shape)}, expected [queries, {dim}]: the index "
            "holds vectors of another encoder"
        )
    if k < 1:
        raise IndexError_(f"k is {k}, expected at least 1")
    bad = np.flatnonzero(~np.isfinite(queries_QD).all(axis=1))
    if len(bad):
        raise IndexError_(
            f"query {int(bad[0])} of {len(queries_QD)} is not finite ({len(bad)} in all); the "
            "question encoder has diverged"
        )
    return queries_QD


def exact_search(
    vectors_ND: np.ndarray,
    queries_QD: np.ndarray,
    k: int,
    *,
    first_row: int = 0,
    device: torch.device | str = "cpu",
) -> Hits:
    """The ``k`` rows of the largest inner product, found by computing all of them.

    Args:
        vectors_ND: float32, may be a memory map; read block by block.
        queries_QD: float32.
        k: hits a query; more than N leaves places empty.
        first_row: added to the rows, where the vectors are a part of a larger collection.
        device: where to multiply.

    Raises:
        IndexError_: the queries do not fit.
    """
    queries_QD = check_queries(queries_QD, vectors_ND.shape[1], k)
    parts = []
    for start in range(0, len(vectors_ND), _BLOCK_ROWS):
        block = np.ascontiguousarray(vectors_ND[start : start + _BLOCK_ROWS], dtype=np.float32)
        best = _best_on(device, queries_QD, block, min(k, len(block)))
        parts.append(Hits(best.scores_Qk, best.rows_Qk + (first_row + start)))
    return merge_top_k(parts, k, num_queries=len(queries_QD))


def _best_on(
    device: torch.device | str, queries_QD: np.ndarray, block_MD: np.ndarray, k: int
) -> Hits:
    if str(device) == "cpu":
        scores_QM = queries_QD @ block_MD.T
        rows_Qk = np.argpartition(-scores_QM, k - 1, axis=1)[:, :k]
        return Hits(np.take_along_axis(scores_QM, rows_Qk, axis=1), rows_Qk)
    import torch  # here, because a CPU needs none of it

    scores = torch.from_numpy(queries_QD).to(device) @ torch.from_numpy(block_MD).to(device).T
    best = scores.topk(k, dim=1)
    return Hits(best.values.cpu().numpy(), best.indices.cpu().numpy())


def merge_top_k(parts: Sequence[Hits], k: int, *, num_queries: int | None = None) -> Hits:
    """The best ``k`` of the hits in disjoint parts of a collection; equal scores by row.

    Args:
        parts: hits of the same queries, each in its own rows.
        k: hits a query.
        num_queries: needed where there are no parts.
    """
    if not parts:
        shape = (num_queries or 0, k)
        return Hits(np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int64))
    scores = np.concatenate([part.scores_Qk for part in parts], axis=1)
    rows = np.concatenate([part.rows_Qk for part in parts], axis=1)
    rows = np.where(scores > -np.inf, rows, -1)
    if scores.shape[1] < k:
        gap = ((0, 0), (0, k - scores.shape[1]))
        scores = np.pad(scores, gap, constant_values=-np.inf)
        rows = np.pad(rows, gap, constant_values=-1)
    order = np.lexsort((rows, -scores), axis=1)[:, :k]
    return Hits.of(
        np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)
    )


def recall_at_k(vectors_ND: np.ndarray, queries_QD: np.ndarray, found: Hits, exact: Hits) -> float:
    """Share of the true best ``k`` among what was found.

    A hit counts where its true score reaches that of the k-th best, so equal passages, of which
    either may be found, cost nothing.

    Args:
        vectors_ND: the collection, float32.
        queries_QD: what was asked, float32.
        found: hits of the index; its scores may be approximate.
        exact: hits of ``exact_search``, equally many.
    """
    true_Qk = np.einsum("qd,qkd->qk", queries_QD, vectors_ND[found.rows_Qk], dtype=np.float64)
    worst_Q = np.where(exact.found_Qk, exact.scores_Qk, np.inf).min(axis=1).astype(np.float64)
    slack_Q = _TIE * np.maximum(1.0, np.abs(worst_Q))
    good_Qk = found.found_Qk & (true_Qk >= (worst_Q - slack_Q)[:, None])
    return float(good_Qk.sum() / exact.found_Qk.sum())
