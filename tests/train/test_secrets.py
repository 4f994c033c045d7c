"""Secrets in the environment never reach a log, a file or a message."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from pixelrag.cli import main
from pixelrag.errors import ConfigError
from tests.train import nursery
from tests.train.material import command, merged

pytestmark = pytest.mark.distributed

CANARY = "c4nary-7f3a91e2"
VARIABLES = (
    *("PIXELRAG_READER_API_KEY", "PIXELRAG_GRADER_API_KEY", "PIXELRAG_TEACHER_TOKEN"),
    *("WANDB_API_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY"),
)


def plant(_: object = None) -> None:
    """Put a canary into every variable that may hold a secret."""
    os.environ.update({name: f"{CANARY}-{name}" for name in VARIABLES})


def assert_silent(folder: Path, said: Iterable[str]) -> None:
    """Neither what was printed nor any byte of any file has a canary; the folder has files."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
    assert CANARY not in "".join(said)


def test_a_run_its_export_and_its_inspection(tmp_path, base, shelf, monkeypatch, capfd):
    settings = {
        "output_dir": str(tmp_path / "run"),
        "data": {"eval": str(shelf / "eval.jsonl")},
        "optim": {"max_steps": 2},
        "eval": {"every_steps": 1},
        "checkpoint": {"every_steps": 1},
        "logging": {"tensorboard": False},
    }
    words = command(tmp_path, merged(base, settings))
    ended = nursery.run(words, setup="tests.train.test_secrets:plant").check()
    for name in VARIABLES:
        monkeypatch.setenv(name, f"{CANARY}-{name}")
    last = str(tmp_path / "run" / "checkpoint-2")
    assert main(["inspect", last]) == 0
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert main(["export", last, "--to", "hf", "--output", str(tmp_path / "out")]) == 0
    assert main(["validate", *words]) == 0
    told = capfd.readouterr()
    assert_silent(tmp_path, (*ended.outputs, *told))


def test_a_crash_report(tmp_path, base):
    config = merged(base, {"output_dir": str(tmp_path / "run"), "data": {"train": "gone.jsonl"}})
    words = [*command(tmp_path, config), "--debug"]
    ended = nursery.run(words, setup="tests.train.test_secrets:plant")
    assert "Traceback" in ended.text
    assert_silent(tmp_path, ended.outputs)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("data", "train"), [f"https://me:{CANARY}@host/rows.jsonl"]),
        (("model", "name_or_path"), f"https://{CANARY}@host/model"),
        (("optim", "learning_rate"), f"https://me:{CANARY}@host"),
        (("eval", "reader_url"), f"https://me:{CANARY}@host/v1"),
    ],
)
def test_a_url_with_a_password_is_refused_and_not_repeated(tmp_path, base, path, value):
    from pixelrag.config.base import load
    from pixelrag.config.contrastive import ContrastiveConfig

    config = merged(base, {"output_dir": str(tmp_path / "run"), path[0]: {path[1]: value}})
    with pytest.raises(ConfigError, match=path[1]) as caught:
        load(ContrastiveConfig, command(tmp_path, config)[1:])
    assert CANARY not in str(caught.value)
