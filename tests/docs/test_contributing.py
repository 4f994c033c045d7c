"""What CONTRIBUTING.md says about adding things is tried: its diffs and its classes are used.

The diffs go onto a copy of the package, which one process then looks at. The classes run here.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pixelrag.cli import main
from pixelrag.distributed.env import process_group
from tests.distributed import trials
from tests.distributed.toy import make_optimizer
from tests.docs.pages import ROOT, blocks_of
from tests.train.material import text_rows, write_jsonl

BLOCKS = list(blocks_of(ROOT / "CONTRIBUTING.md"))
CHECK = """
from pathlib import Path

import torch

from pixelrag.config.base import load
from pixelrag.config.jobs import config_class
from pixelrag.data.schema import RowError, parse_row
from pixelrag.losses.kd import distill_loss
from pixelrag.losses.kd_objective import Objective
from pixelrag.losses.kd_source import Logits

words = "--student.name_or_path a --teacher.name_or_path b --data.train c --optim.max_steps 1"
config, _ = load(config_class("distill"), [*words.split(), "--loss.kind", "hellinger"])

torch.manual_seed(0)
z, t = torch.randn(5, 7, dtype=torch.float64, requires_grad=True), torch.randn(5, 7).double()
kind = Objective(kind=config.loss.kind, temperature=2.0)
labels = torch.tensor([1, 2, -100, 3, 4])
found = distill_loss(Logits(z), Logits(t), labels, objective=kind, num_tokens=4).total
kept = labels >= 0
p, q = (t[kept] / 2).softmax(-1), (z[kept] / 2).softmax(-1)
naive = 4 * (1 - (p * q).sqrt().sum(-1)).sum() / 4
assert abs(float(found) - float(naive)) < 1e-12, (found, naive)
(wanted,) = torch.autograd.grad(naive, z, retain_graph=True)
(got,) = torch.autograd.grad(found, z)
assert float((got - wanted).norm() / wanted.norm()) < 1e-10

row = {"query": "q", "positive_passages": [{"title": "T", "text": "yes"}],
       "negative_passages": [{"text": "no"}, {"text": "never"}]}
parsed = parse_row(row, Path("x.jsonl"), 1)
assert (parsed.positive.text, [d.text for d in parsed.negatives]) == ("T yes", ["no", "never"])
try:
    parse_row(row | {"positive_passages": []}, Path("x.jsonl"), 2)
except RowError as error:
    assert "positive_passages names no passage" in str(error)
else:
    raise AssertionError("a row without positives passed")
"""


def apply(diff: str, root: Path) -> list[str]:
    """Apply a unified diff by what its lines say, not by their numbers; return the files."""
    files = re.split(r"^--- a/.*\n\+\+\+ b/(.*)\n", diff, flags=re.MULTILINE)[1:]
    for name, hunks in zip(files[::2], files[1::2], strict=True):
        text = (root / name).read_text("utf-8")
        for hunk in re.split(r"^@@ .* @@\n", hunks, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] or "\n" for line in lines if line[0] in " -\n")
            new = "".join(line[1:] or "\n" for line in lines if line[0] in " +\n")
            assert text.count(old) == 1, f"{name} has no longer what CONTRIBUTING.md shows:\n{old}"
            text = text.replace(old, new)
        (root / name).write_text(text, "utf-8")
    return files[::2]


def class_of(heading: str) -> SimpleNamespace:
    """What the Python block below a heading defines."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    line = text.count("\n", 0, text.index(f"## {heading}"))
    block = next(b for b in BLOCKS if b.language == "python" and b.line > line)
    space: dict[str, object] = {"__name__": "toy"}
    exec(compile(block.text, str(block), "exec"), space)  # noqa: S102
    return SimpleNamespace(**space)


def test_a_loss_and_a_format_take_the_files_that_are_named(tmp_path: Path):
    shutil.copytree(ROOT / "pixelrag", tmp_path / "pixelrag")
    diffs = [block.text for block in BLOCKS if block.language == "diff"]
    loss, form = (apply(diff, tmp_path) for diff in diffs)
    assert loss == ["pixelrag/config/distill_parts.py", "pixelrag/losses/kd_objective.py"]
    assert form == ["pixelrag/data/forms.py"]
    done = subprocess.run(
        [sys.executable, "-c", CHECK], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_an_engine_of_its_own_passes_a_trial(monkeypatch: pytest.MonkeyPatch):
    engine = class_of("Add an engine").AloneEngine
    monkeypatch.setattr(
        trials,
        "build",
        lambda case, model, world: engine(model, make_optimizer, device=world.device),
    )
    with process_group("cpu") as world:
        found = trials.run_trial(world, {"dtype": "float64"})
    trials.assert_exact([found], 1e-10)


def test_an_encoder_of_its_own_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import CONFIG_MAPPING, MODEL_MAPPING, AutoModel

    from pixelrag.models.tiny_tokenizer import wordpiece_tokenizer

    for mapping in (CONFIG_MAPPING, MODEL_MAPPING):  # registered for this test alone
        monkeypatch.setattr(mapping, "_extra_content", dict(mapping._extra_content))
    toy = class_of("Add an encoder")
    tokenizer = wordpiece_tokenizer()
    torch.manual_seed(0)
    toy.BagModel(toy.BagConfig(vocab_size=len(tokenizer))).save_pretrained(tmp_path / "bag")
    tokenizer.save_pretrained(tmp_path / "bag")
    write_jsonl(tmp_path / "train.jsonl", text_rows(8))
    monkeypatch.chdir(tmp_path)
    line = "contrastive --model.name_or_path bag --data.train train.jsonl --optim.max_steps 2"
    words = "--batch.per_device_batch_size 4 --batch.chunk_size 2 --engine.device cpu"
    assert main([*line.split(), *words.split(), "--output_dir", "run"]) == 0
    start, trained = (AutoModel.from_pretrained(name) for name in ("bag", "run/last"))
    assert not torch.equal(trained.words.weight, start.words.weight)
