"""Learning-rate schedules as pure functions of the step, so that a resumed run needs no state.

Steps count from 0; step s uses `multiplier(s)` times the configured learning rate:

    s < warmup    (s + 1) / (warmup + 1)          never 0: the first step trains
    s = warmup    1                               the peak, met exactly once
    s > warmup    cosine, linear or constant in   progress = (s - warmup) / (total - warmup)

Progress would reach 1, and the multiplier 0, at s = total, one past the last step: no step is spent
on a learning rate of zero.
"""

from __future__ import annotations

import math

from pixelrag.errors import ConfigError

SCHEDULES = ("cosine", "linear", "constant")


def multiplier(schedule: str, step: int, total_steps: int, warmup_steps: int) -> float:
    """The factor on the learning rate at optimizer step `step`, in (0, 1].

    Args:
        schedule: "cosine" (half a period), "linear" or "constant", each after linear warm-up.
        step: 0-based, below `total_steps`.
        total_steps: optimizer steps of the whole run, resumed parts included.
        warmup_steps: below `total_steps`; see `resolve_warmup`.

    Raises:
        ConfigError: an unknown schedule.
        ValueError: a step or warm-up outside the run.
    """
    if not 0 <= warmup_steps < total_steps or not 0 <= step < total_steps:
        raise ValueError(f"step {step}, warm-up {warmup_steps}: not within {total_steps} steps")
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"optim.scheduler: got {schedule!r}, expected one of {', '.join(SCHEDULES)}"
        )
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule == "linear":
        return 1.0 - progress
    return 1.0


def resolve_warmup(total_steps: int, warmup_ratio: float, warmup_steps: int | None) -> int:
    """How many steps warm up: `warmup_steps` when given, else the ratio's share, rounded up.

    Args:
        total_steps: optimizer steps of the run, at least 1.
        warmup_ratio: optim.warmup_ratio, in [0, 1).
        warmup_steps: optim.warmup_steps; wins over the ratio.

    Returns:
        An int in [0, total_steps).

    Raises:
        ConfigError: a warm-up that the run would never leave.
    """
    if total_steps < 1:
        raise ConfigError(
            f"the run has {total_steps} steps; expected at least 1: "
            "raise optim.max_steps or optim.num_epochs, or add rows to data.train"
        )
    if warmup_steps is None:
        if not 0.0 <= warmup_ratio < 1.0:
            raise ConfigError(f"optim.warmup_ratio: got {warmup_ratio}, expected [0, 1)")
        # The epsilon keeps 0.07 * 100 = 7.000000000000001 at 7.
        return min(math.ceil(warmup_ratio * total_steps - 1e-9), total_steps - 1)
    if not 0 <= warmup_steps < total_steps:
        raise ConfigError(
            f"optim.warmup_steps: got {warmup_steps}, expected 0 to {total_steps - 1}: the run has "
            f"{total_steps} steps and would never reach optim.learning_rate; lower warmup_steps, "
            "or leave it out to use optim.warmup_ratio"
        )
    return warmup_steps
