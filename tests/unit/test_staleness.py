"""Drift, overlap, parity of scores, collapse, and when a refresh starts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pixelrag.retrieval.hits import Hits, exact_search
from pixelrag.retrieval.staleness import (
    Trigger,
    distinct_share,
    drift,
    has_collapsed,
    probe_rows,
    score_error,
    top_k_overlap,
)


@pytest.fixture
def vectors() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((40, 12)).astype(np.float32)


def rotated(vectors: np.ndarray, angle: float) -> np.ndarray:
    """Turned in the plane of the first two axes."""
    turned = vectors.copy()
    turned[:, 0] = math.cos(angle) * vectors[:, 0] - math.sin(angle) * vectors[:, 1]
    turned[:, 1] = math.sin(angle) * vectors[:, 0] + math.cos(angle) * vectors[:, 1]
    return turned


def test_probes_are_fixed_and_distinct() -> None:
    rows = probe_rows(1000, 64)
    assert (rows == probe_rows(1000, 64)).all()
    assert (np.diff(rows) > 0).all()
    assert (rows != probe_rows(1000, 64, seed=1)).any()
    assert probe_rows(5, 64).tolist() == [0, 1, 2, 3, 4]


def test_drift_is_one_minus_the_cosine(vectors: np.ndarray) -> None:
    assert drift(vectors, vectors) == pytest.approx(0, abs=1e-12)
    assert drift(vectors, 3 * vectors) == pytest.approx(0, abs=1e-12)
    assert drift(vectors, -vectors) == pytest.approx(2)
    plane = np.zeros((3, 4), np.float32)
    plane[:, 0] = (1, 2, 5)
    assert drift(plane, rotated(plane, 0.3)) == pytest.approx(1 - math.cos(0.3), abs=1e-6)


def test_overlap_falls_as_the_encoder_moves(vectors: np.ndarray) -> None:
    assert top_k_overlap(vectors, vectors) == 1.0
    rng = np.random.default_rng(1)
    noise = rng.standard_normal(vectors.shape).astype(np.float32)
    overlaps = [top_k_overlap(vectors, vectors + scale * noise) for scale in (0.05, 0.5, 5.0)]
    assert overlaps == sorted(overlaps, reverse=True)
    assert overlaps[0] > 0.8
    assert overlaps[2] < 0.5


def test_overlap_of_fewer_probes_than_k(vectors: np.ndarray) -> None:
    assert top_k_overlap(vectors[:3], vectors[:3], k=5) == 1.0


def test_scores_agree_at_lag_zero_and_not_later(vectors: np.ndarray) -> None:
    queries = vectors[:4]
    hits = exact_search(vectors, queries, 3)
    assert score_error(vectors, hits, queries, vectors[hits.rows_Qk]) == 0.0
    moved = vectors * np.float32(1.01)
    error = score_error(vectors, hits, queries, moved[hits.rows_Qk])
    assert error == pytest.approx(0.01 / 1.01, rel=1e-4)


def test_scores_of_what_is_missing_do_not_count(vectors: np.ndarray) -> None:
    few = exact_search(vectors[:2], vectors[:1], 4)
    fresh = vectors[few.rows_Qk].copy()
    fresh[~few.found_Qk] = 1e6
    assert score_error(vectors, few, vectors[:1], fresh) == 0.0
    nothing = Hits.of(np.zeros((1, 2), np.float32), np.full((1, 2), -1))
    assert score_error(vectors, nothing, vectors[:1], vectors[:2][None]) == 0.0
    assert distinct_share(np.full((1, 2), -1), 9) == 0.0


def test_collapse_shows_in_the_distinct_share(vectors: np.ndarray) -> None:
    apart = exact_search(vectors, vectors[:10], 2).rows_Qk
    assert distinct_share(apart, len(vectors)) == len(np.unique(apart)) / 20 > 0.7
    assert not has_collapsed(apart, len(vectors))
    same = exact_search(vectors, np.repeat(vectors[:1], 10, axis=0), 2).rows_Qk
    assert distinct_share(same, len(vectors)) == pytest.approx(2 / 20)
    assert has_collapsed(same, len(vectors))
    # 40 questions that find 8 of 80.
    assert has_collapsed(np.arange(80).reshape(40, 2) % 8, 1000)
    assert not has_collapsed(np.arange(80).reshape(40, 2) % 10, 1000)


def test_few_questions_or_passages_are_no_collapse() -> None:
    same = np.tile([3, 5, -1], (10, 1))
    assert has_collapsed(same, 8)
    assert not has_collapsed(same, 7)  # there is hardly anything else to find
    assert distinct_share(same, 2) == 1.0
    assert not has_collapsed(same[:3], 1000)
    assert not has_collapsed(np.full((10, 2), -1), 1000)
    assert not has_collapsed(np.zeros((0, 2), np.int64), 1000)


def test_triggers() -> None:
    steps = Trigger(10)
    assert [s for s in range(41) if steps.starts(s)] == [10, 20, 30, 40]
    assert not any(Trigger(None).starts(s) for s in range(41))
    by_drift = Trigger(10, "drift", 0.2)
    assert [by_drift.starts(10, d) for d in (0.19, 0.2, 1.0)] == [False, True, True]
    assert not by_drift.starts(11, 1.0)
    with pytest.raises(ValueError, match="needs the drift"):
        by_drift.starts(10)
