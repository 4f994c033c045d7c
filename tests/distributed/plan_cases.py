"""Takes the planner's steps for real, and measures what it predicts."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.profiler._utils import traverse_dfs

from benchmarks.counts import Case
from pixelrag.distributed.counting import CollectiveCounter
from pixelrag.distributed.env import World
from pixelrag.plan.workload import Lengths, workload_of
from pixelrag.train.job import engine_for

KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
}


@contextlib.contextmanager
def _tidy() -> Iterator[None]:
    """Collect garbage often: DeepSpeed leaves cycles that hold tensors until that is done."""
    thresholds = gc.get_threshold()
    gc.set_threshold(30, 2, 1)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def measure(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Peak of what the allocator handed out in a second step, and that step's collectives."""
    case = Case(**case)
    config, lengths = case.config(), Lengths(**case.lengths)
    gc.collect()  # what an earlier case left must not be seen to go
    counter, linear = CollectiveCounter(), F.linear
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        job = workload_of(config, lengths, world.world_size)
        _fill(job.container, *job.frozen)
        job.begin()
        engine = engine_for(config, world, job.container, job.blocks, part_of=job.part_of)
        job.step(engine)
        engine.step(1.0)
        gc.collect()
        with record_function("the second step"), counter, _tidy():
            job.step(engine)
            engine.step(1.0)
    F.linear = linear  # DeepSpeed's stage 3 puts its own in place, for the rest of a process
    return {
        "peak": _peak(profiler),
        "calls": {KINDS[k]: n for k, n in counter.calls.items() if k in KINDS},
        "bytes": {
            # The counter adds up what goes in and what comes out.
            KINDS[k]: n * world.world_size // (world.world_size + 1) if "_base" in k else n
            for k, n in counter.bytes.items()
            if k in KINDS
        },
        "others": [k for k in counter.calls if k not in KINDS],
    }


@torch.no_grad()
def _fill(*modules: torch.nn.Module) -> None:
    """Contents, without which a loss is not finite and a step is not taken."""
    generator = torch.Generator().manual_seed(0)
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator).mul_(0.02))


def _peak(profiler: profile) -> int:
    """Bytes alive at most in the second step.

    By address: what a thread of gloo frees is not seen until the address is used again.
    """
    begin, events = 0, []
    for event in traverse_dfs(profiler.profiler.kineto_results.experimental_event_tree()):
        kind, fields = event.typed
        if event.name == "the second step":
            begin = event.start_time_ns
        elif kind.name == "Allocation":
            events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    alive: dict[int, int] = {}
    total = peak = 0
    for time_ns, address, size in sorted(events):
        total -= alive.pop(address, 0)
        if size > 0:
            alive[address] = size
            total += size
        if time_ns >= begin:
            peak = max(peak, total)
    return peak
