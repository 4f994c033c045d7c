"""How long a run will take, where that can be told, and on what ground."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import nn

from pixelrag.config.base import JobConfig
from pixelrag.distributed.env import choose_device
from pixelrag.errors import EngineError
from pixelrag.train.flops import peak_of

MFU = 0.4
"""Share of a GPU's peak that training reaches with large models; small ones reach less."""
_SIZE = 512
_SECONDS = 0.05


def duration(config: JobConfig, flops: float, world_size: int) -> str:
    """The time of a whole run as a sentence.

    Args:
        config: the job's; its engine says where it runs.
        flops: operations of all steps of all ranks.
        world_size: ranks.
    """
    engine = config.engine
    try:
        device = choose_device(engine.device, 0)
    except EngineError:
        return f"time: unknown; engine.device is {engine.device}, and there is none here"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        peak = peak_of(device, engine.precision)
        if peak is None:
            return f"time: unknown; the peak of {name} in {engine.precision} is not on record"
        rate, ground = peak * MFU, f"{MFU:.0%} of the bf16 peak of {name}, for large models"
    else:
        rate = _measured_rate()
        ground = f"{rate / 1e9:,.0f} GFLOP/s, what plain matrix products reach here just now"
    seconds = flops / (rate * world_size)
    return (
        f"time: at least {_shown(seconds)} of arithmetic on {world_size} x {device.type}: "
        f"{flops / 1e12:,.3g} TFLOP at {ground}; reading, evaluating and saving come on top"
    )


def parameters(blocks: Iterable[nn.Module]) -> int:
    """Of transformer layers: what a token meets."""
    return sum(p.numel() for block in blocks for p in block.parameters())


def _measured_rate() -> float:
    """fp32 operations a second of this process."""
    left = torch.rand(_SIZE, _SIZE)
    done, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < _SECONDS:
        torch.mm(left, left)
        done += 1
    return done * 2 * _SIZE**3 / spent


def _shown(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} seconds"
