"""How much memory a rank may still take: of its GPU, or its share of the host's."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup")
# Limit, usage and what of the usage can be dropped, in the two versions of Linux' cgroups.
_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def free_memory(device: torch.device) -> int:
    """Bytes that this rank can still allocate on the device.

    On CUDA that includes what PyTorch's allocator holds unused. On the CPU a container's limit
    counts as well as the machine's memory, and the ranks of a host have equal shares.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return _free_of_host() // _ranks_of_host()


def _ranks_of_host() -> int:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def _free_of_host() -> int:
    limits = [_available(), *(_container_left(*names) for names in _FILES)]
    return max(min(value for value in limits if value is not None), 0)


def _available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Elsewhere only the total is to be had portably.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _container_left(limit_name: str, used_name: str, stat_name: str, idle: str) -> int | None:
    """What a container may still take; None where there is no limit."""
    limit, used, stat = (_CGROUP / name for name in (limit_name, used_name, stat_name))
    if not (limit.exists() and used.exists() and stat.exists()):
        return None
    text = limit.read_text(encoding="ascii").strip()
    if text == "max":
        return None
    amounts = dict(line.split() for line in stat.read_text(encoding="ascii").splitlines())
    # Cached files count as used, but make way.
    return int(text) - int(used.read_text(encoding="ascii")) + int(amounts.get(idle, 0))
