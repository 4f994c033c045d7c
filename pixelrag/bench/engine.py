"""A GradCache step by engine, number of processes and synchronisation: time, memory, collectives.

Half of a rank's chunks are queries, half documents. Each case has processes of its own, one case
after the other. Calls and bytes of collectives are counted in one further step; what a rank must
send for them: a gather or reduce-scatter of a whole of P bytes costs P (W-1)/W, an all-reduce twice
that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import torch

from pixelrag.bench.cases import Ready, peak_of, row_of
from pixelrag.bench.flops import count_flops
from pixelrag.bench.memory import MIB
from pixelrag.bench.models import FIRST_WORD, MAX_NORM, adamw, biencoder, text_config
from pixelrag.bench.rows import Case, Row
from pixelrag.bench.timing import Taken, interleaved
from pixelrag.config.bench import EngineConfig, EngineWork
from pixelrag.distributed.counting import CollectiveCounter
from pixelrag.distributed.env import World, choose_device
from pixelrag.distributed.spawn import run_workers
from pixelrag.engine import build_engine
from pixelrag.gradcache import gradcache_step

SUITE = "engine"
_TIMEOUT_SECONDS = 900.0
Chunk = dict[str, torch.Tensor]


def groups(config: EngineConfig) -> list[list[Case]]:
    """Engines by world; only zero3 and fsdp2 can shard parameters."""
    work = config.work
    return [
        [
            {"world": world, "engine": engine, "grad_sync": sync, "params": params}
            for engine, sync, params in product(work.engines, work.grad_sync, work.params)
            if params == "resident" or engine in ("zero3", "fsdp2")
        ]
        for world in work.worlds
    ]


def measure(config: EngineConfig, cases: Sequence[Case]) -> Iterator[Row]:
    """One process group a case."""
    device = choose_device(config.run.device, 0)
    for case in cases:
        world = int(case["world"])
        if device.type == "cuda" and world > torch.cuda.device_count():
            there = torch.cuda.device_count()
            yield Row(SUITE, case, skipped=f"{world} devices are needed, {there} are here")
            continue
        payload = {"config": config.model_dump(mode="json"), "case": dict(case)}
        ranks = run_workers(
            "pixelrag.bench.engine:worker", payload, nproc=world, device=config.run.device,
            timeout_seconds=_TIMEOUT_SECONDS, env={"OMP_NUM_THREADS": str(config.run.threads)},
        )  # fmt: skip
        found = ranks[0]
        work = config.work
        tokens = work.chunks * work.rows * work.tokens * world
        made = Ready(
            lambda: None, tokens, None, found["flops"], None, work.precision,
            found["figures"].copy,
        )  # fmt: skip
        row = row_of(SUITE, case, made, Taken(found["wall"], found["cpu"]), device)
        # All devices together are as fast as their number says.
        mfu = None if row.mfu is None else round(row.mfu / world, 4)
        bound = None if row.bound_seconds is None else row.bound_seconds / world
        most = max((rank["memory"] for rank in ranks), key=lambda held: held["peak_mib"])
        held = most if config.run.memory else {}
        yield replace(row, mfu=mfu, bound_seconds=bound, **held)


def worker(world: World, payload: dict[str, Any]) -> dict[str, Any]:
    """Run one case on this rank; the target of `run_workers`."""
    config, case = EngineConfig(**payload["config"]), payload["case"]
    work, run = config.work, config.run
    torch.set_num_threads(run.threads)
    module = biencoder(text_config(config.text), world.device)
    queries, documents = (
        make_chunks(work, config.text.vocab_size, 2 * world.rank + side, world.device)
        for side in (0, 1)
    )
    flops = count_flops(lambda: module("query", **queries[0])[0].sum().backward())
    module.zero_grad(set_to_none=True)
    engine = build_engine(
        module, adamw, name=case["engine"], device=world.device, blocks=module.encoder.blocks(),
        precision=work.precision, grad_sync=case["grad_sync"], params=case["params"],
    )  # fmt: skip
    step = make_step(engine, queries, documents)
    for _ in range(run.warmup):
        step()
    taken = interleaved({"": step}, rounds=run.rounds, warmup=0, device=world.device)[""]
    held = peak_of(step, world.device)
    counted = Counted(engine)
    make_step(counted, queries, documents)()
    return {
        **asdict(taken),
        "flops": flops * work.chunks * world.world_size,
        "memory": held,
        "figures": summarise(counted, world.world_size),
    }


def make_chunks(work: EngineWork, vocabulary: int, seed: int, device: torch.device) -> list[Chunk]:
    """One side's chunks of a rank, of random tokens without padding."""
    draw = torch.Generator().manual_seed(seed)
    shape = (work.rows, work.tokens)
    return [
        {
            "input_ids": torch.randint(FIRST_WORD, vocabulary, shape, generator=draw).to(device),
            "attention_mask": torch.ones(shape, dtype=torch.int64, device=device),
        }
        for _ in range(work.chunks // 2)
    ]


def make_step(engine: Any, queries: list[Chunk], documents: list[Chunk]) -> Callable[[], None]:
    """One GradCache step and the optimizer's."""
    positive_B = torch.arange(sum(len(chunk["input_ids"]) for chunk in queries))

    def step() -> None:
        gradcache_step(engine, queries, documents, positive_B)
        engine.step(MAX_NORM)

    return step


class Counted:
    """An engine whose own collectives are counted, and not those of the embeddings around it.

    Attributes:
        everything: all that the engine issued.
        backward_only: the part of it that reduces gradients, and not their norms.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.everything = CollectiveCounter()
        self.backward_only = CollectiveCounter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __call__(self, role: str, **batch: Any) -> Any:
        with self.everything:
            return self._engine(role, **batch)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """As the engine's."""
        with self.everything, self.backward_only:
            self._engine.backward(loss, last=last)

    def step(self, max_norm: float | None) -> None:
        """As the engine's."""
        with self.everything:
            self._engine.step(max_norm)


def summarise(counted: Counted, world_size: int) -> dict[str, float]:
    """What an engine's collectives moved in one step.

    Returns:
        ``gathers`` and ``reductions`` (calls; of gradients, not of scalars), ``gathered_mib`` and
        ``reduced_mib`` (sizes of the whole tensors) and ``wire_mib`` (what a rank must send).
    """
    everything, backward = counted.everything, counted.backward_only
    # The counter adds up both buffers, a whole and a shard of it.
    whole = world_size / (world_size + 1)
    gathers = {name: n for name, n in everything.calls.items() if "gather" in name}
    gathered = sum(everything.bytes[name] for name in gathers) * whole / MIB
    scattered = all_reduced = 0.0
    for name, size in backward.bytes.items():
        if "reduce_scatter" in name:
            scattered += size * whole / MIB
        elif "reduce" in name:
            all_reduced += size / MIB
    share = (world_size - 1) / world_size
    return {
        "gathers": float(sum(gathers.values())),
        "gathered_mib": round(gathered, 2),
        "reductions": float(backward.gradient_reductions),
        "reduced_mib": round(scattered + all_reduced, 2),
        "wire_mib": round((gathered + scattered + 2 * all_reduced) * share, 2),
    }
