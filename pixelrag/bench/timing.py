"""Times of candidates that take turns, and what is said of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Spread:
    """The 20th, 50th and 80th percentile of repeated measurements."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Percentiles, interpolated, rounded to four digits.

        Raises:
            ValueError: there is no value.
        """
        if not values:
            raise ValueError("there is nothing to take percentiles of")
        ordered = sorted(values)
        return cls(*(float(f"{_at(ordered, share):.4g}") for share in (0.2, 0.5, 0.8)))

    def __str__(self) -> str:
        return f"{self.p50:.3g} ({self.p20:.3g} to {self.p80:.3g})"


@dataclass(slots=True)
class Taken:
    """Seconds of each measured call: on the clock, and of this process on its processors."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def interleaved(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup: int,
    device: torch.device | None = None,
) -> dict[str, Taken]:
    """Time candidates in turns, in an order that reverses from round to round (A B, B A, ...).

    A machine that others use too slows neighbouring calls alike, so ratios within a round hold
    better than times, and processor seconds better than the clock's.

    Args:
        candidates: by name; each call is one step.
        rounds: measured calls of each.
        warmup: rounds before those, not measured.
        device: where they compute; a call on CUDA ends when the device is done.

    Returns:
        What each took, by name.
    """
    taken = {name: Taken() for name in candidates}
    for turn in range(warmup + rounds):
        for name in list(candidates)[:: 1 if turn % 2 == 0 else -1]:
            _wait_for(device)
            wall, cpu = time.perf_counter(), time.process_time()
            candidates[name]()
            _wait_for(device)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if turn >= warmup:
                taken[name].wall.append(wall)
                taken[name].cpu.append(cpu)
    return taken


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Percentiles of the ratio within each round; not the ratio of the percentiles."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


def _at(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of the others lies, interpolated."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _wait_for(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
