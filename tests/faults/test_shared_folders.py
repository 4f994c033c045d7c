"""Commands that write a folder of their own refuse one that a live process writes."""

import logging
from pathlib import Path

import pytest

from pixelrag import cli
from pixelrag.train import owner
from tests.faults.jobs import arguments, make_material


@pytest.mark.parametrize(
    ("command", "job"),
    [
        ("mine", "contrastive"),
        ("cache-states", "distill"),
        ("cache-logits", "distill"),
        ("index", "rag"),
    ],
)
def test_a_folder_that_is_being_written_is_refused(
    command, job, tmp_path: Path, capfd, monkeypatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pixelrag"), "handlers", [])  # theirs go with the test
    make_material(tmp_path / "material", job)
    steps = "--optim.max_steps=1"
    flags = arguments(tmp_path / "material", job, tmp_path / "unused", steps)[1:]
    if command == "mine":
        wanted = ("--model.", "--engine.", "--optim.", "--data.train=")
        flags = [flag for flag in flags if flag.startswith(wanted)]
    output = tmp_path / "out"
    with owner.held(output):
        assert cli.main([command, *flags, f"--output={output}"]) == 5
        told = capfd.readouterr().err
        assert "lives; two runs cannot share a folder. Give each its own --output" in told
        assert [path.name for path in output.iterdir()] == [owner.FILE]
