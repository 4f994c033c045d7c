"""The few collectives that jobs and engines call by name.

Every function here is a collective: all ranks of the default group must call it, in the same
order. With one process each is the identity.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def _host_device() -> torch.device:
    """Where small integers are agreed on: the CPU when the group has a CPU backend."""
    backends = str(dist.get_backend_config()) if hasattr(dist, "get_backend_config") else ""
    if "gloo" in backends or dist.get_backend() == "gloo":
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
    dist.all_gather_into_tensor(everyone, mine)
    return everyone.view(world_size, len(values)).tolist()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``values`` over all ranks; the input is left alone, no gradient flows."""
    total = values.detach().clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local_BD: torch.Tensor) -> torch.Tensor:
        world_size = dist.get_world_size()
        gathered = local_BD.new_empty(world_size * local_BD.shape[0], *local_BD.shape[1:])
        dist.all_gather_into_tensor(gathered, local_BD.contiguous())
        return gathered

    @staticmethod
    def backward(ctx, grad_ND: torch.Tensor) -> torch.Tensor:
        world_size = dist.get_world_size()
        local = grad_ND.new_empty(grad_ND.shape[0] // world_size, *grad_ND.shape[1:])
        dist.reduce_scatter_tensor(local, grad_ND.contiguous(), op=dist.ReduceOp.SUM)
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
