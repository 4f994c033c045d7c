"""A run's index folder, refreshes of it, and the processes that they start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pixelrag.retrieval.generations import Generations
from pixelrag.retrieval.hits import exact_search
from pixelrag.retrieval.refresh import Refresher
from pixelrag.retrieval.refresh_status import Status
from pixelrag.retrieval.snapshot import save_witness
from tests.unit.rag_stand_ins import StandInStore, make_recipe, vector, write_passages

WEIGHTS = b"the weights"
ROWS = 50  # three shards: 20, 20, 10


class Rig:
    """A run's index folder with an old generation, and refreshes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.passages = write_passages(folder / "passages.jsonl", ROWS)
        self.generations = Generations(folder / "index")
        self.log = folder / "encoder.log"
        self.flag = folder / "flag"
        self.refreshers: list[Refresher] = []
        self.witness: tuple[np.ndarray, np.ndarray] | None = None

    def refresher(self, retries: int = 0, retry_seconds: float = 0.05, **recipe: Any) -> Refresher:
        recipe["encoder_options"] = {"log": str(self.log), **recipe.get("encoder_options", {})}
        made = Refresher(
            self.generations,
            make_recipe(self.passages, **recipe),
            retries=retries,
            retry_seconds=retry_seconds,
        )
        self.refreshers.append(made)
        return made

    def start(self, refresher: Refresher, step: int = 30, weights: bytes = WEIGHTS) -> Path:
        folder = refresher.begin(step)
        (folder / "weights.safetensors").write_bytes(weights)
        if self.witness is not None:
            save_witness(folder, *self.witness)
        refresher.start(folder, step)
        return folder

    def run(self, refresher: Refresher, step: int = 30, weights: bytes = WEIGHTS) -> Status:
        self.start(refresher, step, weights)
        return refresher.wait(60)

    def assert_good(self, number: int, weights: bytes = WEIGHTS) -> None:
        generation = self.generations.open(number)
        generation.verify()
        store = StandInStore(self.passages)
        expected = np.stack([vector(weights, f"{p.title}|{p.text}") for p in store])
        assert (np.asarray(generation.vectors_ND) == expected).all()
        assert generation.ids(range(ROWS)) == store.ids
        queries = expected[:7]
        assert (
            generation.search(queries, 5).rows_Qk == exact_search(expected, queries, 5).rows_Qk
        ).all()

    def assert_old_in_place(self) -> None:
        """Nothing but the old generation is there, and it is whole."""
        left = sorted(p.name for p in self.generations.root.iterdir())
        assert left == ["gen-000001"]
        self.generations.open(1).verify()


def processes_of(folder: Path) -> list[int]:
    """Live processes whose command line names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
            zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (OSError, IndexError):
            continue
        inside = entry.name.isdigit() and str(folder).encode() in command
        if inside and not zombie and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


TRAINER = """
import sys, time
from pathlib import Path
from pixelrag.retrieval.generations import Generations
from pixelrag.retrieval.refresh import Refresher
from tests.unit.rag_stand_ins import make_recipe
folder, log, job, flag = sys.argv[1:]
options = {"faults": {job: "hang"}, "flag": flag}
where = "encoder_options" if "encode" in job else "passage_options"
recipe = {"encoder_options": {"log": log}}
recipe.setdefault(where, {}).update(options)
recipe = make_recipe(Path(folder, "passages.jsonl"), **recipe)
refresher = Refresher(Generations(Path(folder, "index")), recipe)
work = refresher.begin(30)
(work / "weights.safetensors").write_bytes(b"the weights")
refresher.start(work, 30)
time.sleep(1000)
"""


def killed_trainer(rig: Rig, job: str) -> None:
    """A trainer whose worker hangs in a job, killed there."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(rig.folder), str(rig.log), job, str(rig.flag)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        wait_until(rig.flag.exists)
        assert len(processes_of(rig.folder)) == 3  # with coordinator and worker
    finally:
        trainer.kill()
        trainer.wait()
