"""How far the encoder has moved from the vectors that are searched.

Three figures beside the age in steps, all of a fixed sample of passages: the drift (mean of
1 - cosine between the stored vector and a fresh one), the overlap of what stored and fresh
vectors retrieve, and the share of distinct passages among what is retrieved, which falls where
retrieval collapses (huggingface/transformers#9405).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from pixelrag.retrieval.hits import Hits, exact_search


@dataclass(frozen=True, slots=True)
class Trigger:
    """When a refresh shall start.

    Attributes:
        every_steps: look, or start, every so many steps; None: never.
        kind: `steps` starts whenever it looks; `drift` where the probes have drifted.
        threshold: of `drift`.
    """

    every_steps: int | None
    kind: Literal["steps", "drift"] = "steps"
    threshold: float = 0.0

    def looks(self, step: int) -> bool:
        """Whether ``step`` is one at which a refresh may start; by drift, measure it first."""
        return self.every_steps is not None and step > 0 and step % self.every_steps == 0

    def starts(self, step: int, drift: float | None = None) -> bool:
        """Whether a refresh shall start.

        Args:
            step: optimizer steps done.
            drift: of the probes, where `kind` needs it and ``looks(step)``.
        """
        if not self.looks(step):
            return False
        if self.kind == "steps":
            return True
        if drift is None:
            raise ValueError("refresh.trigger drift needs the drift")
        return drift >= self.threshold


def probe_rows(num_passages: int, count: int, seed: int = 0) -> np.ndarray:
    """The fixed sample: distinct rows, int64, ascending; all of them where there are fewer."""
    chosen = np.random.default_rng(seed).choice(
        num_passages, min(count, num_passages), replace=False
    )
    return np.sort(chosen).astype(np.int64)


def drift(stored_PD: np.ndarray, fresh_PD: np.ndarray) -> float:
    """Mean of 1 - cosine, float64 inside: 0 where nothing moved, 2 at most.

    Args:
        stored_PD: vectors of the generation that is searched, `vectors_ND[probe_rows]`.
        fresh_PD: the same passages, encoded now.
    """
    stored, fresh = np.asarray(stored_PD, np.float64), np.asarray(fresh_PD, np.float64)
    lengths = np.linalg.norm(stored, axis=1) * np.linalg.norm(fresh, axis=1)
    return float(np.mean(1.0 - np.einsum("pd,pd->p", stored, fresh) / lengths))


def top_k_overlap(stored_PD: np.ndarray, fresh_PD: np.ndarray, k: int = 5) -> float:
    """Share of each probe's ``k`` nearest probes that stored and fresh vectors agree on.

    Every probe asks as it is now: where it is among the probes says how much of the ranking is
    left. 1 where nothing moved.
    """
    fresh_PD = np.ascontiguousarray(fresh_PD, np.float32)
    before = exact_search(np.asarray(stored_PD), fresh_PD, k)
    after = exact_search(fresh_PD, fresh_PD, k)
    same = [
        len(set(a[ok]) & set(b[ok])) / ok.sum()
        for a, b, ok in zip(before.rows_Qk, after.rows_Qk, after.found_Qk, strict=True)
    ]
    return float(np.mean(same))


def score_error(
    stored_ND: np.ndarray, hits: Hits, queries_QD: np.ndarray, fresh_QkD: np.ndarray
) -> float:
    """Largest difference between stored and fresh scores of what was retrieved; 0 at lag 0.

    Args:
        stored_ND: vectors of the generation.
        hits: what was retrieved.
        queries_QD: float32, as they were searched.
        fresh_QkD: the retrieved passages as the training encodes them.

    Returns:
        The largest |difference| over the largest |score|.
    """
    queries = np.asarray(queries_QD, np.float64)
    stored_Qk = np.einsum("qd,qkd->qk", queries, np.asarray(stored_ND[hits.rows_Qk], np.float64))
    fresh_Qk = np.einsum("qd,qkd->qk", queries, np.asarray(fresh_QkD, np.float64))
    found = hits.found_Qk
    if not found.any():
        return 0.0
    return float(np.abs(stored_Qk - fresh_Qk)[found].max() / np.abs(fresh_Qk[found]).max())


def distinct_share(rows_Qk: np.ndarray, num_passages: int) -> float:
    """Distinct passages among all hits of a batch, over as many as there could be.

    Args:
        rows_Qk: int64, what each question found; -1 where nothing was.
        num_passages: of the knowledge base.
    """
    found = rows_Qk[rows_Qk >= 0]
    possible = min(len(found), num_passages)
    return len(np.unique(found)) / possible if possible else 0.0


def has_collapsed(rows_Qk: np.ndarray, num_passages: int) -> bool:
    """Whether the questions of a batch all find the same few passages, whatever they ask.

    They do where one question alone finds as many as all of them, or all of them less than a tenth
    of what they could. Of few questions or passages nothing can be said.
    """
    found = rows_Qk[rows_Qk >= 0]
    most = int((rows_Qk >= 0).sum(axis=1).max(initial=0))
    possible = min(len(found), num_passages)
    return possible >= 4 * most > 0 and len(np.unique(found)) <= max(most, possible // 10)
