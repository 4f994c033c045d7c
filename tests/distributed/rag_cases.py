"""What the ranks do in the tests of switching; see test_rag_switch.py."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pixelrag.distributed import hosts
from pixelrag.distributed.env import World
from pixelrag.errors import PixelragError
from pixelrag.retrieval import switch
from pixelrag.retrieval.generation import Generation, shard_bounds
from pixelrag.retrieval.generations import Generations
from pixelrag.retrieval.history import Event
from pixelrag.retrieval.hits import exact_search
from pixelrag.retrieval.refresh import Refresher
from pixelrag.retrieval.sharded import sharded_search, shards_of_rank
from pixelrag.retrieval.snapshot import hand_over, save_snapshot
from pixelrag.retrieval.switch import Switch
from pixelrag.train.rag_recipe import training_gpus
from tests.distributed.trials import DEFAULTS, build, model_for, one_step, reference_for
from tests.unit.rag_stand_ins import make_generation, make_recipe, vector, write_passages

STEP_SECONDS = 0.01


class Run:
    """One rank of a run: a switch, and on rank 0 a refresher."""

    def __init__(self, world: World, folder: str, recipe: dict[str, Any] | None = None, **options):
        self.world = world
        self.folder = Path(folder)
        self.generations = Generations(self.folder / "index")
        self.refresher: Refresher | None = None
        if world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            passages = self.folder / "passages.jsonl"
            if not passages.exists():
                write_passages(passages, 50)
            self.refresher = Refresher(
                self.generations, make_recipe(passages, **(recipe or {})), retries=0
            )
        dist.barrier()
        self.switch = Switch(self.generations, {}, refresher=self.refresher, **options)
        self.switch_seconds: list[float] = []

    def hand_over(self, step: int) -> None:
        if self.refresher is not None:
            work = self.refresher.begin(step)
            (work / "weights.safetensors").write_bytes(b"weights of step %d" % step)
            self.refresher.start(work, step)

    def first(self) -> None:
        self.switch.begin(0)
        self.hand_over(0)
        self.switch.settle(0)

    def steps(self, first: int, last: int, starts: tuple[int, ...] = (), until: int = 0) -> int:
        """Train; stop early once generation ``until`` is in use. Returns the step reached."""
        for step in range(first, last + 1):
            time.sleep(STEP_SECONDS)
            begun = time.perf_counter()
            decision = self.switch.at_step(step, start=step in starts)
            if decision.switched:
                self.switch_seconds.append(time.perf_counter() - begun)
            if decision.start:
                self.hand_over(step)
            if until and self.switch.number >= until:
                return step
        return last

    def close(self) -> None:
        self.switch.close()
        if self.refresher is not None:
            self.refresher.close()

    def told(self) -> dict[str, Any]:
        return {
            "number": self.switch.number,
            "history": [asdict(event) for event in self.switch.history],
            "in_flight": self.switch.in_flight,
            "numbers": self.generations.numbers(),
        }


def same_step(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 takes long to open a generation; nobody waits, all switch together."""
    run = Run(world, case["folder"])
    run.first()
    if world.rank == 1:
        slow = run.switch._open
        run.switch._open = lambda number: (time.sleep(0.5), slow(number))[1]
    published_at = None
    for step in range(1, 2000):
        run.steps(step, step, starts=(3,))
        if published_at is None and run.generations.newest() == 2:
            published_at = step
        if run.switch.number == 2:
            break
    run.close()
    age = run.switch.age(step)
    more = {"published_at": published_at, "switched_at": step, "age": age}
    return run.told() | more | {"seconds": run.switch_seconds}


