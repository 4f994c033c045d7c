"""Several sets and text phases in a whole run, and what of them a run refuses."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.train import nursery
from tests.train.material import command, lines_of, merged, text_rows, write_jsonl

pytestmark = pytest.mark.distributed


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, str]:
    """Two sets, one of them a folder by PixelRAG's conventions, and a folder of text."""
    split, text = tmp_path / "split", tmp_path / "text"
    split.mkdir()
    (text / "chunk_0").mkdir(parents=True)
    (text / "chunk_1").mkdir()
    write_jsonl(split / "train_hn.jsonl", text_rows(18))
    write_jsonl(split / "train.jsonl", [{"not": "read"}])
    write_jsonl(split / "eval.jsonl", text_rows(5, first=40))
    write_jsonl(tmp_path / "other.jsonl", text_rows(9, first=20))
    for number in range(2):
        write_jsonl(text / f"chunk_{number}" / "filtered_hn.jsonl", text_rows(6, first=60))
    return {"split": str(split), "other": str(tmp_path / "other.jsonl"), "text": str(text)}


def test_a_resumed_run_is_in_the_same_phase_on_another_world(tmp_path, base, sets):
    settings = {
        "data": {
            "train": [sets["split"], sets["other"]],
            "eval": sets["split"],
            "mixing": "homogeneous",
            "weights": [1, 2],
            "text": sets["text"],
            "text_warmup_steps": 2,
            "text_curriculum": True,
        },
        "batch": {"gradient_accumulation_steps": 2},
        "optim": {"max_steps": 10},
        "checkpoint": {"every_steps": 4},
    }

    def run(name: str, *overrides: dict, nproc: int = 1) -> Path:
        config = merged(base, settings, *overrides, {"output_dir": str(tmp_path / name)})
        nursery.run(command(tmp_path, config), nproc=nproc).check()
        return tmp_path / name

    straight = run("straight")
    shares = [line["train/text_share"] for line in lines_of(straight) if "train/loss" in line]
    # Steps of two batches: a warm-up of 2, then 1/2, 1/3, 1/5 and 0 for two steps each.
    assert shares == [1, 1, 0.5, 0.5, 0, 0.5, 0, 0, 0, 0]
    state = json.loads((straight / "checkpoint-4" / "state.json").read_text())
    assert state["position"]["sampler"]["phase"] == "text curriculum 2 of 4"
    assert (straight / "best").is_dir()

    half = {"batch": {"per_device_batch_size": 4}}
    resume = {"checkpoint": {"resume": str(straight / "checkpoint-4")}}
    resumed = run("resumed", half, resume, nproc=2)
    expected = [line for line in lines_of(straight) if line["step"] > 4]
    for name in ("train/text_share", "train/loss", "train/grad_norm", "eval/loss"):
        got = [line[name] for line in lines_of(resumed) if name in line]
        wanted = [line[name] for line in expected if name in line]
        assert got == pytest.approx(wanted, rel=1e-4), name


def test_text_with_images_is_refused_before_the_model_is_loaded(tmp_path, base, shelf):
    data = {"text": str(shelf / "mixed.jsonl"), "text_warmup_steps": 1}
    config = merged(base, {"data": data, "output_dir": str(tmp_path / "run")})
    ended = nursery.run(command(tmp_path, config), nproc=2)
    assert ended.codes == [3, 3]
    assert "tiles/0.png is an image, and data.text is for rows of text" in ended.text


def test_the_flags_of_pixelrag_give_the_run_of_our_options(tmp_path, shelf):
    """Images, text, LoRA on both towers: the same weights, bit for bit."""
    data = ["--train-jsonl", str(shelf / "mixed.jsonl"), "--eval-jsonl"]
    data += [str(shelf / "mixed_eval.jsonl"), "--text-data-dir", str(tmp_path)]
    write_jsonl(tmp_path / "text.jsonl", text_rows(9))
    here = ["--engine.device", "cpu", "--engine.precision", "fp32", "--num-workers", "0"]
    theirs = [
        *("contrastive", "--preset", "pixelrag", "--model", str(shelf / "qwen3_vl"), *data, *here),
        *("--batch-size", "4", "--grad-cache-chunk", "2", "--num-hard-negatives", "1"),
        *("--text-warmup-steps", "1", "--max-steps", "3", "--warmup-steps", "1", "--lr", "1e-3"),
        *("--lora-r", "4", "--lora-alpha", "8", "--lora-dropout", "0", "--lora-vit"),
        *("--eval-steps", "0", "--save-steps", "0", "--max-num-visual-tokens", "16", "--no-wandb"),
        *("--output-dir", str(tmp_path / "theirs")),
    ]
    ours = {
        "output_dir": str(tmp_path / "ours"),
        "model": {"name_or_path": str(shelf / "qwen3_vl"), "max_visual_tokens": 16},
        "lora": {"enabled": True, "r": 4, "alpha": 8, "dropout": 0, "vision": True},
        "data": {
            "train": str(shelf / "mixed.jsonl"),
            "eval": str(shelf / "mixed_eval.jsonl"),
            "text": str(tmp_path),
            "text_warmup_steps": 1,
            "num_hard_negatives": 1,
            "drop_last": True,
        },
        "batch": {"per_device_batch_size": 4, "chunk_size": 2},
        "optim": {
            "learning_rate": 1e-3,
            "max_steps": 3,
            "warmup_steps": 1,
            "scheduler": "constant",
        },
        "eval": {"max_rows": 40, "retrieval": False},
        "checkpoint": {"best_metric": "eval/loss"},
        "engine": {"device": "cpu"},
    }
    nursery.run(theirs).check()
    nursery.run(command(tmp_path, ours)).check()
    weights = [
        load_file(tmp_path / name / "checkpoint-3" / "model.safetensors")
        for name in ("theirs", "ours")
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][key].equal(weights[1][key]) for key in weights[0])
    assert any(".visual." in key for key in weights[0])
    assert lines_of(tmp_path / "theirs")[-1] == lines_of(tmp_path / "ours")[-1]
