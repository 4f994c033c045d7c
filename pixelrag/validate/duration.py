"""How long a run will take, where that can be told, and on what ground."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pixelrag.distributed.env import choose_device
from pixelrag.errors import EngineError, PixelragError
from pixelrag.plan.jobs import PlannedConfig

MFU = 0.4
"""Share of a GPU's peak that training reaches with large models; small ones reach less."""
_DEVICES_A_NODE = 8
_NETWORK = 50e9  # bytes a second between nodes, as `pixelrag plan` has it where nothing is said
_SIZE = 512
_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Hardware:
    """On what a run is to be: processes, and a device of `pixelrag plan` that is not here."""

    world_size: int = 1
    device: str | None = None


def duration(
    config: PlannedConfig, flops: float, steps: int, hardware: Hardware, **lengths: float
) -> str:
    """The time of a whole run as a sentence.

    Args:
        config: the job's; its engine says where it runs.
        flops: operations of a step, of all ranks.
        steps: of the run.
        hardware: that it is to run on.
        lengths: means of what a step sees, as `pixelrag.plan.workload.Lengths` has them.
    """
    name = hardware.device
    world_size = hardware.world_size
    if name is None:
        try:
            here = choose_device(config.engine.device, 0)
        except EngineError:
            return f"time: unknown; engine.device is {config.engine.device}, and there is none here"
        if here.type == "cpu":
            rate = _measured_rate()
            return (
                f"time: at least {_shown(flops * steps / (rate * world_size))} of arithmetic on "
                f"{world_size} x cpu: {flops * steps / 1e12:,.3g} TFLOP at {rate / 1e9:,.0f} "
                "GFLOP/s, what plain matrix products reach here just now; reading, evaluating and "
                "saving come on top"
            )
        name = torch.cuda.get_device_name(here)
    return _planned(config, steps, Hardware(world_size, name), lengths)


def _planned(
    config: PlannedConfig, steps: int, hardware: Hardware, lengths: Mapping[str, float]
) -> str:
    """By the planner, for a device that it knows."""
    from pixelrag.plan.hardware import DEVICES, Cluster
    from pixelrag.plan.prediction import predict
    from pixelrag.plan.workload import Lengths

    words = re.findall(r"[a-z0-9]+", (hardware.device or "").lower())
    device = next((DEVICES[word] for word in words if word in DEVICES), None)
    if device is None:
        known = ", ".join(DEVICES)
        return f"time: unknown; {hardware.device} is none of the planner's devices: {known}"
    whole: dict[str, Any] = {
        name: value if name == "supervised" else round(value)
        for name, value in lengths.items()
        if value
    }
    world_size = hardware.world_size
    nodes = -(-world_size // _DEVICES_A_NODE)
    cluster = Cluster(device, nodes, -(-world_size // nodes), _NETWORK)
    try:
        found = predict(config, world_size, Lengths(**whole), device)
    except PixelragError as error:
        return f"time: unknown; the planner says: {error}"
    bounds = found.seconds(cluster, config.engine.precision, MFU)
    what = max(bounds, key=bounds.__getitem__)
    return (
        f"time: at least {_shown(bounds[what] * steps)} on {world_size} x {device.name}, a bound "
        f"of the planner's by {what} at {MFU:.0%} MFU; `pixelrag plan` tells memory, too"
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
