"""FSDP2 and DeepSpeed ZeRO-3 as they come: what a training script gets that sets nothing.

Both shard parameters, gather them in every forward and backward, and reduce after every backward.
They offer just what `gradcache_step` calls, and are here to be measured against: their gradients
are averaged over ranks, and DeepSpeed clips at 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pixelrag.distributed.collectives import gather_with_grad
from pixelrag.engine import OptimizerFactory
from pixelrag.engine.deepspeed import import_deepspeed

_DEEPSPEED_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    # A plain AdamW: DeepSpeed's own would be compiled first.
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


class _Stock:
    """The part of the engine protocol that `gradcache_step` uses."""

    touches_every_chunk = False
    gather = staticmethod(gather_with_grad)

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.rank = dist.get_rank()


class StockFSDP2(_Stock):
    """``fully_shard`` on each block and on the root, with its default arguments."""

    def __init__(
        self, module: nn.Module, optimizer_factory: OptimizerFactory, blocks: Sequence[nn.Module]
    ) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        self._module = fully_shard(module, mesh=mesh)
        self._optimizer = optimizer_factory(list(module.named_parameters()))

    def __call__(self, role: str, **batch: Any) -> Any:
        """Run one forward."""
        return self._module(role, **batch)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Run one backward, which reduces."""
        loss.backward()

    def step(self, max_norm: float | None = None) -> None:
        """Clip, step and clear."""
        if max_norm:
            torch.nn.utils.clip_grad_norm_(self._module.parameters(), max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class StockZero3(_Stock):
    """``deepspeed.initialize`` with stage 3 and nothing else."""

    def __init__(
        self, module: nn.Module, optimizer_factory: OptimizerFactory, blocks: Sequence[nn.Module]
    ) -> None:
        super().__init__()
        self._engine, *_ = import_deepspeed(self.device).initialize(
            model=module,
            optimizer=optimizer_factory(list(module.named_parameters())),
            config=_DEEPSPEED_CONFIG,
            dist_init_required=None,
        )

    def __call__(self, role: str, **batch: Any) -> Any:
        """Run one forward."""
        return self._engine(role, **batch)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Run one backward, which reduces."""
        self._engine.backward(loss)

    def step(self, max_norm: float | None = None) -> None:
        """Step; the clipping is DeepSpeed's own."""
        self._engine.step()
