"""The engine protocol: many forward and backward passes, one exact gradient, one step.

A job hands the engine one container module that holds every trained parameter. Per optimizer
step it runs any number of ``engine(role, **batch)`` forwards and ``engine.backward(loss,
last=...)`` backwards, then one ``engine.step(max_norm)``. What every engine promises:

Sum
    A rank's losses are partial sums of the global loss, and the reduction sums. After
    ``backward(..., last=True)`` each gradient is the one that a single process holding the whole
    global batch would have.
Order
    All ranks run the same sequence of forwards. Where parameters are sharded this is checked
    before the step, and a difference raises on all ranks, naming it.
Last
    Exactly one ``last=True`` a step; ``step`` without it raises.
Clip
    Only in ``step``, by the global norm.
fp32
    Gradients accumulate over chunks in at least fp32, also where compute is bf16.
Zero
    A trained parameter that no rank used in a step has a zero gradient, not none: momentum and
    weight decay act on it, as they must where it lies in a flat partition.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pixelrag.distributed.collectives import gather_with_grad
from pixelrag.engine.order import ForwardTrace
from pixelrag.engine.state import AVERAGE
from pixelrag.errors import EngineError

logger = logging.getLogger("pixelrag")

NamedParameters = list[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], torch.optim.Optimizer]
# Which rank receives a parameter, by its name; every rank must answer alike.
Owner = Callable[[str], int]


def rank_0(name: str) -> int:
    """Owner of everything: the rank that writes what is written once."""
    return 0


class Engine(ABC):
    """Base of all engines; see the module's docstring for the contract.

    Attributes:
        name: ``ddp``, ``zero0`` .. ``zero3`` or ``fsdp2``.
        module: the container module as the engine holds it.
        optimizer: the torch optimizer whose ``param_groups`` carry the learning rates.
        device: where batches belong.
        touches_every_chunk: True where every forward must use the same submodules, chunk after
            chunk, for parameters to stay resident (ZeRO-3 records one trace).
        keeps_graphs: False where a submodule's forward loses count of an earlier one that has not
            gone backward yet.
        resident: whether whole parameters stay on the device over a step.
        num_steps: calls of ``step`` since the engine was built.
    """

    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer
    shards_parameters = False
    touches_every_chunk = False
    keeps_graphs = True
    resident = True

    def __init__(self, module: nn.Module, device: torch.device, grad_sync: str) -> None:
        self.module = module
        self.device = device
        self.grad_sync = grad_sync
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._trace: ForwardTrace | None = None
        self._started = False  # a backward of this step has run
        self._finished = False
        self.num_steps = 0
        check_container(module)

    def __call__(self, role: str, **batch: Any) -> Any:
        """Run the container's forward for one role, e.g. ``query``, ``document``."""
        if self._trace is not None:
            self._trace.enter(role)
        return self._forward(role, **batch)

    def _forward(self, role: str, **batch: Any) -> Any:
        return self.module(role, **batch)

    def gather(self, local_BD: torch.Tensor) -> torch.Tensor:
        """All-gather rows of equally shaped tensors; the backward sums over ranks."""
        return gather_with_grad(local_BD)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Accumulate the gradient of ``loss``; with ``last`` also reduce over all ranks.

        Args:
            loss: scalar, this rank's partial sum of the global loss.
            last: True for exactly one call a step, the final one.

        Raises:
            EngineError: called again after ``last``; or ranks ran different forwards.
        """
        if self._finished:
            raise EngineError(
                f"rank {self.rank}: backward() after backward(last=True); call step() first"
            )
        # The first check covers GradCache's pass without a graph before any gradient moves.
        if self._trace is not None and (last or not self._started):
            self._trace.check()
        self._started = True
        self._backward(loss, last=last)
        self._finished = last

    def step(self, max_norm: float | None = None) -> float:
        """Clip by the global norm, update, clear gradients; return the norm before clipping.

        A norm that is not finite leaves the weights as they are and is returned as it is.

        Raises:
            EngineError: no ``backward(last=True)`` came before.
        """
        if not self._finished:
            raise EngineError(
                f"rank {self.rank}: step() before backward(last=True); gradients are not reduced"
            )
        norm = self._step(max_norm or None)
        self._started = self._finished = False
        self.num_steps += 1
        return norm

    @abstractmethod
    def _backward(self, loss: torch.Tensor, *, last: bool) -> None: ...

    @abstractmethod
    def _step(self, max_norm: float | None) -> float: ...

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Eval mode without gradients; a collective where parameters are sharded."""
        was_training = self.module.training
        self.module.eval()
        # Where parameters are whole, ranks may encode unlike numbers of batches.
        free = None if self.shards_parameters else self._trace
        try:
            with torch.no_grad(), free.paused() if free else contextlib.nullcontext():
                yield
        finally:
            self.module.train(was_training)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The weights are their moving averages in the body, and what they were after it.

        A collective, between steps. Before the first step there are no averages: the weights are
        their own. Needs an optimizer whose state has `AVERAGE`.
        """
        masters = [m for m in self._masters() if AVERAGE in self.optimizer.state.get(m, ())]
        if masters:
            self._swap_averages(masters)
        yield
        # Not after an error: the others may never come to this collective.
        if masters:
            self._swap_averages(masters)

    def _masters(self) -> list[torch.Tensor]:
        """What the optimizer updates, as it holds it."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def _swap_averages(self, masters: list[torch.Tensor]) -> None:
        for master in masters:
            average, kept = self.optimizer.state[master][AVERAGE], master.detach().clone()
            master.copy_(average)
            average.copy_(kept)

    @abstractmethod
    def gradients(self) -> dict[str, torch.Tensor]:
        """Full reduced gradients by parameter name, between ``backward(last=True)`` and ``step``.

        A collective; every rank gets the tensors. For tests and ``pixelrag verify``.
        """

    @abstractmethod
    def full_parameters(
        self, *, trainable_only: bool = False, prefix: str = "", owner: Owner = rank_0
    ) -> dict[str, torch.Tensor]:
        """Full master weights on the CPU by name: on each rank those that it owns.

        A collective. Buffers are included unless ``trainable_only``; names that do not begin with
        ``prefix`` are left out, and not gathered.
        """

    @abstractmethod
    def optimizer_state(self, *, owner: Owner = rank_0) -> dict[str, dict[str, torch.Tensor]]:
        """Full optimizer state of what a rank owns: name -> {key -> tensor}; a collective."""

    @abstractmethod
    def load_optimizer_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Install what ``optimizer_state`` returned; every rank passes the whole state."""

    def shape_of(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """A parameter's shape before any sharding."""
        return tuple(parameter.shape)

    def named_trainable(self) -> NamedParameters:
        """The trained parameters in registration order."""
        return [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]

    def named_tensors(self, *, trainable_only: bool, prefix: str) -> list[tuple[str, torch.Tensor]]:
        """What ``full_parameters`` gathers, as this rank holds it."""
        named: list[tuple[str, torch.Tensor]] = list(self.named_trainable())
        if not trainable_only:
            named = list(self.module.state_dict(keep_vars=True).items())
        return [(name, tensor) for name, tensor in named if name.startswith(prefix)]

    def build_optimizer(self, factory: OptimizerFactory) -> torch.optim.Optimizer:
        """Call the factory and make sure that it took exactly the trained parameters.

        Raises:
            EngineError: a parameter was left out, or lies outside the module, where no engine
                would reduce it and ranks would drift apart.
        """
        named = self.named_trainable()
        optimizer = factory(named)
        taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
        left_out = [n for n, p in named if id(p) not in taken]
        if left_out:
            raise EngineError(
                f"the optimizer leaves out {len(left_out)} trained parameters, first "
                f"{left_out[0]!r}; freeze them (requires_grad=False) or give them to it"
            )
        outside = len(taken) - len(named)
        if outside:
            raise EngineError(
                f"the optimizer holds {outside} parameters that are not in the module; every "
                "trained parameter, the temperature too, must be inside it"
            )
        return optimizer

    def fill_unused_gradients(self) -> list[nn.Parameter]:
        """Give a zero gradient to every trained parameter that has none; return them all.

        Ranks then reduce lists of the same parameters whatever each of them used; unlike lists
        would pair up unlike gradients, silently where their shapes agree. A parameter that no
        rank used in a step has a zero gradient, on every engine alike: the flat partitions of
        ZeRO cannot leave it out of the update.
        """
        parameters = [p for _, p in self.named_trainable()]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return parameters


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """The gradient of a parameter that has one, after a reduction or `fill_unused_gradients`."""
    assert parameter.grad is not None
    return parameter.grad


