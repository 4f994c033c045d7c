"""Exponential moving averages of the weights (Polyak and Juditsky 1992; `ema` in a configuration).

The average is a state of the optimizer beside AdamW's moments, so that every engine shards,
offloads, saves and reshards it as it does those, and updates it where it updates the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pixelrag.config.base import JobConfig
from pixelrag.config.parts import EmaConfig
from pixelrag.engine.state import AVERAGE


class AveragedAdamW(torch.optim.AdamW):
    """AdamW that also keeps average <- decay * average + (1 - decay) * weights after each step.

    It begins with the weights before the first step. The decay is each group's ``ema_decay``; 0
    makes the average the weights themselves.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update weights and averages."""
        stepped = [
            (parameter, group["ema_decay"])
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        # Kept aside: AdamW takes a state that is not empty for one that has its moments.
        fresh = {p: p.detach().clone() for p, _ in stepped if AVERAGE not in self.state[p]}
        result = super().step(closure)
        for parameter, decay in stepped:
            average = self.state[parameter].setdefault(AVERAGE, fresh.get(parameter))
            average.lerp_(parameter.detach(), 1 - decay)
        return result


def averaging_of(config: JobConfig) -> EmaConfig | None:
    """The configuration's `ema` section, or None where nothing is averaged."""
    ema = getattr(config, "ema", None)
    return None if ema is None or ema.decay is None else ema


def set_decay(optimizer: torch.optim.Optimizer, ema: EmaConfig, step: int) -> None:
    """Set the decay for step ``step``, which counts from 0."""
    for group in optimizer.param_groups:
        group["ema_decay"] = ema.decay if step >= ema.start_step else 0.0
