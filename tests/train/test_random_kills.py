"""Each job is killed at random moments; what comes out is what an undisturbed run gives.

The moments are spread over CPU time, so that they fall alike on a slow and on a fast machine: into
loading, steps, evaluation, saving beside the steps, exporting, and the building of an index.
"""

import random
import signal
from collections.abc import Collection
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pixelrag.retrieval.generations import Generations
from tests.distributed import rag_runs
from tests.train import nursery
from tests.train.material import command, lines_of, merged, text_rows, write_jsonl

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

NUM_KILLS = 20
# Evaluates and saves so often that kills find both.
OFTEN = ["--eval.every_steps=4", "--checkpoint.every_steps=3", "--logging.every_steps=2"]


def _survives(
    arguments: list[str],
    straight: Path,
    killed: Path,
    seconds: tuple[float, float],
    *,
    nproc: int = 1,
    num_kills: int = NUM_KILLS,
    but: Collection[str] = (),
) -> None:
    """Kill a run between so many CPU seconds after its start; figures named in `but` may differ."""
    nursery.run([*arguments, f"--output_dir={straight}"], nproc=nproc).check()
    draw = random.Random(20)
    for number in range(num_kills):
        fault = {"seconds": draw.uniform(*seconds), "rank": draw.choice([*range(nproc), None])}
        options = {"setup": "tests.train.faults:die_after", "payload": fault}
        job = nursery.start([*arguments, f"--output_dir={killed}"], nproc=nproc, **options)
        code = job.wait_for_one()
        if code == 0 and number > num_kills // 2:
            break  # a machine so fast that it is done already
        assert code == -signal.SIGPROF, job.outputs()  # where it is 0: give it more steps
    nursery.run([*arguments, f"--output_dir={killed}"], nproc=nproc).check()
    assert _figures(killed, but) == _figures(straight, but)
    for name in ("last", "best"):
        mine, theirs = ((run / name).rglob("*.safetensors") for run in (killed, straight))
        for one, other in zip(sorted(mine), sorted(theirs), strict=True):
            a, b = load_file(one), load_file(other)
            assert a.keys() == b.keys()
            assert all(a[key].equal(b[key]) for key in b), one


def _figures(run: Path, but: Collection[str]) -> list[dict]:
    """What was logged at each step; of steps done twice, the last time."""
    last = {(r["step"], tuple(r)): r for r in lines_of(run)}.values()
    return [{name: value for name, value in row.items() if name not in but} for row in last]


def test_contrastive(base, shelf, tmp_path):
    changes = {
        "output_dir": str(tmp_path / "run"),
        "model": {"name_or_path": str(shelf / "bert_dropout")},
        "data": {"eval": str(shelf / "eval.jsonl")},
        "batch": {"per_device_batch_size": 4, "gradient_accumulation_steps": 2},
        "optim": {"max_steps": 150},
    }
    arguments = [*command(tmp_path, merged(base, changes)), *OFTEN]
    _survives(arguments, tmp_path / "straight", tmp_path / "killed", (0.1, 0.7))


def test_two_ranks_that_share_the_state(base, shelf, tmp_path):
    """Either rank dies, or both do. Batches are of two data sets in turn."""
    more = write_jsonl(tmp_path / "more.jsonl", text_rows(14, first=60))
    changes = {
        "output_dir": str(tmp_path / "run"),
        "model": {"name_or_path": str(shelf / "bert_dropout")},
        "data": {
            "train": [str(shelf / "train.jsonl"), more],
            "mixing": "homogeneous",
            "eval": str(shelf / "eval.jsonl"),
        },
        "batch": {"per_device_batch_size": 2, "gradient_accumulation_steps": 2},
        "optim": {"max_steps": 48},
        "engine": {"name": "fsdp2"},
    }
    arguments = [*command(tmp_path, merged(base, changes)), *OFTEN]
    folders = tmp_path / "straight", tmp_path / "killed"
    _survives(arguments, *folders, (0.3, 1.0), nproc=2, num_kills=6)


def test_distill(lesson, tmp_path):
    arguments = [*command(tmp_path, merged(lesson, {"optim": {"max_steps": 150}}), "distill")]
    _survives([*arguments, *OFTEN], tmp_path / "straight", tmp_path / "killed", (0.1, 0.5))


def test_rag(tmp_path):
    rag_runs.make_material(tmp_path)
    arguments = [
        "rag",
        *rag_runs.flags(tmp_path, tmp_path / "run"),
        "--batch.per_device_batch_size=8",
        "--optim.max_steps=75",
        "--refresh.every_steps=25",
        "--refresh.deterministic_lag=3",
    ]
    # A run that is killed before its first checkpoint numbers its generations on.
    attempts = ("index/generation", "index/refreshing")
    killed = tmp_path / "killed"
    _survives([*arguments, *OFTEN], tmp_path / "straight", killed, (0.1, 0.5), but=attempts)
    generations = Generations(killed / "index")
    kept = [generations.open(number).manifest for number in generations.numbers()]
    assert [manifest.step for manifest in kept][-2:] == [25, 50]
    assert all(0 <= manifest.validation["training_parity"] < 1e-5 for manifest in kept)
