"""Warnings about what goes wrong slowly: throughput, memory and a divergence that climbs.

Each is said when it begins and again only after it has ended. Only rank 0's log shows warnings.
"""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path

import torch

from pixelrag.config.distill_parts import WatchConfig

logger = logging.getLogger("pixelrag")

WINDOW = 10
"""Steps whose mean is compared; the first so many set the scale."""


class Watch:
    """Looks at every step of a run.

    Args:
        config: the configuration's `watch` section.
        device: whose memory is watched.
    """

    def __init__(self, config: WatchConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._rates: deque[float] = deque(maxlen=WINDOW)
        self._kds: deque[float] = deque(maxlen=WINDOW)
        self._best_rate = 0.0
        self._lowest_kd = float("inf")
        self._on: set[str] = set()

    def step(self, number: int, *, kd: float, tokens: int, seconds: float) -> None:
        """Take one step's figures.

        Args:
            number: of the step, for messages.
            kd: its divergence.
            tokens: of the step, over all ranks.
            seconds: that it took, from data to gradient.
        """
        self._rates.append(tokens / max(seconds, 1e-9))
        self._kds.append(kd)
        if len(self._kds) == WINDOW:
            self._check_rate(number)
            self._check_kd(number)
        self._check_memory(number)

    def _check_rate(self, number: int) -> None:
        rate = sum(self._rates) / WINDOW
        self._best_rate = max(self._best_rate, rate)
        limit = (1 - self._config.throughput_drop) * self._best_rate
        self._say(
            "rate",
            rate < limit,
            f"step {number}: throughput has fallen to {rate:,.0f} tokens/s from "
            f"{self._best_rate:,.0f}; is the machine shared, throttled, or the data slow "
            "(data.num_workers)?",
        )

    def _check_kd(self, number: int) -> None:
        mean = sum(self._kds) / WINDOW
        self._lowest_kd = min(self._lowest_kd, mean)
        self._say(
            "kd",
            mean > self._config.kd_rise * self._lowest_kd,
            f"step {number}: the divergence from the teacher has risen to {mean:.4g}, its lowest "
            f"mean was {self._lowest_kd:.4g}; lower optim.learning_rate, or look at the data",
        )

    def _check_memory(self, number: int) -> None:
        share = used_memory(self._device)
        if share is not None:
            self._say(
                "memory",
                share >= self._config.memory,
                f"step {number}: {100 * share:.0f} % of the memory of {self._device} has been in "
                "use; lower batch.per_device_batch_size or loss.chunk_size, or set "
                "student.gradient_checkpointing true",
            )

    def _say(self, kind: str, is_wrong: bool, text: str) -> None:
        if is_wrong and kind not in self._on:
            logger.warning(text)
        (self._on.add if is_wrong else self._on.discard)(kind)


def used_memory(device: torch.device) -> float | None:
    """Share of the device's memory in use: at most so far on CUDA, now on the CPU (Linux)."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return torch.cuda.max_memory_reserved(device) / total
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    total, free = (int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return 1 - free / total
