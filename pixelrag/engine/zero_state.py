"""Optimizer state in and out of ZeRO's flat partitions, by parameter name.

ZeRO keeps one flat fp32 tensor per parameter group (stages 1, 2) or sub-group (stage 3) on each
rank, and the torch optimizer's state lives on those. DeepSpeed's own checkpoints carry the
partitioning with them; here each parameter's slice is found and the whole tensor assembled, so
that any engine can read it. Works before the first step too, when DeepSpeed has no state yet.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pixelrag.engine.state import OptimizerState, check_names, is_moment


@dataclass(frozen=True, slots=True)
class Slice:
    """Where this rank's part of a parameter lies."""

    flat: torch.Tensor  # the optimizer's flat parameter
    flat_start: int
    start: int  # first element of the parameter that this rank holds
    numel: int


class ZeroState(ABC):
    """Reads and writes optimizer state through per-parameter slices of flat tensors."""

    def __init__(self, zero_optimizer: Any) -> None:
        self._zero = zero_optimizer
        self._inner: torch.optim.Optimizer = zero_optimizer.optimizer

    @abstractmethod
    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The whole parameter's shape."""

    @abstractmethod
    def slice_of(self, parameter: nn.Parameter) -> Slice | None:
        """This rank's slice, or None when it holds no part of the parameter."""

    @abstractmethod
    def flats(self) -> list[torch.Tensor]:
        """This rank's flat optimizer parameters."""

    @abstractmethod
    def rewriting(self) -> AbstractContextManager[None]:
        """Let the model compute with what the flat parameters hold at the end of the body."""

    def gather(
        self, named: list[tuple[str, nn.Parameter]], keeps: Callable[[str], bool]
    ) -> OptimizerState:
        """Assemble the whole state of the parameters that this rank keeps; a collective."""
        full: OptimizerState = {}
        template: dict[str, torch.Tensor]
        template = next((self._inner.state[f] for f in self.flats() if f in self._inner.state), {})
        for name, parameter in named:
            part = self.slice_of(parameter)
            shape = self.shape(parameter)
            for key, example in template.items():
                if example.dim() == 0:  # a step count, equal for all
                    value = example.detach().to("cpu", copy=True)
                else:
                    value = self._assemble(parameter, part, key, shape)
                if keeps(name):
                    full.setdefault(name, {})[key] = value.cpu()
        return full

    def _assemble(
        self, parameter: nn.Parameter, part: Slice | None, key: str, shape: tuple[int, ...]
    ) -> torch.Tensor:
        whole = torch.zeros(_numel(shape), dtype=torch.float32, device=parameter.device)
        if part is not None and part.numel > 0:
            source = self._inner.state[part.flat][key].narrow(0, part.flat_start, part.numel)
            whole.narrow(0, part.start, part.numel).copy_(source)
        if dist.get_world_size() > 1:
            dist.all_reduce(whole)
        return whole.view(shape)

    def load(self, named: list[tuple[str, nn.Parameter]], state: OptimizerState) -> None:
        """Write the slices of ``state`` that belong to this rank.

        Raises:
            CheckpointError: names or shapes do not fit.
        """
        shapes = {n: self.shape(p) for n, p in named}
        check_names(state, dict(named), shapes)
        template = next(iter(state.values()), {})
        first = next(iter(state), "")
        for flat in self.flats():
            for key, value in template.items():
                moment = is_moment(value, shapes[first])
                fresh = torch.zeros_like(flat.data) if moment else value.clone()
                self._inner.state[flat][key] = fresh
        for name, parameter in named:
            part = self.slice_of(parameter)
            if part is None or part.numel == 0 or name not in state:
                continue
            for key, value in state[name].items():
                if is_moment(value, shapes[name]):
                    source = value.reshape(-1).narrow(0, part.start, part.numel)
                    target = self._inner.state[part.flat][key]
                    target.narrow(0, part.flat_start, part.numel).copy_(source)


class Zero12State(ZeroState):
    """Stages 1 and 2: one flat partition per parameter group."""

    def flats(self) -> list[torch.Tensor]:
        return list(self._zero.single_partition_of_fp32_groups)

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        yield
        self._zero.update_lp_params()

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        return tuple(parameter.shape)

    def slice_of(self, parameter: nn.Parameter) -> Slice | None:
        mapping = _of_deepspeed(parameter)._hp_mapping
        if mapping is None:
            return None
        flat = self._zero.single_partition_of_fp32_groups[mapping.param_group_index]
        high, low = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Slice(flat, high.start, low.start, high.numel)


class Zero3State(ZeroState):
    """Stage 3: every rank holds an equal, padded share of every parameter."""

    def flats(self) -> list[torch.Tensor]:
        return list(self._zero.fp32_partitioned_groups_flat)

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        # As in DeepSpeed's own step: gathered copies go, shards are written, small ones return.
        self._zero._partition_all_parameters()
        yield
        for group in range(len(self.flats())):
            self._zero._reassign_or_swap_out_partitioned_parameters(group)
        if kept := self._zero.persistent_parameters:
            kept[0].all_gather(kept)

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        return tuple(_of_deepspeed(parameter).ds_shape)

    def slice_of(self, parameter: nn.Parameter) -> Slice | None:
        group, offset, share = self._zero.grad_position[self._zero.get_param_id(parameter)]
        start = dist.get_rank() * share
        numel = max(0, min(share, _of_deepspeed(parameter).ds_numel - start))
        if numel == 0:
            return None
        return Slice(self._zero.fp32_partitioned_groups_flat[group], offset, start, numel)


def _of_deepspeed(parameter: nn.Parameter) -> Any:
    """The parameter, with the attributes that DeepSpeed has hung on it."""
    return parameter


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
