"""DeepSpeed ZeRO, stages 0 to 3, with DeepSpeed's own habits switched off.

Every rank's loss is multiplied by the world size before DeepSpeed divides by it, which turns its
mean into the sum that the engine contract asks for. Chunks accumulate inside
``coalesce_grad_reduction`` (stages 1-3) or ``no_sync`` (stage 0), whose exit reduces once.
Several plain ``backward`` calls before one ``step`` would keep only the last chunk at stages 1
and 2, without any error; that path does not exist here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn

from pixelrag.engine.base import (
    Engine,
    OptimizerFactory,
    Owner,
    broadcast_from_rank0,
    gradient_of,
    rank_0,
)
from pixelrag.engine.ddp import ReducedSum
from pixelrag.engine.order import ForwardTrace, holders_of_parameters
from pixelrag.engine.state import load_plain_state, plain_state
from pixelrag.engine.zero_state import Zero3State, Zero12State
from pixelrag.errors import EngineError


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed such that it compiles nothing on this device.

    On a CPU its communication backend builds a shared-memory op at the first init: about 100 s,
    a compiler needed, and a build that was killed leaves a lock on which later runs wait forever.
    gloo does the same job.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed refuses to start without it, also where no launcher is needed (one process, srun).
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    # DeepSpeed calls torch's collectives by the names of before 2.13, which warn at every call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    import deepspeed
    import deepspeed.comm

    # Its warnings are about choices that are made here (an "untested" torch optimizer).
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        # `import deepspeed.comm.torch` would bind torch itself: the module re-exports the name.
        backend: Any = sys.modules["deepspeed.comm.torch"]
        if not hasattr(backend, "build_shm_op"):
            raise EngineError(
                f"deepspeed {deepspeed.__version__} has no comm.torch.build_shm_op; pixelrag "
                "cannot keep it from compiling. Install a version that constraints-cpu.txt names"
            )
        backend.build_shm_op = lambda: None
    # DeepSpeed compares the ranks' order of submodules too, but only while it records a trace, with
    # two broadcasts a forward, and raises on some ranks, naming nothing; ForwardTrace replaces it.
    coordinator: Any = sys.modules["deepspeed.runtime.zero.partitioned_param_coordinator"]
    coordinator.assert_ints_same_as_other_ranks = lambda ints: None
    return deepspeed


def destroy_process_group() -> None:
    """Destroy all process groups; DeepSpeed, where it is loaded, lets go of them as well.

    It would otherwise hold on to the first group of a process, also when that is gone.
    """
    comm: Any = sys.modules.get("deepspeed.comm.comm")
    if comm is None or comm.cdb is None:
        dist.destroy_process_group()
        return
    comm.destroy_process_group()
    comm.cdb = None


class DeepSpeedEngine(Engine):
    """ZeRO 0-3.

    Args:
        module: container of every trained part.
        optimizer_factory: builds a plain torch optimizer; DeepSpeed wraps it.
        stage: 0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters.
        ds_config: a complete config from ``ds_config.resolve``.
        device: where the module goes.
        grad_sync: ``deferred`` or ``per_chunk``.
        resident: stage 3 only: the config keeps gathered parameters over the step.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer_factory: OptimizerFactory,
        *,
        stage: int,
        ds_config: dict[str, Any],
        device: torch.device,
        grad_sync: str = "deferred",
        resident: bool = True,
    ) -> None:
        super().__init__(module.to(device), device, grad_sync)
        self.name = f"zero{stage}"
        self.stage = stage
        self.shards_parameters = stage == 3
        self.resident = resident
        # ZeRO-3 records one trace of submodules and drops resident parameters when it changes.
        self.touches_every_chunk = stage == 3 and resident
        # Stage 3 counts, in each submodule, the backwards to come, and anew in every forward.
        self.keeps_graphs = stage != 3
        self._deepspeed = import_deepspeed(device)
        broadcast_from_rank0(module)
        self.optimizer = self.build_optimizer(optimizer_factory)
        try:
            self._ds, *_ = self._deepspeed.initialize(
                model=module, optimizer=self.optimizer, config=ds_config, dist_init_required=None
            )
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()
            )
            raise EngineError(
                f"DeepSpeed refuses its configuration ({faults}); mend that in the file of "
                "engine.deepspeed"
            ) from error
        self.module = self._ds.module
        if stage == 3 or (stage == 2 and grad_sync == "per_chunk"):
            self._trace = ForwardTrace(holders_of_parameters(module))
        self._offloaded = "offload_optimizer" in ds_config.get("zero_optimization", {})
        self._chunks: contextlib.ExitStack | None = None
        self._reduced = ReducedSum(self)
        self._hp = {1: Zero12State, 2: Zero12State, 3: Zero3State}.get(stage)

    def _forward(self, role: str, **batch: Any) -> Any:
        return self._ds(role, **batch)

    def _backward(self, loss: torch.Tensor, *, last: bool) -> None:
        # DeepSpeed averages over ranks; the contract sums.
        loss = loss * self.world_size
        if self.grad_sync == "per_chunk" and self.stage >= 2:
            if not self._offloaded:  # with offload, step() is the boundary (unmanaged mode)
                self._ds.set_gradient_accumulation_boundary(last)
            self._ds.backward(loss, scale_wrt_gas=False)
            return
        if self._chunks is None:
            self._chunks = contextlib.ExitStack()
            hold = self._ds.no_sync if self.stage == 0 else self._ds.coalesce_grad_reduction
            self._chunks.enter_context(hold())
        self._ds.backward(loss, scale_wrt_gas=False)
        if self.grad_sync == "per_chunk":
            self._reduced.add_chunk(last=last, scale=1.0 / self.world_size)
        if last:
            self._flush()

    def _flush(self) -> None:
        if self.stage == 3:
            self._refuse_unlike_use()
        elif self.grad_sync == "deferred":
            self.fill_unused_gradients()
        chunks, self._chunks = self._chunks, None
        assert chunks is not None  # opened by the step's first backward
        chunks.close()  # stages 1-3 reduce here
        if self.stage == 0 and self.grad_sync == "deferred":
            self._ds.allreduce_gradients()

    def _refuse_unlike_use(self) -> None:
        """Stage 3 cannot zero-fill a sharded gradient: use must be equal on all ranks."""
        named = self.named_trainable()
        mine = [int(p.grad is not None) for _, p in named]
        used = torch.tensor(mine, dtype=torch.int64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(used, op=dist.ReduceOp.SUM)
        unlike = [
            n
            for (n, _), u in zip(named, used.tolist(), strict=True)
            if u not in (0, self.world_size)
        ]
        if unlike:
            raise EngineError(
                f"zero3: {len(unlike)} parameters were used on some ranks only, first "
                f"{unlike[0]!r}; run a zero-weighted forward through them on the other ranks"
            )

    def _step(self, max_norm: float | None) -> float:
        if self.stage == 0:
            return self._step_replicated(max_norm)
        self._ds.optimizer.clip_grad = max_norm or 0.0
        self._ds.step()
        self._clear_partitions()
        if not self._ds.was_step_applied():
            return float("nan")  # DeepSpeed leaves the weights alone when the norm is not finite
        return float(self._ds.get_global_grad_norm())

    def _clear_partitions(self) -> None:
        """Zero the buffers into which stages 2 and 3 sum gradient shards.

        DeepSpeed overwrites a parameter's shard in the first backward of a step and adds in later
        ones. One that the first chunk does not use would start from the step before; one that no
        chunk uses would be stepped by it again.
        """
        zero = self._ds.optimizer
        if self.stage == 3:
            zero.grad_partitions_flat_buffer.zero_()
        if not self._offloaded:
            return
        # Offloaded masters keep their gradient tensors from step to step as well.
        if self.stage == 3:
            masters = zero.fp32_partitioned_groups_flat
        else:
            masters = zero.single_partition_of_fp32_groups
            for shard in zero.accumulated_grads_in_cpu.values():
                shard.zero_()
        for master in masters:
            if master.grad is not None:
                master.grad.zero_()

    def _step_replicated(self, max_norm: float | None) -> float:
        parameters = [p for _, p in self.named_trainable()]
        norm = torch.nn.utils.get_total_norm([gradient_of(p) for p in parameters])
        if not torch.isfinite(norm):
            self._ds.zero_grad()
            return norm.item()
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        self._ds.step()
        return norm.item()

    def _masters(self) -> list[torch.Tensor]:
        return super()._masters() if self._hp is None else self._hp(self._ds.optimizer).flats()

    def _swap_averages(self, masters: list[torch.Tensor]) -> None:
        if self._hp is None:
            super()._swap_averages(masters)
            return
        with self._hp(self._ds.optimizer).rewriting():
            super()._swap_averages(masters)

    def gradients(self) -> dict[str, torch.Tensor]:
        if self.stage == 0:
            return {n: gradient_of(p).clone() for n, p in self.named_trainable()}
        from deepspeed.utils import safe_get_full_grad

        return {n: safe_get_full_grad(p).detach().clone() for n, p in self.named_trainable()}

    def shape_of(self, parameter: nn.Parameter) -> tuple[int, ...]:
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    def full_parameters(
        self, *, trainable_only: bool = False, prefix: str = "", owner: Owner = rank_0
    ) -> dict[str, torch.Tensor]:
        named = self.named_tensors(trainable_only=trainable_only, prefix=prefix)
        full = {}
        for name, tensor in named:
            sharded = hasattr(tensor, "ds_id")
            with self._deepspeed.zero.GatheredParameters([tensor], enabled=sharded):
                if self.rank == owner(name):
                    full[name] = tensor.detach().to("cpu", copy=True)
        return full

    def optimizer_state(self, *, owner: Owner = rank_0) -> dict[str, dict[str, torch.Tensor]]:
        named = self.named_trainable()
        if self._hp is None:
            own = [(n, p) for n, p in named if owner(n) == self.rank]
            return plain_state(self.optimizer, own)
        return self._hp(self._ds.optimizer).gather(named, lambda name: owner(name) == self.rank)

    def load_optimizer_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        if self._hp is None:
            load_plain_state(self.optimizer, self.named_trainable(), state)
        else:
            self._hp(self._ds.optimizer).load(self.named_trainable(), state)
