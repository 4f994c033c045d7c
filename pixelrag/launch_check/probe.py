"""What a rank says of itself and of its way to the others, in a minute, before a run needs it."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pixelrag.distributed.env import World

PACKAGES = ("pixelrag-trainer", "torch", "transformers", "deepspeed", "peft", "safetensors")
_SAMPLED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Report:
    """One rank's answers. Sizes in GiB, times in milliseconds, bandwidth in GB/s.

    Attributes:
        paths: for each path asked for, what this rank sees there; None where there is nothing.
        clock_skew_ms: how far this host's clock is ahead of rank 0's.
        collectives: per message size in bytes, the median milliseconds of an all-reduce.
    """

    rank: int
    host: str
    local_rank: int
    device: str
    driver: str
    python: str
    packages: dict[str, str]
    cores: int
    threads: int
    free_gib: float
    paths: dict[str, str | None]
    clock_skew_ms: float = 0.0
    collectives: dict[int, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The report as one JSON object."""
        return asdict(self)


def probe(world: World, paths: Sequence[str], sizes: Sequence[int], repeats: int = 5) -> Report:
    """Look at this rank's host and measure its collectives; a collective itself.

    Args:
        world: this process's place.
        paths: files and folders that every rank must see alike.
        sizes: bytes of the messages to all-reduce.
        repeats: all-reduces of each size; the median counts.
    """
    skew = _clock_skew(world)
    timings = {size: _all_reduce_ms(world, size, repeats) for size in sizes}
    return Report(
        rank=world.rank,
        host=socket.gethostname(),
        local_rank=world.local_rank,
        device=_device_name(world.device),
        driver=_driver(world.device),
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        free_gib=_free_bytes(world.device) / 2**30,
        paths={path: fingerprint_of(Path(path)) for path in paths},
        clock_skew_ms=skew,
        collectives=timings,
    )


def fingerprint_of(path: Path) -> str | None:
    """Identify what lies at a path by names, sizes and samples of the content; None: nothing.

    Cheap for large files: of each, its size and its first and last MiB.

    Raises:
        OSError: it is there and cannot be read.
    """
    if not path.exists():
        return None
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLED_BYTES))
            stream.seek(max(0, size - _SAMPLED_BYTES))
            digest.update(stream.read(_SAMPLED_BYTES))
    return digest.hexdigest()[:12]


def _clock_skew(world: World, rounds: int = 5) -> float:
    """Milliseconds that this clock is ahead of rank 0's, by the quickest of a few round trips."""
    best = (float("inf"), 0.0)
    for rank in range(1, world.world_size):
        for _ in range(rounds):
            if world.rank == rank:
                sent = time.time()
                _send(sent, 0)
                theirs = _receive(0)
                back = time.time()
                best = min(best, (back - sent, (sent + back) / 2 - theirs))
            elif world.rank == 0:
                _receive(rank)
                _send(time.time(), rank)
    return best[1] * 1000


def _send(value: float, rank: int) -> None:
    dist.send(torch.tensor([value], dtype=torch.float64), rank)


def _receive(rank: int) -> float:
    value = torch.empty(1, dtype=torch.float64)
    dist.recv(value, rank)
    return float(value)


def _all_reduce_ms(world: World, size: int, repeats: int) -> float:
    data = torch.ones(max(1, size // 4), device=world.device)
    taken = []
    for _ in range(repeats + 1):  # the first one opens connections
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(data)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        taken.append(time.perf_counter() - started)
        data.fill_(1.0)
    return sorted(taken[1:])[repeats // 2] * 1000


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    return f"cpu ({platform.machine()})"


def _driver(device: torch.device) -> str:
    """The kernel's driver where there is one, and the CUDA that torch was built for."""
    if device.type != "cuda":
        return "none"
    file = Path("/proc/driver/nvidia/version")
    kernel = file.read_text().split("Kernel Module")[-1].split()[0] if file.exists() else "unknown"
    return f"{kernel}, CUDA {torch.version.cuda}"


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
