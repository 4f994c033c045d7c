"""Schedules at their ends, between them, and against a plain restatement."""

import math

import pytest

from pixelrag.errors import ConfigError
from pixelrag.train.schedule import SCHEDULES, multiplier, resolve_warmup


def curve(schedule, total, warmup):
    return [multiplier(schedule, step, total, warmup) for step in range(total)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (2, 1), (100, 0), (100, 5), (100, 99)])
def test_starts_above_zero_peaks_once_at_the_end_of_warmup(schedule, total, warmup):
    got = curve(schedule, total, warmup)
    assert got[0] > 0
    assert got[warmup] == 1.0
    assert all(0 < value <= 1 for value in got)
    assert got[: warmup + 1] == sorted(got[: warmup + 1])
    if schedule != "constant":
        assert got.count(1.0) == 1
        assert got[warmup:] == sorted(got[warmup:], reverse=True)


def test_warmup_rises_in_equal_steps():
    assert curve("linear", 100, 4)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize(("schedule", "bound"), [("cosine", 1e-5), ("linear", 1.1e-3)])
def test_the_last_step_is_near_zero(schedule, bound):
    assert 0 < multiplier(schedule, 999, 1000, 50) < bound


def test_values_between():
    assert multiplier("cosine", 60, 110, 10) == pytest.approx(0.5)
    assert multiplier("cosine", 35, 110, 10) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert multiplier("linear", 35, 110, 10) == pytest.approx(0.75)
    assert multiplier("constant", 109, 110, 10) == 1.0


def test_warmup_from_ratio_or_steps():
    assert resolve_warmup(100, 0.05, None) == 5
    assert resolve_warmup(100, 0.07, None) == 7
    assert resolve_warmup(10, 0.05, None) == 1
    assert resolve_warmup(1, 0.05, None) == 0
    assert resolve_warmup(3, 0.99, None) == 2
    assert resolve_warmup(100, 0.0, None) == 0
    assert resolve_warmup(100, 0.05, 12) == 12
    assert resolve_warmup(100, 0.05, 0) == 0


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match=r"optim.warmup_steps: got 10, expected 0 to 9"):
        resolve_warmup(10, 0.05, 10)
    with pytest.raises(ConfigError, match=r"optim.warmup_ratio: got 1.0"):
        resolve_warmup(10, 1.0, None)
    with pytest.raises(ConfigError, match="0 steps"):
        resolve_warmup(0, 0.05, None)
    with pytest.raises(ConfigError, match="'cosin', expected one of cosine, linear, constant"):
        multiplier("cosin", 0, 10, 0)
    with pytest.raises(ValueError, match="step 10"):
        multiplier("cosine", 10, 10, 0)
