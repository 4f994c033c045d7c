"""The distillation demo as a newcomer runs it, at a size that CI can afford."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pixelrag.demo import distill
from pixelrag.errors import ConfigError, ModelError

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]
# Six of thirty layers know next to nothing, and learn much in four steps.
SMALL = ["--steps", "4", "--layers", "6", "--held-out", "12"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run `pixelrag demo distill` once; return its folder and what it printed."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    result = subprocess.run(
        [sys.executable, "-m", "pixelrag", "demo", "distill", "--output", str(folder), *SMALL],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return folder, result.stdout


def test_the_student_comes_closer_to_its_teacher(demo) -> None:
    results = json.loads((demo[0] / "results.json").read_text())
    for name in ("ce_loss", "kd_loss"):
        assert results[name]["after"] < 0.8 * results[name]["before"]
    assert results["agreement"]["after"] > results["agreement"]["before"]
    assert results["tokens_per_second"]["packed"] > results["tokens_per_second"]["unpacked"] > 0


def test_the_student_loads_with_transformers_and_answers(demo) -> None:
    best = demo[0] / "run" / "best"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(best),
        AutoTokenizer.from_pretrained(best),
    )
    assert model.config.num_hidden_layers == 6
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What does len do?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    with torch.no_grad():
        logits = model(**inputs).logits
    assert torch.isfinite(logits).all()
    samples = json.loads((demo[0] / "results.json").read_text())["samples"]
    assert [sample["who"] for sample in samples] == ["question", "teacher", "student"]
    assert all(sample["text"] for sample in samples[:2])


def test_it_says_what_it_did_and_where_the_results_lie(demo) -> None:
    folder, text = demo
    for promised in (
        "$ torchrun --standalone --nproc_per_node=2 -m pixelrag distill --config",
        "cross entropy",
        "KL to the teacher",
        "same top token",
        "tokens a second",
        "teacher: ",
        f"Everything lies in {folder}",
    ):
        assert promised in text


def test_no_held_out_file_is_trained_on(demo) -> None:
    files = {}
    for split in ("train", "eval"):
        lines = (demo[0] / "chats" / f"{split}.jsonl").read_text().splitlines()
        files[split] = {json.loads(line)["source"].split(":")[0] for line in lines}
    assert files["train"]
    assert not files["train"] & files["eval"]


def test_a_missing_teacher_is_named_with_what_installs_it(monkeypatch) -> None:
    monkeypatch.setattr(distill, "PACKAGE", "llm_nowhere")
    with pytest.raises(ModelError, match=r"llm_nowhere.*pip install"):
        distill.main([])


@pytest.mark.parametrize("words", [["--nproc", "0"], ["--held-out", "0"], ["--layers", "x"]])
def test_wrong_options_end_with_code_2(words) -> None:
    with pytest.raises(ConfigError, match=r"got .*, expected"):
        distill.parse(words)
