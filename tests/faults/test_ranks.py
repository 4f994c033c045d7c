"""Of two ranks one is struck, wherever it stands: the other says so at once, and the run goes on.

Each engine and each job meets each fault once (of `nan` and `disk` the jobs, for the engines' are
in `train/test_nonfinite.py`, and all write alike): a covering array, not the product. A chain is
one run that is struck again and again, and resumed each time; at its end it equals the run that
nothing happened to, in every bit.
"""

from __future__ import annotations

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.jobs import arguments, make_material
from tests.train import nursery
from tests.train.material import lines_of, weights_of

pytestmark = pytest.mark.distributed

STEPS = 8
# What strikes, where, after how many steps, and what the rank that is left says. Where a lost rank
# stood is as old as its last beat, so that only the host is certain.
LOST = r"No sign of life from rank {rank} on \S+ \("
KILLS = [
    ("forward", 1, 1, LOST),
    ("backward", 0, 2, LOST),
    ("reduction", 1, 3, LOST),
    ("evaluation", 0, 4, LOST),
    ("save", 1, 5, LOST),
    ("memory", 1, 6, r"rank 1 \(step 7, [a-z ]+\): out of memory \(.*can't allocate"),
]
NAN = ("nan", 1, 7, r"step 8: the (loss|gradient norm) is nan")
DISK = ("disk", 1, 8, r"rank 1: \S*checkpoint-8.* the disk is full")
CHAINS = {
    "fsdp2": ("contrastive", KILLS),
    "zero2": ("distill", KILLS),
    "zero3": ("distill", [*KILLS, NAN, DISK]),
    "ddp": ("rag", [*KILLS, NAN, DISK]),
}
CODES = {"nan": [7, 7], "disk": [5, 5], "memory": [6, 6]}


class Chain:
    """A run in a folder of its own, and the run that nothing happens to."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.job, self.faults = CHAINS[engine]
        self._material = folder / "material"
        self.folder = folder
        self._engine = engine
        make_material(self._material, self.job)

    def run(self, name: str, *fault: Any) -> nursery.Ended:
        flags = [
            f"--engine.name={self._engine}",
            "--engine.timeout_seconds=30",
            f"--optim.max_steps={STEPS}",
            "--eval.every_steps=4",
            "--checkpoint.every_steps=1",
        ]
        command = arguments(self._material, self.job, self.folder / name, *flags)
        payload = dict(zip(("fault", "rank", "step"), fault or (None, None, None), strict=True))
        return nursery.run(command, nproc=2, setup="tests.faults.inject:arm", payload=payload)

    def all(self) -> dict[str, Any]:
        """Strike, resume, strike; returns how each ended, and after how long."""
        found: dict[str, Any] = {"straight": self.run("straight")}
        for fault, rank, step, _ in self.faults:
            begun = time.monotonic()
            found[fault] = self.run("struck", fault, rank, step), time.monotonic() - begun
        found["resumed"] = self.run("struck")
        return found


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Chain, dict[str, Any]]]:
    """All at once: a part of the time they wait for signs of life."""
    nursery.start_server()
    made = {engine: Chain(tmp_path_factory.mktemp(engine), engine) for engine in CHAINS}
    with ThreadPoolExecutor(3) as pool:
        ended = pool.map(Chain.all, made.values())
        return dict(zip(made, zip(made.values(), ended, strict=True), strict=True))


@pytest.mark.parametrize(
    ("engine", "fault", "rank", "says"),
    [(e, fault, rank, says) for e, (_, fs) in CHAINS.items() for fault, rank, _, says in fs],
    ids=lambda value: value if str(value).isalnum() else "",
)
def test_both_ranks_stop_and_the_one_that_is_left_says_why(chains, engine, fault, rank, says):
    ended, seconds = chains[engine][1][fault]
    assert seconds < 30, "a collective waited for its timeout"
    if fault in CODES:
        assert ended.codes == CODES[fault], ended.text
        told = ended.outputs[0]
        assert fault == "memory" or ended.outputs[1] == ""
    else:
        assert ended.codes[rank] == -signal.SIGKILL, ended.text
        assert ended.codes[1 - rank] == 6, ended.text
        told = ended.outputs[1 - rank]
    assert told.count("error: ") == 1, ended.text
    assert re.search(says.format(rank=rank), told[told.index("error: ") :]), ended.text
    assert "Traceback" not in ended.text


@pytest.mark.parametrize("engine", CHAINS)
def test_the_run_that_was_struck_equals_the_one_that_was_not(chains, engine):
    chain, found = chains[engine]
    found["straight"].check()
    assert re.search(rf"resuming from .*, step [5-7] of {STEPS}", found["resumed"].check().text)
    struck, straight = chain.folder / "struck", chain.folder / "straight"
    figures = [lines_of(struck), lines_of(straight)]
    for line in (line for lines in figures for line in lines):
        line.pop("index/generation", None)  # counts attempts
    assert figures[0] == figures[1]
    for name in ("last", "best", f"checkpoint-{STEPS}"):
        if chain.job == "rag" and name != f"checkpoint-{STEPS}":
            continue  # in parts of their own; the checkpoint holds them all
        mine, theirs = weights_of(struck / name), weights_of(straight / name)
        assert mine.keys() == theirs.keys()
        assert all(mine[key].equal(theirs[key]) for key in theirs), name
    assert [path for path in struck.rglob(".*") if path.name != ".lock"] == []
