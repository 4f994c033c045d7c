"""How many tokens of a distillation loss are worked on at a time."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from pixelrag.distributed.free_memory import GIB, free_memory

logger = logging.getLogger("pixelrag")

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
