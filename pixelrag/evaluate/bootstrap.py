"""How sure a mean over queries is: percentile bootstrap, plain and paired, and a paired test.

The queries of a test set are a sample; the interval says how far the mean would move with another
sample of the same size (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).
The test asks how often chance alone would part two systems so far (Smucker, Allan and Carterette,
CIKM 2007, section 3.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pixelrag.errors import DataError, NonFiniteError

# Entries of the largest table of draws: 2**21 int64 are 16 MiB.
_TABLE_ENTRIES = 2**21


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its bootstrap confidence interval, in the unit of the values."""

    mean: float
    low: float
    high: float


def bootstrap_interval(
    values: np.ndarray | Sequence[float],
    *,
    num_samples: int = 10_000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Interval:
    """Percentile bootstrap interval of the mean.

    Args:
        values: one number a query, [Q].
        num_samples: resamples of Q queries with replacement.
        seed: the same seed gives the same interval.
        confidence: mass between `low` and `high`, in (0, 1).

    Raises:
        DataError: no values. NonFiniteError: NaN or infinity among them.
    """
    values_Q = _values(values)
    if num_samples < 1 or not 0.0 < confidence < 1.0:
        raise ValueError(f"num_samples={num_samples} (>= 1), confidence={confidence} (0 < c < 1)")
    rng = np.random.default_rng(seed)
    num_queries = len(values_Q)
    mean_S = np.empty(num_samples)
    rows = max(1, _TABLE_ENTRIES // num_queries)
    for start in range(0, num_samples, rows):
        count = min(rows, num_samples - start)
        drawn = rng.integers(0, num_queries, size=(count, num_queries))
        mean_S[start : start + count] = values_Q[drawn].mean(axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(mean_S, [tail, 1.0 - tail])
    return Interval(float(values_Q.mean()), float(low), float(high))


def paired_bootstrap(
    before: np.ndarray | Sequence[float],
    after: np.ndarray | Sequence[float],
    *,
    num_samples: int = 10_000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Interval:
    """Interval of the mean of `after - before` over the same queries in the same order.

    An interval that does not hold 0 is a change beyond what this choice of queries explains.
    Resampling differences rather than both sides is what makes the test paired.

    Raises:
        DataError: different numbers of queries, or none. NonFiniteError: NaN or infinity.
    """
    return bootstrap_interval(
        _differences(before, after), num_samples=num_samples, seed=seed, confidence=confidence
    )


def randomization_test(
    before: np.ndarray | Sequence[float],
    after: np.ndarray | Sequence[float],
    *,
    num_samples: int = 10_000,
    seed: int = 0,
) -> float:
    """Two-sided p value of Fisher's paired randomisation test on the difference of the means.

    Were the two systems one, each query's pair of values could as well stand the other way round:
    p is the share of random exchanges that part the means at least as far as was measured. The
    measured arrangement counts as one of them, so p is never 0 (Phipson and Smyth 2010).

    Raises:
        DataError: different numbers of queries, or none. NonFiniteError: NaN or infinity.
    """
    difference_Q = _differences(before, after)
    measured = abs(difference_Q.sum())
    # Sums of the same numbers in another order differ in their last digits.
    slack = 1e-9 * np.abs(difference_Q).sum()
    rng = np.random.default_rng(seed)
    extreme = 0
    rows = max(1, _TABLE_ENTRIES // len(difference_Q))
    for start in range(0, num_samples, rows):
        count = min(rows, num_samples - start)
        sign_SQ = rng.integers(0, 2, size=(count, len(difference_Q)), dtype=np.int8) * 2 - 1
        extreme += int((np.abs(sign_SQ @ difference_Q) >= measured - slack).sum())
    return (extreme + 1) / (num_samples + 1)


def _differences(
    before: np.ndarray | Sequence[float], after: np.ndarray | Sequence[float]
) -> np.ndarray:
    before_Q, after_Q = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if before_Q.shape != after_Q.shape:
        raise DataError(
            f"paired comparison: {before_Q.shape} values before and {after_Q.shape} after; "
            "expected the same queries on both sides"
        )
    return _values(after_Q - before_Q)


def _values(values: np.ndarray | Sequence[float]) -> np.ndarray:
    values_Q = np.asarray(values, dtype=np.float64)
    if values_Q.ndim != 1 or len(values_Q) == 0:
        raise DataError(f"bootstrap: got values of shape {values_Q.shape}; expected [Q], Q >= 1")
    if not np.isfinite(values_Q).all():
        bad = int(np.flatnonzero(~np.isfinite(values_Q))[0])
        raise NonFiniteError(f"bootstrap: the value of query {bad} is {values_Q[bad]}")
    return values_Q