def lag(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Every five steps a refresh, each in use exactly five steps after its snapshot."""
    run = Run(world, case["folder"], lag=5, keep=2)
    run.first()
    run.steps(1, 18, starts=(5, 10, 15))
    run.close()
    return run.told()


def replay(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """An asynchronous run, then another that follows its history with other timing."""
    flag = Path(case["folder"]) / "flag"
    fault = {"passage_options": {"faults": {"validate": "kill"}, "flag": str(flag)}}
    run = Run(world, case["folder"] + "/a", fault)
    flag_there = world.is_main and flag.touch()  # no fault while the flag is there
    del flag_there
    run.first()
    if world.is_main:
        flag.unlink()
    dist.barrier()
    step = run.steps(1, 9000, starts=tuple(range(2, 9000, 40)), until=3)
    run.close()
    global STEP_SECONDS
    before, STEP_SECONDS = STEP_SECONDS, 0.0
    again = Run(world, case["folder"] + "/b", replay=run.switch.history)
    again.first()
    again.steps(1, step)
    STEP_SECONDS = before
    again.close()
    return {"first": run.told(), "second": again.told()}


def unusable(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 cannot open generation 2; all go on with the first, then take the third."""
    run = Run(world, case["folder"])
    run.first()
    switch._VISIBLE_SECONDS = 0.1
    if world.rank == 1:
        real = run.switch._open
        run.switch._open = lambda number: real(number if number != 2 else 99)
    run.steps(1, 3, starts=(3,))
    settled = run.switch.settle(4)
    between = run.told()
    run.steps(5, 5, starts=(5,))
    run.switch.settle(6)
    run.close()
    return {"settled": settled, "between": between, "after": run.told()}


def failed(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """A refresh that fails is over on all ranks; the next one goes well."""
    flag = Path(case["folder"]) / "flag"
    fault = {"passage_options": {"faults": {"encode": "kill"}, "flag": str(flag)}}
    if world.is_main:
        flag.parent.mkdir(parents=True)
        flag.touch()
    run = Run(world, case["folder"], fault)
    run.first()
    if world.is_main:
        flag.unlink()
    dist.barrier()
    run.steps(1, 2, starts=(2,))
    run.switch.settle(3)
    between = run.told()
    run.steps(4, 4, starts=(4,))
    run.switch.settle(5)
    run.close()
    return {"between": between, "after": run.told()}


def stale(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """max_staleness stops all ranks at the same step, or warns once."""
    told = {}
    for on_stale in ("warn", "stop"):
        folder = f"{case['folder']}/{on_stale}"
        run = Run(world, folder, max_staleness=4, on_stale=on_stale)
        run.first()
        told[on_stale] = "nothing"
        for step in range(1, 8):
            try:
                run.steps(step, step)
            except PixelragError as error:
                told[on_stale] = f"{step}: {error}"
                break
        run.close()
    return told


def resume(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Checkpoint with a refresh in flight, go on in new objects; then damaged ones."""
    folder = case["folder"]
    slow = {"encoder_options": {"seconds": 0.5}}
    run = Run(world, folder, slow, lag=10)
    run.first()
    run.steps(1, 3, starts=(3,))
    state = run.switch.state_dict()
    run.steps(4, 5)
    run.close()
    again = Run(world, folder, slow, lag=10)
    if again.refresher is not None:
        again.refresher.resume(step=3)
    again.switch.load_state_dict(state)
    restored = again.told()
    again.steps(4, 13)
    again.close()
    told = {"restored": restored, "after": again.told()}
    # The interrupted refresh is lost: nothing is in flight any more, on any rank.
    lost = Run(world, folder)
    lost.switch.load_state_dict(state | {"in_flight": 3, "generation": 2, "manifest": _sha(again)})
    told["lost"] = lost.told()
    for name, changed in (("other", {"manifest": "0" * 64}), ("gone", {"generation": 7})):
        try:
            Run(world, folder).switch.load_state_dict(state | changed)
            told[name] = "nothing"
        except PixelragError as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


def _sha(run: Run) -> str:
    return run.switch.state_dict()["manifest"]


def sharded(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Shards over ranks answer as one process does, for unlike numbers of queries."""
    root = Path(case["folder"]) / "index"
    if world.is_main:
        make_generation(root, 1, shards=case["shards"])
    dist.barrier()
    path = Generations(root).path(1)
    shards = shards_of_rank(case["shards"], world.rank, world.world_size)
    generation = Generation(path, shards=lambda count: shards)
    vectors = np.stack([vector(b"1", f"row {i}") for i in range(50)])
    equal = []
    for count in case["queries"]:
        queries = vectors[: count[world.rank]] + 0.1 * world.rank
        hits = sharded_search(generation, queries, 7)
        exact = exact_search(vectors, queries, 7) if len(queries) else hits
        near = np.allclose(hits.scores_Qk, exact.scores_Qk, atol=1e-6)
        shape = list(hits.rows_Qk.shape) == [count[world.rank], 7]
        equal.append(bool((hits.rows_Qk == exact.rows_Qk).all()) and near and shape)
    bad = vectors[:2].copy()
    if world.rank == 1:
        bad[1, 0] = np.nan
    try:
        sharded_search(generation, bad, 3)
        raised = "nothing"
    except PixelragError as error:
        raised = str(error)
    rows = shard_bounds(50, case["shards"])
    return {"equal": equal, "raised": raised, "shards": shards, "bounds": rows}


def snapshot(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """The encoder's weights after two steps, as the reference has them."""
    options = DEFAULTS | case["options"]
    engine = build(options, model_for(options), world)
    reference = reference_for(DEFAULTS)
    for step in range(2):
        one_step(engine, reference, options, step, world)
    folder = Path(case["folder"]) / f"rank{world.rank}"
    folder.mkdir(parents=True)
    for name, settings in {
        "fp32": {},
        "bf16": {"bf16": True},
        "layers": {"prefix": "encoder.layers.", "trainable_only": True},
    }.items():
        (folder / name).mkdir()
        prefix = settings.pop("prefix", "encoder.")
        save_snapshot(engine, prefix, folder / name, **settings)
    save_snapshot(engine, "encoder.", None)
    try:
        save_snapshot(engine, "nobody.", folder)
        refused = "nothing"
    except PixelragError as error:
        refused = str(error)
    # Training goes on as if nothing had been.
    errors = one_step(engine, reference, options, 2, world)
    found = {
        f.parent.name: {n: t.float().tolist() for n, t in load_file(f).items()}
        for f in sorted(folder.rglob("*.safetensors"))
    }
    left = sorted(p.name for p in folder.rglob("*") if p.is_file())
    full = engine.full_parameters(prefix="encoder.head")
    return {
        "found": found,
        "left": left,
        "refused": refused,
        "errors": errors,
        "head": sorted(full),
    }


def gpus(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """GPU numbers of the ranks, on one host and on two; each rank trains on cuda:<rank>."""
    placed = World(world.rank, world.world_size, world.rank, torch.device("cuda", world.rank))
    told = {"one host": training_gpus(placed)}
    real = hosts.this_host
    hosts.this_host = lambda: f"host {world.rank}"
    try:
        return told | {"two hosts": training_gpus(placed)}
    finally:
        hosts.this_host = real


def handing_over(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """A snapshot that cannot be written ends the refresh on all ranks and nothing else."""
    engine = build(DEFAULTS, model_for(DEFAULTS), world)
    run = Run(world, case["folder"])
    run.switch.begin(0)
    hand_over(engine, run.refresher, "encoder.", 0)
    run.switch.settle(0)
    states = []
    for step, block in ((1, "part"), (2, "weights"), (3, "")):
        if world.is_main:
            part = run.generations.part(2)
            if block == "part":  # a file where the folder should be
                part.write_bytes(b"")
            elif block == "weights":
                (part / "work" / "weights.safetensors").mkdir(parents=True)
                (part / "work" / "weights.safetensors" / "x").touch()
        dist.barrier()
        assert run.switch.at_step(step, start=True).start
        hand_over(engine, run.refresher, "encoder.", step)
        run.switch.settle(step)
        states.append(run.told())
    run.close()
    return {"states": states}


def killed(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 is killed while it opens the generation that all are about to switch to."""
    run = Run(world, case["folder"])
    run.first()
    if world.rank == 1:
        run.switch._open = lambda number: os.kill(os.getpid(), signal.SIGKILL)
    run.steps(1, 1, starts=(1,))
    run.switch.settle(2)
    return run.told()


def run_named(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Run the case's function."""
    return globals()[case["function"]](world, case)


def events(history: list[dict[str, Any]]) -> list[Event]:
    """The history of `Run.told`."""
    return [Event(**event) for event in history]
