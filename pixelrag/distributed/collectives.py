"""The few collectives that jobs and engines call by name.

Every function here is a collective: all ranks of the default group must call it, in the same
order. With one process each is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pixelrag.errors import EngineError, PixelragError

T = TypeVar("T")

# torch 2.13 renamed them and warns at every call of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _host_device() -> torch.device:
    """Where small integers are agreed on: the CPU when the group has a CPU backend."""
    backends = str(dist.get_backend_config()) if hasattr(dist, "get_backend_config") else ""
    if "cpu:" in backends or dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def agree_max(values: list[int]) -> list[int]:
    """Return the element-wise maximum of ``values`` over all ranks (one small all-reduce)."""
    if dist.get_world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.int64, device=_host_device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def exchange(values: list[int]) -> list[list[int]]:
    """Return every rank's ``values`` (equal lengths), indexed by rank (one small all-gather)."""
    world_size = dist.get_world_size()
    if world_size == 1:
        return [list(values)]
    mine = torch.tensor(values, dtype=torch.int64, device=_host_device())
    everyone = torch.empty(world_size * len(values), dtype=torch.int64, device=mine.device)
    _all_gather(everyone, mine)
    return everyone.view(world_size, len(values)).tolist()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``values`` over all ranks; the input is left alone, no gradient flows."""
    total = values.detach().clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local_BD: torch.Tensor) -> torch.Tensor:
        world_size = dist.get_world_size()
        gathered = local_BD.new_empty(world_size * local_BD.shape[0], *local_BD.shape[1:])
        _all_gather(gathered, local_BD.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, grad_ND: torch.Tensor) -> torch.Tensor:
        world_size = dist.get_world_size()
        local = grad_ND.new_empty(grad_ND.shape[0] // world_size, *grad_ND.shape[1:])
        _reduce_scatter(local, grad_ND.contiguous(), op=dist.ReduceOp.SUM)
        return local


def gather_with_grad(local_BD: torch.Tensor) -> torch.Tensor:
    """Concatenate equally shaped ``[B, D]`` tensors of all ranks into ``[world * B, D]``.

    The backward pass sums: the gradient of a rank's rows is the sum of what every rank's loss
    says about them (a reduce-scatter). With rank losses that are partial sums of the global
    loss this is exactly the global gradient, without any factor of the world size.
    """
    if dist.get_world_size() == 1:
        return local_BD
    return _GatherSum.apply(local_BD)


def pass_on(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Send tensors to the previous rank and return those of the next, of the same shapes.

    No gradient flows. After as many calls as there are ranks everything is back where it was.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if world_size == 1:
        return list(tensors)
    arriving = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
    transfers = [
        dist.P2POp(operation, tensor, peer % world_size, tag=tag)
        for operation, peer, side in (
            (dist.isend, rank - 1, tensors),
            (dist.irecv, rank + 1, arriving),
        )
        for tag, tensor in enumerate(side)
    ]
    for transfer in dist.batch_isend_irecv(transfers):
        transfer.wait()
    return arriving


def from_main(function: Callable[[], T]) -> T:
    """Run ``function`` on rank 0 alone and give every rank its result, or its error.

    For what only one process should do: check files, resolve paths, write shared folders. The
    result must be picklable; it travels between processes of one job only.

    Raises:
        PixelragError: on every rank, when it was raised on rank 0; rank 0 is the one to tell it.
    """
    if dist.get_world_size() == 1:
        return function()
    outcome: list[Any] = [None, None]
    raised: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:  # noqa: BLE001 - told to the other ranks, then raised here
            raised = error
            kind = type(error) if isinstance(error, PixelragError) else EngineError
            outcome[1] = (kind, str(error))
    dist.broadcast_object_list(outcome, src=0, device=_host_device())
    if raised is not None:
        raise raised
    if outcome[1] is not None:
        kind, message = outcome[1]
        raise told_by_main(kind(message))
    return outcome[0]


def told_by_main(error: PixelragError) -> PixelragError:
    """Mark an error that every rank raises alike, so that only rank 0 prints it."""
    error.told_by_main = True
    return error


def gather_objects(value: T) -> list[T]:
    """Return every rank's small Python object, indexed by rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
