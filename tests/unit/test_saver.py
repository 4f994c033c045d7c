"""What the saver does with a checkpoint that does not fit, and with the ones before it."""

import os
from types import SimpleNamespace

import pytest
import torch

from pixelrag.config.base import load
from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.distributed.env import process_group
from pixelrag.engine import build_engine
from pixelrag.errors import CheckpointError
from pixelrag.train.checkpoint import verify_dir
from pixelrag.train.run_state import RunState
from pixelrag.train.saver import Saver


@pytest.fixture
def saver(tmp_path):
    flags = ["--model.name_or_path=-", "--data.train=-", "--optim.max_steps=9"]
    flags += [f"--output_dir={tmp_path}", "--checkpoint.keep_last=1"]
    with process_group("cpu"):
        engine = build_engine(
            torch.nn.Linear(3, 2),
            lambda named: torch.optim.AdamW([p for _, p in named]),
            name="ddp",
            device=torch.device("cpu"),
        )
        yield Saver(tmp_path, engine, load(ContrastiveConfig, flags)[0], lambda _: None)


def test_what_does_not_fit_is_refused_before_the_old_one_goes(saver, tmp_path, monkeypatch):
    saver.save(RunState(1, {}, None, "", []))
    saver.finish()
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=7, f_frsize=1))
    with pytest.raises(CheckpointError, match=r"checkpoint-2: needs about .* nothing was written"):
        saver.save(RunState(2, {}, None, "", []))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    verify_dir(tmp_path / "checkpoint-1")
    monkeypatch.undo()
    saver.save(RunState(2, {}, None, "", []))
    saver.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_what_does_not_fit_after_all_leaves_the_old_one(saver, tmp_path, monkeypatch):
    """A disk that others fill while it is written."""
    saver.save(RunState(1, {}, None, "", []))
    saver.finish()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Saver, "_write_own", full)
    saver.save(RunState(2, {}, None, "", []))
    with pytest.raises(CheckpointError, match="the disk is full"):
        saver.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    verify_dir(tmp_path / "checkpoint-1")
