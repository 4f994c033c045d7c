"""The Python examples: short, and what they train and make is what the command would."""

import importlib.util
import json
import runpy
from pathlib import Path
from types import ModuleType

import pytest

from pixelrag.cli import main
from tests.train import nursery
from tests.train.material import command, weights_of

EXAMPLES = Path(__file__).parents[2] / "examples"
FEW = {
    "engine": {"device": "cpu"},
    "logging": {"every_steps": 1},
}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps_of(output: Path) -> list[int]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "train/loss" in line]


def test_there_is_one_for_each_job_in_under_30_lines():
    found = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert found.keys() == {"contrastive", "distill", "rag"}
    assert max(found.values()) < 30


@pytest.mark.parametrize("name", ["contrastive", "distill", "rag"])
def test_without_arguments_it_says_which(name, monkeypatch):
    monkeypatch.setattr("sys.argv", [f"{name}.py"])
    with pytest.raises(SystemExit, match=rf"python examples/{name}\.py [A-Z. jsonl]+$") as stopped:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert "\n" not in stopped.value.code


def test_contrastive(shelf, tmp_path):
    """26 rows in batches of 8; the weights are the command's to the last bit."""
    rows = str(shelf / "train.jsonl")
    more = {"batch": {"per_device_batch_size": 8}, **FEW}
    summary, similarity = example("contrastive").run(
        str(shelf / "bert"), rows, str(tmp_path / "run"), **more
    )
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    assert -1 < sum(similarity) < 1
    assert summary["final"]["eval/loss"] > 0
    config = {
        "output_dir": str(tmp_path / "by-command"),
        "model": {"name_or_path": str(shelf / "bert")},
        "data": {"train": rows, "eval": rows},
        "optim": {"num_epochs": 1},
        **more,
    }
    assert main(command(tmp_path, config)) == 0
    ours, theirs = (weights_of(tmp_path / name / "last") for name in ("run", "by-command"))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_distill(classroom, tmp_path):
    more = {"packing": {"length": 512}, "loss": {"chunk_size": 64}, **FEW}
    names = (str(classroom / name) for name in ("tied", "teacher", "chats.jsonl"))
    summary, text = example("distill").run(*names, str(tmp_path / "run"), **more)
    assert steps_of(tmp_path / "run") == [1]
    assert text.startswith("the quick")
    assert summary["final"]["eval/loss"] > 0


def test_rag(library, tmp_path):
    more = {
        "batch": {"per_device_batch_size": 8},
        "retrieval": {"k": 2},
        "index": {"factory": "Flat"},
        "refresh": {"nice": 0},
        **FEW,
    }
    names = (str(library / name) for name in ("questions", "t5", "kb.jsonl", "train.jsonl"))
    with nursery.warm_background():
        summary, answers = example("rag").run(*names, str(tmp_path / "run"), **more)
    assert steps_of(tmp_path / "run") == [1, 2]
    assert len(answers) == 9
    assert all(isinstance(answer, str) for answer in answers.values())
    assert summary["final"]["eval/recall@1"] >= 0
