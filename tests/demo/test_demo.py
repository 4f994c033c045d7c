"""The demo with its promises, at half its batch and two thirds of its held-out rows.

Its ranks are forked here; `test_demo_distill` runs a demo as a newcomer does.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from pixelrag.demo import contrastive
from pixelrag.demo.contrastive import main, parse
from pixelrag.errors import ConfigError
from tests.train import nursery

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run `pixelrag demo contrastive` once; return its folder and what it printed."""
    folder = tmp_path_factory.mktemp("demo") / "run"

    def run(arguments: list[str], *, nproc: int) -> float:
        nursery.run(arguments, nproc=nproc, timeout=600).check()
        return 1.0

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as text:
        patch.setattr(contrastive, "run", run)
        patch.setattr(contrastive, "GLOBAL_BATCH", 128)
        smaller = functools.partial(contrastive.build_code_search, max_eval=400)
        patch.setattr(contrastive, "build_code_search", smaller)
        assert main(["--output", str(folder), "--steps", "8"]) == 0
    return folder, text.getvalue()


def test_held_out_recall_rises_beyond_its_paired_interval(demo) -> None:
    results = json.loads((demo[0] / "results.json").read_text())["text"]
    recall = results["recall@1"]
    assert recall["after"] > recall["before"] > 0.4
    assert recall["interval"][0] > 0
    assert results["mrr"]["after"] > results["mrr"]["before"]


def test_chunks_need_less_memory_than_the_whole_batch(demo) -> None:
    memory = json.loads((demo[0] / "results.json").read_text())["text"]["peak_gib"]
    assert memory["gradcache"] < 0.8 * memory["whole batch"]


def test_the_tiles_are_learned(demo) -> None:
    tiles = json.loads((demo[0] / "results.json").read_text())["tiles"]
    assert tiles["last_loss"] < 0.75 * tiles["first_loss"]
    # Of 64 held-out pages chance finds one; eight or more by chance have a probability below 1e-5.
    assert tiles["accuracy"] >= 8 / 64 > 5 * tiles["chance"]


def test_it_says_what_it_did_and_where_the_results_lie(demo) -> None:
    folder, text = demo
    for promised in (
        "recall@1",
        "recall@10",
        "MRR",
        "rose beyond its paired interval",
        "GiB in chunks of 16",
        "smoke run",
        "Qwen/Qwen3-VL-Embedding-2B",
        f"Everything lies in {folder}",
    ):
        assert promised in text


def test_the_best_model_loads_with_transformers(demo) -> None:
    best = demo[0] / "run" / "best"
    model, tokenizer = AutoModel.from_pretrained(best), AutoTokenizer.from_pretrained(best)
    tokens = tokenizer(["return the index of an item"], return_tensors="pt")
    with torch.no_grad():
        states = model(**tokens).last_hidden_state
    assert states.shape[0] == 1
    assert torch.isfinite(states).all()


def test_no_held_out_file_is_trained_on(demo) -> None:
    files = {}
    for split in ("train", "eval"):
        lines = (demo[0] / "code" / f"{split}.jsonl").read_text().splitlines()
        files[split] = {json.loads(line)["source"].split(":")[0] for line in lines}
    assert files["train"]
    assert not files["train"] & files["eval"]


@pytest.mark.parametrize("words", [["--nproc", "0"], ["--steps", "0"], ["--part", "sound"]])
def test_wrong_options_end_with_code_2(words) -> None:
    with pytest.raises(ConfigError, match=r"got .*, expected"):
        parse(words)


def test_a_failing_command_is_one_clear_error(tmp_path) -> None:
    from pixelrag.demo.commands import run
    from pixelrag.errors import EngineError

    with pytest.raises(EngineError, match="ended with code"):
        run(["contrastive", "--config", str(tmp_path / "missing.yaml")], nproc=1)
