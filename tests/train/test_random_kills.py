"""Two jobs are killed at twenty random moments; what comes out is what an undisturbed run gives.

The moments are spread over CPU time, so that they fall alike on a slow and on a fast machine: into
loading, steps, evaluation, saving beside the steps, and exporting.
"""

import random
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.train import nursery
from tests.train.material import command, lines_of, merged

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

NUM_KILLS = 20
# Evaluates and saves so often that kills find both.
OFTEN = ["--eval.every_steps=4", "--checkpoint.every_steps=3", "--logging.every_steps=2"]


def _survives(arguments: list[str], straight: Path, killed: Path, seconds: tuple) -> None:
    nursery.run([*arguments, f"--output_dir={straight}"]).check()
    draw = random.Random(20)
    codes = []
    while codes.count(-signal.SIGPROF) < NUM_KILLS:
        after = {"seconds": draw.uniform(*seconds)}
        options = {"setup": "tests.train.faults:die_after", "payload": after}
        ended = nursery.run([*arguments, f"--output_dir={killed}"], **options)
        codes += ended.codes
        assert set(codes) <= {0, -signal.SIGPROF}, ended.text
        if codes[-1] == 0:
            break
    nursery.run([*arguments, f"--output_dir={killed}"]).check()
    assert codes.count(-signal.SIGPROF) == NUM_KILLS, "it ended early: give it more steps"
    assert _figures(killed) == _figures(straight)
    for name in ("last", "best"):
        mine, theirs = ((run / name).rglob("*.safetensors") for run in (killed, straight))
        for one, other in zip(sorted(mine), sorted(theirs), strict=True):
            a, b = load_file(one), load_file(other)
            assert a.keys() == b.keys()
            assert all(a[key].equal(b[key]) for key in b), one


def _figures(run: Path) -> list[dict]:
    """What was logged at each step; of steps done twice, the last time."""
    return list({(r["step"], tuple(r)): r for r in lines_of(run)}.values())


def test_contrastive(base, shelf, tmp_path):
    changes = {
        "output_dir": str(tmp_path / "run"),
        "model": {"name_or_path": str(shelf / "bert_dropout")},
        "data": {"eval": str(shelf / "eval.jsonl")},
        "batch": {"per_device_batch_size": 4, "gradient_accumulation_steps": 2},
        "optim": {"max_steps": 60},
    }
    arguments = [*command(tmp_path, merged(base, changes)), *OFTEN]
    _survives(arguments, tmp_path / "straight", tmp_path / "killed", (0.1, 0.7))


def test_distill(lesson, tmp_path):
    arguments = [*command(tmp_path, merged(lesson, {"optim": {"max_steps": 60}}), "distill")]
    _survives([*arguments, *OFTEN], tmp_path / "straight", tmp_path / "killed", (0.2, 0.8))
