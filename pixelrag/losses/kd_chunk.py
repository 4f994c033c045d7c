"""How many tokens of a distillation loss are worked on at a time."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal

import torch

logger = logging.getLogger("pixelrag")

GIB = 2**30
# Larger chunks no longer make the matrix products faster: measured on two cores; the playbook's.
_ENOUGH = {"cpu": 512, "cuda": 2048}
# What the rest of the step may still claim of the memory that is free now.
_SHARE = 0.25
_said: set[tuple[int, str]] = set()


def choose_chunk_size(
    requested: int | Literal["auto"],
    *,
    num_tokens: int,
    bytes_per_token: int,
    device: torch.device,
    free_bytes: int | None = None,
) -> int:
    """Return the number of tokens of a chunk; `auto` says in the log what it picked, and why.

    `auto` takes the largest power of two whose buffers fit into a quarter of the free memory, but
    no more than speed asks for, and at least 16.

    Args:
        requested: tokens, at least 1, or `auto`.
        num_tokens: supervised tokens of the call; a chunk is never larger.
        bytes_per_token: of the buffers that a chunk holds.
        device: where they lie.
        free_bytes: what is free there; None = look.

    Raises:
        ValueError: ``requested`` is neither.
    """
    if requested != "auto":
        if requested < 1:
            raise ValueError(f"chunk_size: got {requested}, expected at least 1 or auto")
        return min(requested, max(num_tokens, 1))
    free = free_memory(device) if free_bytes is None else free_bytes
    enough = _ENOUGH.get(device.type, _ENOUGH["cuda"])
    fitting = int(free * _SHARE) // max(bytes_per_token, 1)
    picked = min(max(16, 1 << max(fitting, 1).bit_length() - 1), enough)
    reason = "more would not be faster" if picked == enough else "a quarter of it is the limit"
    if (picked, str(device)) not in _said:
        _said.add((picked, str(device)))
        logger.info(
            "distillation chunk_size: auto picked %d tokens (%.2f GiB of buffers; %.1f GiB free "
            "on %s, %s)",
            picked, picked * bytes_per_token / GIB, free / GIB, device, reason,
        )  # fmt: skip
    return min(picked, max(num_tokens, 1))


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device.

    On CUDA that includes what PyTorch's allocator holds unused; on the CPU a container's limit
    counts as well as the machine's memory.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    limits = [_available(), _cgroup_left()]
    return max(min(value for value in limits if value is not None), 0)


def _available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Elsewhere only the total is to be had portably.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_left() -> int | None:
    folder = Path("/sys/fs/cgroup")
    limit, used = folder / "memory.max", folder / "memory.current"
    if not limit.exists() or not used.exists():
        return None
    text = limit.read_text(encoding="ascii").strip()
    return None if text == "max" else int(text) - int(used.read_text(encoding="ascii"))
