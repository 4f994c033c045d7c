"""A process group in one process, whose other ranks hold whatever this one holds.

Engines and jobs run on it as they are: sums come out as sums of equal parts, gathered tables as
equal rows. Nothing is sent; what would have been is counted.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.futures import Future

from pixelrag.engine.deepspeed import destroy_process_group

BACKEND = "mirror"
# What a rank sends in a ring, in units of the collective's whole tensor: (W - 1) / W each way.
_RING_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "send": 1}


class Traffic:
    """Collectives of one rank.

    Attributes:
        calls: how many, by kind.
        bytes: of the whole tensors that they carry, by kind: all_gather its result, the others
            what goes in.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def add(self, kind: str, whole: int) -> None:
        """Count a collective over ``whole`` bytes."""
        self.calls[kind] += 1
        self.bytes[kind] += whole

    def clear(self) -> None:
        """Count from nothing."""
        self.calls.clear()
        self.bytes.clear()

    def sent(self, world_size: int) -> float:
        """Bytes that a rank sends where every collective is a ring."""
        share = (world_size - 1) / world_size
        whole = sum(self.bytes[k] * p for k, p in _RING_PASSES.items() if k != "send")
        return share * whole + self.bytes["send"]


TRAFFIC = Traffic()


class MirrorGroup(dist.ProcessGroup):
    """See the module; registered as the backend `mirror`."""

    copies = False
    """Sum what is scattered in a copy of it, as gloo does."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # missing in torch's stubs
        self._ranks = size
        self._in_flight: dict[int, list[torch.Tensor]] = {}

    def size(self) -> int:
        """Ranks that it plays."""
        return self._ranks

    @property
    def group_name(self) -> dist.distributed_c10d.GroupName:
        """As torch has registered it."""
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        """As registered."""
        return BACKEND

    def allreduce(  # type: ignore[override]  # the one form that C++ calls
        self, tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Sums are multiplied; of equal values, the largest and the smallest are the same."""
        for tensor in tensors:
            TRAFFIC.add("all_reduce", _size(tensor))
            if opts is not None and opts.reduceOp == dist.ReduceOp.SUM:
                tensor.mul_(self._ranks)
        return _done(list(tensors))

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """As `allreduce`."""
        return self.allreduce(tensors, opts)

    def broadcast(  # type: ignore[override]  # as above
        self, tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Everyone has it already."""
        for tensor in tensors:
            TRAFFIC.add("broadcast", _size(tensor))
        return _done(list(tensors))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Every rank's row is this one's."""
        for rows, row in zip(outputs, inputs, strict=True):
            TRAFFIC.add("all_gather", sum(map(_size, rows)))
            for place in rows:
                place.copy_(row)
        return _done(outputs)

    def all_gather_single(
        self, output: torch.Tensor, single: torch.Tensor, opts: Any = None
    ) -> Any:
        """The same, into one tensor."""
        TRAFFIC.add("all_gather", _size(output))
        output.view(self._ranks, -1).copy_(single.reshape(1, -1))
        return _done(output)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """The same, for several."""
        for output, single in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, single)
        return _done(outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None
    ) -> Any:
        """This rank's part of a sum of equal tensors."""
        TRAFFIC.add("reduce_scatter", _size(whole))
        whole = whole.clone() if self.copies else whole
        part = whole.view(self._ranks, -1)[self.rank()]
        output.view(-1).copy_(part).mul_(self._ranks)
        # gloo's work keeps the copy for as long as somebody keeps the work.
        return _done([output, whole] if self.copies else output)

    def reduce_scatter_single_coalesced(self, outputs: Any, wholes: Any, opts: Any = None) -> Any:
        """The same, for several."""
        for output, whole in zip(outputs, wholes, strict=True):
            self.reduce_scatter_single(output, whole)
        return _done(outputs)

    def reduce_scatter(  # type: ignore[override]  # as above
        self, outputs: Any, parts: Any, opts: Any = None
    ) -> Any:
        """The same, from a list of parts."""
        for output, own in zip(outputs, parts, strict=True):
            TRAFFIC.add("reduce_scatter", sum(map(_size, own)))
            output.copy_(own[self.rank()]).mul_(self._ranks)
        return _done(outputs)

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        """What is sent to a neighbour is what arrives from the other one."""
        for tensor in tensors:
            TRAFFIC.add("send", _size(tensor))
        self._in_flight[tag] = list(tensors)
        return _done(list(tensors))

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        """See `send`, which comes first."""
        for tensor, sent in zip(tensors, self._in_flight.pop(tag), strict=True):
            tensor.copy_(sent)
        return _done(list(tensors))

    def barrier(self, opts: Any = None) -> Any:
        """Nobody is late."""
        return _done([])


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _done(result: Any) -> Any:
    future: Future = Future()
    future.set_result(result)
    c10d = torch._C._distributed_c10d
    return c10d._create_work_from_future(future)  # type: ignore[attr-defined]  # missing in its stubs


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> MirrorGroup:
    return MirrorGroup(rank, size)


@contextlib.contextmanager
def mirrored(world_size: int, *, gloo: bool = False) -> Iterator[Traffic]:
    """Be rank 0 of so many; yields what is counted.

    Args:
        world_size: ranks.
        gloo: hold what gloo holds, rather than NCCL.

    Raises:
        RuntimeError: a process group exists already.
    """
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=world_size)
    TRAFFIC.clear()
    MirrorGroup.copies = gloo
    linear = F.linear
    try:
        yield TRAFFIC
    finally:
        F.linear = linear  # DeepSpeed's stage 3 puts its own in place, for the rest of a process
        destroy_process_group()
