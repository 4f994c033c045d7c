"""Takes the planner's steps for real, and measures what it predicts."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from pixelrag.config import jobs
from pixelrag.config.base import JobConfig, load
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


def config_of(case: dict[str, Any]) -> JobConfig:
    """A case's configuration."""
    return load(jobs.config_class(case["job"]), case["arguments"])[0]


def measure(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Peak of what the allocator handed out in a second step, and that step's collectives."""
    config, lengths = config_of(case), Lengths(**case["lengths"])
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
        with record_function("the second step"), counter:
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
    events = profiler.profiler.kineto_results.events()
    begin = min(e.start_ns() for e in events if e.name() == "the second step")
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        if event.start_ns() >= begin:
            peak = max(peak, live)
    return peak