def check_container(module: nn.Module) -> None:
    """Refuse what the sharding engines cannot hold, whichever engine is chosen now.

    Raises:
        EngineError: no trainable parameter, or one of zero dimensions or of low precision.
    """
    trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if not trainable:
        raise EngineError("the module has no trainable parameter; nothing would be trained")
    for name, parameter in trainable:
        if parameter.dim() == 0:
            raise EngineError(
                f"parameter {name} has shape []; ZeRO and FSDP2 shard dimension 0: "
                "give it the shape [1]"
            )
        if parameter.dtype not in (torch.float32, torch.float64):
            raise EngineError(
                f"parameter {name} is trained in {parameter.dtype}, where the sum over chunks "
                "stalls and small updates round to nothing; load the model in float32 and let "
                "engine.precision: bf16 choose the compute type"
            )


@torch.no_grad()
def broadcast_from_rank0(module: nn.Module) -> None:
    """Make every rank start from rank 0's parameters and buffers."""
    if dist.get_world_size() > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, 0)


def outermost_first(blocks: Sequence[nn.Module], module: nn.Module) -> dict[str, nn.Module]:
    """Name the blocks by their path in ``module``; unknown blocks raise.

    Raises:
        EngineError: a block is not a submodule of ``module``.
    """
    names = {id(m): n for n, m in module.named_modules()}
    missing = [type(b).__name__ for b in blocks if id(b) not in names]
    if missing:
        raise EngineError(f"blocks {missing} are not submodules of {type(module).__name__}")
    return {names[id(b)]: b for b in blocks}
