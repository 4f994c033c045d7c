"""Resolves ``grad_sync: auto`` and ``params: auto`` from memory, and says why.

Keeping whole gradients until the end of the step makes one reduction out of many; keeping whole
parameters makes one gather out of many. Both are bought with memory, so both are taken when they
fit. All ranks must choose alike: the smallest free memory of any rank decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pixelrag.distributed.collectives import agree_max
from pixelrag.distributed.free_memory import free_memory
from pixelrag.errors import EngineError

# The rest stays free for activations, optimizer state and the allocator's own slack.
SHARE_OF_FREE_MEMORY = 0.4


@dataclass(frozen=True, slots=True)
class Modes:
    """What was chosen, and the sentence that says why."""

    grad_sync: str
    resident: bool
    reason: str


def choose_modes(
    module: nn.Module,
    engine: str,
    device: torch.device,
    *,
    grad_sync: str,
    params: str,
    precision: str,
) -> Modes:
    """Choose the modes for one engine by the free memory of all ranks; a collective.

    Args:
        device: this rank's device.

    For the others, and what is raised, see `modes_for`.
    """
    free = _smallest_free_bytes(device)
    return modes_for(module, engine, free, grad_sync=grad_sync, params=params, precision=precision)


def modes_for(
    module: nn.Module, engine: str, free: int, *, grad_sync: str, params: str, precision: str
) -> Modes:
    """Choose the modes for one engine.

    Args:
        module: the container, still whole.
        engine: engine name.
        free: bytes free on every rank.
        grad_sync: ``auto``, ``deferred`` or ``per_chunk``.
        params: ``auto``, ``resident`` or ``sharded``.
        precision: ``fp32`` or ``bf16``; decides the bytes of a gathered parameter.

    Raises:
        EngineError: an unknown mode, or sharded parameters on an engine that replicates them.
    """
    if grad_sync not in ("auto", "deferred", "per_chunk"):
        raise EngineError(
            f"engine.grad_sync: got {grad_sync!r}, expected auto, deferred or per_chunk"
        )
    if params not in ("auto", "resident", "sharded"):
        raise EngineError(f"engine.params: got {params!r}, expected auto, resident or sharded")
    can_shard = engine in ("zero3", "fsdp2")
    if params == "sharded" and not can_shard:
        raise EngineError(
            f"engine.params: sharded, but {engine} keeps whole parameters on every rank; "
            "use zero3 or fsdp2"
        )
    # Only fsdp2 gathers in the compute dtype; ZeRO under autocast gathers fp32.
    width = 2 if precision == "bf16" and engine == "fsdp2" else 4
    parameter_bytes = sum(p.numel() for p in module.parameters()) * width
    gradient_bytes = sum(p.numel() for p in module.parameters() if p.requires_grad) * 4
    budget = int(free * SHARE_OF_FREE_MEMORY)
    resident = params == "resident" or not can_shard
    if params == "auto" and can_shard:
        resident = parameter_bytes <= budget
    chosen = grad_sync
    if grad_sync == "auto":
        kept = gradient_bytes + (parameter_bytes if resident and can_shard else 0)
        partitions_gradients = engine in ("zero2", "zero3", "fsdp2")
        chosen = "deferred" if not partitions_gradients or kept <= budget else "per_chunk"
    reason = (
        f"grad_sync={chosen} ({'asked for' if grad_sync != 'auto' else 'auto'}: whole gradients "
        f"{_gib(gradient_bytes)}), params={'resident' if resident else 'sharded'} "
        f"({'asked for' if params != 'auto' else 'auto'}: whole parameters "
        f"{_gib(parameter_bytes)}); budget {_gib(budget)} of {_gib(free)} free"
    )
    return Modes(chosen, resident, reason)


def _smallest_free_bytes(device: torch.device) -> int:
    return -agree_max([-free_memory(device)])[0]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
