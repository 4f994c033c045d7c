"""PyTorch FSDP2 (``fully_shard``): parameters, gradients and optimizer sharded over all ranks.

``grad_sync: deferred`` keeps whole unreduced gradients over the chunks and reduce-scatters once;
``per_chunk`` reduce-scatters after every chunk and keeps only shards. ``params: resident`` gathers
the weights once a step and keeps them whole until the step ends; ``sharded`` gathers them anew in
every forward and backward. All four are exact; `docs/engines.md` has their cost in bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from pixelrag.engine.base import (
    Engine,
    OptimizerFactory,
    Owner,
    broadcast_from_rank0,
    gradient_of,
    outermost_first,
    rank_0,
)
from pixelrag.engine.order import ForwardTrace
from pixelrag.engine.state import check_names, is_moment


class FSDP2Engine(Engine):
    """Fully sharded data parallelism.

    Args:
        module: container of every trained part.
        optimizer_factory: called after sharding, with the sharded parameters.
        device: where the module goes.
        blocks: submodules sharded as units of their own (transformer layers).
        bf16: compute and gather in bfloat16; shards, reductions and accumulation in fp32.
            A submodule with the attribute ``full_precision = True`` stays in fp32.
        grad_sync: ``deferred`` or ``per_chunk``.
        resident: keep gathered parameters from the first forward to the end of the step.
        offload_optimizer: keep shards and optimizer state in host memory (CUDA only).
    """

    name = "fsdp2"
    shards_parameters = True

    def __init__(
        self,
        module: nn.Module,
        optimizer_factory: OptimizerFactory,
        *,
        device: torch.device,
        blocks: Sequence[nn.Module] = (),
        bf16: bool = False,
        grad_sync: str = "deferred",
        resident: bool = True,
        offload_optimizer: bool = False,
    ) -> None:
        super().__init__(module.to(device), device, grad_sync)
        broadcast_from_rank0(module)
        self.resident = resident
        named_blocks = outermost_first(blocks, module)
        mesh = init_device_mesh(device.type, (self.world_size,))
        offload = CPUOffloadPolicy() if offload_optimizer else OffloadPolicy()
        shard = partial(
            fully_shard, mesh=mesh, reshard_after_forward=not resident, offload_policy=offload
        )
        full = MixedPrecisionPolicy()
        low = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else full
        for part in module.modules():
            if getattr(part, "full_precision", False) and part is not module:
                shard(part, mp_policy=full)
        for block in named_blocks.values():
            shard(block, mp_policy=low)
        self._root = shard(module, mp_policy=low)
        self._units = [m for m in module.modules() if isinstance(m, FSDPModule)]
        for unit in self._units:  # neither setting is recursive; together they mean SUM
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        # Ranks then reduce the same list of parameters whatever each of them used.
        self._root.set_reduce_scatter_unused_params(True)
        self._trace = ForwardTrace(named_blocks)
        self.optimizer = self.build_optimizer(optimizer_factory)

    def _backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self._root.set_requires_gradient_sync(last or self.grad_sync == "per_chunk")
        self._root.set_is_last_backward(last)
        if self.resident:
            self._root.set_reshard_after_backward(last)
        if last:
            self._widen_first_uses()
        loss.backward()

    def _widen_first_uses(self) -> None:
        """Give fp32 zeros to parameters that this step's last chunk may be the first to use.

        FSDP2 keeps the chunks' sum in fp32 but reduces the last chunk's own gradient as autograd
        made it; a unit that holds both kinds fails with "expects uniform gradient dtype"
        (github.com/pytorch/pytorch/issues/196996).
        """
        for unit in self._units:
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                if all(p.unsharded_accumulated_grad is None for p in group.fsdp_params):
                    continue
                for parameter in group.fsdp_params:
                    missing = parameter.unsharded_accumulated_grad is None
                    if missing and parameter.sharded_param.requires_grad:
                        parameter.unsharded_accumulated_grad = torch.zeros_like(
                            parameter._unsharded_param, dtype=parameter.reduce_dtype
                        )

    def _step(self, max_norm: float | None) -> float:
        self._reshard()
        # A unit that was never gathered this step has no gradient to reduce.
        parameters = self.fill_unused_gradients()
        norm = torch.nn.utils.get_total_norm([gradient_of(p) for p in parameters])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if torch.isfinite(norm):
            if max_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def _reshard(self) -> None:
        """Drop gathered copies; a forward after an update would otherwise see old weights."""
        for unit in self._units:
            unit.reshard()

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        try:
            with super().inference():
                yield
        finally:
            self._reshard()

    def _swap_averages(self, masters: list[torch.Tensor]) -> None:
        self._reshard()
        super()._swap_averages(masters)
        self._reshard()

    def gradients(self) -> dict[str, torch.Tensor]:
        self._reshard()
        self.fill_unused_gradients()
        return {n: _whole(gradient_of(p)).detach().clone() for n, p in self.named_trainable()}

    def full_parameters(
        self, *, trainable_only: bool = False, prefix: str = "", owner: Owner = rank_0
    ) -> dict[str, torch.Tensor]:
        self._reshard()
        named = self.named_tensors(trainable_only=trainable_only, prefix=prefix)
        full = {}
        for name, tensor in named:
            whole = _whole(tensor).detach()
            if self.rank == owner(name):
                full[name] = whole.to("cpu", copy=True)
        return full

    def optimizer_state(self, *, owner: Owner = rank_0) -> dict[str, dict[str, torch.Tensor]]:
        full: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in self.named_trainable():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                whole = _whole(torch.as_tensor(value)).detach()
                if self.rank == owner(name):
                    full.setdefault(name, {})[key] = whole.to("cpu", copy=True)
        return full

    def load_optimizer_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_trainable())
        check_names(state, parameters, {n: tuple(p.shape) for n, p in parameters.items()})
        for name, entries in state.items():
            parameter = parameters[name]
            self.optimizer.state[parameter] = {
                key: _shard_like(value, parameter)
                if is_moment(value, parameter.shape)
                else value.clone()
                for key, value in entries.items()
            }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _shard_like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return whole.to(parameter.device)
    mesh = parameter.device_mesh
    # src_data_rank=None: every rank already holds the whole tensor, so nothing is sent.
    local = whole.to(mesh.device_type)
    return distribute_tensor(local, mesh, parameter.placements, src_data_rank=None)
