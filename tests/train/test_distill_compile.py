"""`student.compile`: the same run, compiled once, and nothing of it in what is written."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch._dynamo.utils import counters

from pixelrag.config.distill import DistillConfig
from pixelrag.distributed.env import process_group
from pixelrag.train import distill
from tests.train.material import merged, series

COMPILERS = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, filter(None, COMPILERS))),
    reason="torch.compile needs a C++ compiler on the CPU, and there is none",
)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def trained(lesson, tmp_path, monkeypatch):
    """Trains; returns the run's folder, graphs before and after each step, and documents seen."""
    lesson = merged(
        lesson,
        # One row at a time: the last batch of an epoch is then as wide and high as the others.
        {"batch": {"per_device_batch_size": 1, "gradient_accumulation_steps": 4}},
        {"optim": {"max_steps": 4}, "eval": {"every_steps": 2, "batch_size": 3}},
    )
    found: dict[str, list] = {}
    accumulate = distill.DistillTask.accumulate

    def watched(task, batch, **options):
        found["before"].append(graphs())
        report = accumulate(task, batch, **options)
        found["after"].append(graphs())
        found["documents"] += [len(micro.cu_seqlens) - 1 for micro in batch.micro_batches]
        return report

    monkeypatch.setattr(distill.DistillTask, "accumulate", watched)

    def _run(name: str, *overrides: dict) -> tuple[Path, dict[str, list]]:
        found.update(before=[], after=[], documents=[])
        folder = tmp_path / name
        config = DistillConfig(**merged(lesson, *overrides, {"output_dir": str(folder)}))
        torch._dynamo.reset()
        counters.clear()
        with process_group("cpu", 60) as world:
            distill.train(config, world)
        found["end"] = [graphs()]
        return folder, dict(found)

    yield _run
    torch._dynamo.reset()


def names(folder: Path) -> dict[str, list[str]]:
    """Names of the tensors of every file that a run wrote."""
    result = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            result[str(path.relative_to(folder))] = sorted(file.keys())
    return result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"student": {"gradient_checkpointing": True}},
        {"student": {"attention": "sdpa"}, "loss": {"implementation": "logits"}},
    ],
    ids=["varlen", "checkpointing", "logits"],
)
def test_a_compiled_run_is_the_same_run(trained, options):
    plain, idle = trained("plain", options)
    assert idle["end"] == [0]
    # Without a compiled loss in one case: its graphs are then of the layers.
    loss = {"compile": "gradient_checkpointing" not in options.get("student", {})}
    folder, seen = trained("compiled", options, {"student": {"compile": True}, "loss": loss})
    for name in ("train/loss", "train/kd_loss", "train/grad_norm", "eval/loss"):
        assert series(folder, name) == pytest.approx(series(plain, name), rel=1e-5), name
    assert series(folder, "eval/agreement") == series(plain, "eval/agreement")
    # The self-test compiles nothing, nor does an evaluation: every graph is of a step.
    assert seen["before"] == [0, *seen["after"][:-1]]
    assert seen["end"] == seen["after"][-1:]
    # Rows of unlike documents: compiled for the first ones, and once more for any number of them.
    assert len(set(seen["documents"])) > 2
    assert seen["after"][0] > 0
    assert seen["after"][-1] - seen["after"][0] <= 2, seen
    assert "recompile_limit" not in str(counters)
    assert names(folder) == names(plain)
    assert not any("_orig_mod" in name for found in names(folder).values() for name in found)
