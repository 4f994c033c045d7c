"""What computes here, and how fast it could."""

from __future__ import annotations

import os
import platform
import re
import time
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from pixelrag.bench.rows import Run
from pixelrag.plan.hardware import DEVICES, Device
from pixelrag.train.commit import commit

PACKAGES = (
    "torch", "transformers", "deepspeed", "sentence-transformers", "gradcache", "trl",
    "liger-kernel", "flash-attn", "faiss-cpu", "faiss-gpu",
)  # fmt: skip
# Boards of a name with other figures than the one in the table.
_OTHERS = re.compile(r"\b(PCIe|NVL)\b", re.I)


class Bound(NamedTuple):
    """The least seconds that work can take, and which limit that is; see `roofline`."""

    seconds: float | None = None
    by: str = ""


def device_name(device: torch.device) -> str:
    """What the device calls itself: the GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def hardware(device: torch.device) -> str:
    """The machine in a line: equal lines, comparable rows."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    host = f"{cores} cores, {memory:.0f} GiB"
    if device.type != "cuda":
        return f"{device_name(device)}, {host}"
    count, total = torch.cuda.device_count(), torch.cuda.get_device_properties(device).total_memory
    return f"{count} x {device_name(device)} ({total / 2**30:.0f} GiB), {host}"


def known_device(name: str) -> Device | None:
    """The entry of `plan.hardware` that a device's own name is about; None where there is none."""
    if _OTHERS.search(name):
        return None
    words = re.findall(r"[a-z0-9]+", name.lower())
    return next((DEVICES[word] for word in words if word in DEVICES), None)


def roofline(
    device: Device | None, flops: float | None, moved: float | None, precision: str
) -> Bound:
    """What the device's peak and its memory's bandwidth allow at best.

    Args:
        device: None = unknown.
        flops: operations of the work; None = unknown.
        moved: bytes that must pass between memory and processor at least; None = not counted.
        precision: fp32 or bf16.
    """
    if device is None or flops is None:
        return Bound()
    compute = flops / device.peak(precision)
    memory = (moved or 0.0) / device.bandwidth
    return Bound(compute, "compute") if compute >= memory else Bound(memory, "memory")


def this_run(
    device: torch.device,
    *,
    profile: str,
    command: str,
    config_hash: str,
    threads: int,
    load_average: float,
) -> Run:
    """Where, when and with what the rows of this run are measured."""
    return Run(
        profile=profile,
        command=command,
        config_hash=config_hash,
        device=device_name(device),
        hardware=hardware(device),
        threads=threads,
        versions={name: found for name in PACKAGES if (found := _version(name))},
        commit=commit(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        load_average=round(load_average, 2),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
