"""How many random configurations are tried, and when two gradients are the same."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, settings

EXAMPLES = os.environ.get("PIXELRAG_EXAMPLES")


def tried(few: int) -> settings:
    """So many examples, the same in every run; PIXELRAG_EXAMPLES of them, and others each time."""
    return settings(
        max_examples=int(EXAMPLES or few),
        derandomize=EXAMPLES is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def drawn(case_of: Callable[[random.Random], dict[str, Any]], few: int) -> dict[str, dict]:
    """Cases for processes that hypothesis does not reach, by name."""
    draw = random.Random(7 if EXAMPLES is None else None)
    return {f"case {number}": case_of(draw) for number in range(int(EXAMPLES or few))}


def assert_same(
    got: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    bar: float = 1e-10,
    floor: float = 1e-6,
) -> None:
    """Relative L2 error and ratio of the norms of all of them together.

    Of a norm below ``floor`` only rounding is left, as of a perfect model's gradient.
    """
    mine, theirs = (torch.cat([t.detach().double().flatten() for t in x]) for x in (got, wanted))
    assert torch.isfinite(mine).all()
    norm = float(theirs.norm())
    error = float((mine - theirs).norm()) / max(norm, floor)
    assert error <= bar, f"relative error {error:.1e} of a norm of {norm:.1e}"
    if norm > floor:
        ratio = float(mine.norm()) / norm
        assert abs(ratio - 1) <= bar, f"ratio of norms {ratio}"
