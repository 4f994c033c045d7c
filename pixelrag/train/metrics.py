"""Figures of a run: means over logged steps, throughput without warm-up, peak memory.

Names used in `metrics.jsonl`: `train/loss`, `train/grad_norm` (before clipping), `train/lr`,
`train/lr/PART`, `train/temperature`, `perf/rows_per_second`, `perf/tokens_per_second`,
`perf/step_seconds`, `mem/peak_gib`. Rates are of the whole job, not of a rank; GiB is 2**30 bytes.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

GIB = 2**30
_STATUS = Path("/proc/self/status")


class RunningMeans:
    """Weighted means of named values since the last `pop`, summed in float64 without rounding."""

    def __init__(self) -> None:
        self._terms: dict[str, list[tuple[float, float]]] = {}

    def add(self, values: Mapping[str, float], weight: float = 1.0) -> None:
        """Take one step's values; `weight` is, for example, its number of rows."""
        for name, value in values.items():
            self._terms.setdefault(name, []).append((float(value) * weight, weight))

    def pop(self) -> dict[str, float]:
        """The means, in the order names first came, and start afresh; NaN stays NaN."""
        means = {}
        for name, terms in self._terms.items():
            total = math.fsum(weight for _, weight in terms)
            means[name] = _sum(term for term, _ in terms) / total if total else math.nan
        self._terms.clear()
        return means


def _sum(terms: Iterable[float]) -> float:
    values = list(terms)
    # fsum raises on infinities of both signs; the plain sum says NaN, which is the truth.
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


class Throughput:
    """Rows and tokens a second over the last `window` steps, the first `skip` steps left out.

    The first steps of a process pay for compilation, memory pools and cold files; a resumed run
    skips its own first ones again. Time inside `excluded()` (evaluation, a checkpoint) belongs to
    no step.

    Args:
        skip: steps left out at the start.
        window: steps averaged.
        clock: seconds, monotonic; tests pass their own.
    """

    def __init__(
        self, *, skip: int = 2, window: int = 50, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._skip = skip
        self._clock = clock
        self._steps: deque[tuple[float, int, int, Mapping[str, float]]] = deque(maxlen=window)
        self._started = clock()

    def step(self, rows: int, tokens: int, amounts: Mapping[str, float] | None = None) -> None:
        """A step has ended that trained `rows` rows and `tokens` real tokens over all ranks.

        `amounts` are further things done, by the name of the figure that counts them per second.
        """
        now = self._clock()
        seconds, self._started = now - self._started, now
        if self._skip > 0:
            self._skip -= 1
        else:
            self._steps.append((seconds, rows, tokens, amounts or {}))

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Time in here does not count."""
        begun = self._clock()
        try:
            yield
        finally:
            self._started += self._clock() - begun

    def rates(self) -> dict[str, float]:
        """`perf/...` figures; empty until a step after the skipped ones has ended."""
        seconds = math.fsum(step[0] for step in self._steps)
        if seconds <= 0.0:
            return {}
        last = self._steps[-1]
        return {
            "perf/rows_per_second": sum(step[1] for step in self._steps) / seconds,
            "perf/tokens_per_second": sum(step[2] for step in self._steps) / seconds,
            "perf/step_seconds": seconds / len(self._steps),
            **{name: math.fsum(s[3][name] for s in self._steps) / seconds for name in last[3]},
        }


def peak_memory(device: torch.device | None = None) -> dict[str, float]:
    """This process's peak memory: `mem/peak_gib`, and on CUDA `mem/host_peak_gib` too.

    On a CUDA `device`, `mem/peak_gib` is the most its allocator had handed out
    (`max_memory_allocated`); elsewhere it is the resident set's high-water mark.
    """
    host = _host_peak_bytes() / GIB
    if device is not None and device.type == "cuda":
        return {
            "mem/peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "mem/host_peak_gib": host,
        }
    return {"mem/peak_gib": host}


def _host_peak_bytes() -> int:
    # VmHWM belongs to this program; ru_maxrss survives exec and would show a large parent's peak.
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
