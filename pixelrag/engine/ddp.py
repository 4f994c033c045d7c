"""Plain replication: every rank holds everything, gradients meet in flat all-reduces.

There is no ``DistributedDataParallel`` wrapper: its reducer counts on one forward per backward
and stays silent when the last chunk does not use every parameter. Here the chunks accumulate in
``.grad``, ranks agree on the set of used parameters, and that set is reduced once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from pixelrag.engine.base import (
    Engine,
    OptimizerFactory,
    Owner,
    broadcast_from_rank0,
    gradient_of,
    rank_0,
)
from pixelrag.engine.state import load_plain_state, plain_state

BUCKET_BYTES = 256 << 20


class DDPEngine(Engine):
    """Replicated parameters, gradients and optimizer.

    Args:
        module: container of every trained part, on any device.
        optimizer_factory: builds the optimizer from named trainable parameters.
        device: where the module goes.
        bf16: run forwards under bfloat16 autocast; parameters and gradients stay fp32.
        grad_sync: ``deferred`` (one reduction a step) or ``per_chunk``.
    """

    name = "ddp"

    def __init__(
        self,
        module: nn.Module,
        optimizer_factory: OptimizerFactory,
        *,
        device: torch.device,
        bf16: bool = False,
        grad_sync: str = "deferred",
    ) -> None:
        super().__init__(module.to(device), device, grad_sync)
        self._bf16 = bf16
        broadcast_from_rank0(self.module)
        self.optimizer = self.build_optimizer(optimizer_factory)
        self._reduced = ReducedSum(self)

    def _forward(self, role: str, **batch: Any) -> Any:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._bf16):
            return self.module(role, **batch)

    def _backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()
        if self.grad_sync == "per_chunk":
            self._reduced.add_chunk(last=last)
        elif last:
            all_reduce_flat(gradient_of(p) for p in self.fill_unused_gradients())

    def _step(self, max_norm: float | None) -> float:
        parameters = [p for _, p in self.named_trainable()]
        norm = torch.nn.utils.get_total_norm([gradient_of(p) for p in parameters])
        if torch.isfinite(norm):
            if max_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {n: gradient_of(p).detach().clone() for n, p in self.named_trainable()}

    def full_parameters(
        self, *, trainable_only: bool = False, prefix: str = "", owner: Owner = rank_0
    ) -> dict[str, torch.Tensor]:
        named = self.named_tensors(trainable_only=trainable_only, prefix=prefix)
        return {n: p.detach().to("cpu", copy=True) for n, p in named if owner(n) == self.rank}

    def optimizer_state(self, *, owner: Owner = rank_0) -> dict[str, dict[str, torch.Tensor]]:
        own = [(n, p) for n, p in self.named_trainable() if owner(n) == self.rank]
        return plain_state(self.optimizer, own)

    def load_optimizer_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        load_plain_state(self.optimizer, self.named_trainable(), state)


class ReducedSum:
    """Per-chunk reduction for engines that keep whole gradients on every rank.

    Each chunk's fresh gradient is summed over ranks and added to the sum of the chunks before.
    It costs one reduction a chunk and saves nothing: it is there to compare with, and because
    an option must mean the same on every engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sums: dict[nn.Parameter, torch.Tensor] = {}

    def add_chunk(self, *, last: bool, scale: float = 1.0) -> None:
        """Move ``.grad`` into the running sum; with ``last`` put the sum back into ``.grad``."""
        used = self._engine.fill_unused_gradients()
        all_reduce_flat(gradient_of(p) for p in used)
        for parameter in used:
            fresh, parameter.grad = gradient_of(parameter).mul_(scale), None
            before = self._sums.get(parameter)
            self._sums[parameter] = fresh if before is None else before.add_(fresh)
        if last:
            for parameter, total in self._sums.items():
                parameter.grad = total
            self._sums = {}


@torch.no_grad()
def all_reduce_flat(gradients: Iterable[torch.Tensor]) -> None:
    """Sum tensors over ranks in place, flattened into buckets of one dtype."""
    if dist.get_world_size() == 1:
        return
    for bucket in _buckets(gradients):
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        torch._foreach_copy_(bucket, _unflatten_dense_tensors(flat, bucket))


def _buckets(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        fits = buckets and buckets[-1][0].dtype == tensor.dtype and size + nbytes <= BUCKET_BYTES
        if fits:
            buckets[-1].append(tensor)
            size += nbytes
        else:
            buckets.append([tensor])
            size = nbytes
    return buckets
