"""`pixelrag export`: from checkpoints and exports of a run to what other tools load."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from pixelrag.cli import main
from tests.train import nursery
from tests.train.material import command, merged

pytestmark = pytest.mark.distributed

QUERIES = ["how to open a file", "sort", "a picture of tile 3 and of nothing else at all"]
TEXTS = ["the call open_file does it", "server"]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def runs(tmp_path_factory, base, shelf) -> Any:
    """Trains once for each kind; returns the run's folder and the engine's own embeddings."""
    root, done = tmp_path_factory.mktemp("runs"), {}
    kinds = {
        "full": {"engine": {"name": "fsdp2"}},
        "lora": {
            "engine": {"name": "zero3"},
            "lora": {
                **{"enabled": True, "r": 4, "alpha": 16, "dropout": 0.1},
                **{"dora": True, "rslora": True},
            },
            "optim": {"learning_rate": 1e-2},
        },
    }

    def _run(kind: str) -> tuple[Path, dict[str, np.ndarray]]:
        if kind not in done:
            settings = {
                "output_dir": str(root / kind),
                "data": {"eval": str(shelf / "eval.jsonl")},
                "optim": {"max_steps": 2},
            }
            config = merged(base, settings, kinds[kind])
            config["batch"]["per_device_batch_size"] = 4
            documents = [{"text": text} for text in TEXTS]
            file = str(root / f"{kind}.npz")
            payload = {"file": file, "queries": QUERIES, "documents": documents}
            setup = "tests.train.faults:embed_at_the_end"
            nursery.run(command(root, config), nproc=2, setup=setup, payload=payload).check()
            done[kind] = (root / kind, dict(np.load(file)))
        return done[kind]

    return _run


def _exported(source: Path, form: str, output: Path, *flags: str) -> Path:
    words = ["export", str(source), "--to", form, "--output", str(output), *flags]
    assert main(words) == 0
    return output


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("place", ["checkpoint-2", "last"])
def test_sentence_transformers_embeds_as_the_training_did(runs, tmp_path, kind, place):
    run, embedded = runs(kind)
    folder = _exported(run / place, "sentence-transformers", tmp_path / "out")
    assert not (folder / "adapter_config.json").exists()
    model = SentenceTransformer(str(folder), device="cpu")
    assert np.abs(model.encode_query(QUERIES) - embedded["query"]).max() <= TOLERANCE
    assert np.abs(model.encode_document(TEXTS) - embedded["document"]).max() <= TOLERANCE
    settings = json.loads((folder / "pixelrag.json").read_text())
    last = json.loads((run / "last" / "pixelrag.json").read_text())
    assert settings.pop("temperature") == pytest.approx(last.pop("temperature"), rel=1e-6)
    assert settings == last


def test_forms_of_a_whole_model(runs, tmp_path):
    run, _ = runs("full")
    whole = _exported(run / "checkpoint-2", "hf", tmp_path / "hf")
    expected = load_file(run / "last" / "model.safetensors")
    found = load_file(whole / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    shards = _exported(run / "best", "hf", tmp_path / "shards", "--max-shard-size", "20KB")
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    again = AutoModel.from_pretrained(shards, add_pooling_layer=False).state_dict()
    best = load_file(run / "best" / "model.safetensors")
    assert all(again[name].equal(best[name]) for name in best)
    half = _exported(run / "checkpoint-2", "hf", tmp_path / "half", "--dtype", "bfloat16")
    halves = load_file(half / "model.safetensors")
    assert all(halves[name].equal(expected[name].bfloat16()) for name in expected)
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"


def test_forms_of_adapters(runs, tmp_path, shelf):
    run, _ = runs("lora")
    adapter = _exported(run / "checkpoint-2", "adapter", tmp_path / "adapter")
    expected = load_file(run / "last" / "adapter_model.safetensors")
    found = load_file(adapter / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    merged_folder = _exported(run / "best", "merged", tmp_path / "merged")
    base = AutoModel.from_pretrained(shelf / "bert", add_pooling_layer=False)
    peft = PeftModel.from_pretrained(base, run / "best").merge_and_unload().state_dict()
    whole = load_file(merged_folder / "model.safetensors")
    assert whole.keys() == peft.keys()
    assert all(torch.allclose(whole[name], peft[name], atol=1e-6) for name in whole)


def test_the_card_tells_where_the_model_comes_from(runs, tmp_path, shelf):
    run, _ = runs("full")
    card = (_exported(run / "checkpoint-2", "hf", tmp_path / "out") / "README.md").read_text()
    state = json.loads((run / "checkpoint-2" / "state.json").read_text())
    record = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    for told in (
        f"Trained with pixelrag from `{shelf / 'bert'}`",
        "step 2",
        str(shelf / "train.jsonl"),
        state["position"]["data"],
        f"| eval/mrr | {record['eval/mrr']:.4f} |",
        "torch 2",
        "learning_rate: 0.001",
        "No licence of the base model could be read",
    ):
        assert told in card, told
    (shelf / "bert" / "README.md").write_text("---\nlicense: apache-2.0\n---\nA model.\n")
    try:
        card = (_exported(run / "best", "hf", tmp_path / "best") / "README.md").read_text()
    finally:
        (shelf / "bert" / "README.md").unlink()
    assert card.startswith("---\n")
    assert "license: apache-2.0" in card
    assert "library_name: transformers" in card
    assert f"from `{shelf / 'bert'}`" in card


def test_a_distilled_student(lesson, tmp_path):
    nursery.run(command(tmp_path, lesson, "distill")).check()
    run = Path(lesson["output_dir"])
    folder = _exported(run / "checkpoint-3", "hf", tmp_path / "out")
    expected = load_file(run / "last" / "model.safetensors")
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    card = (folder / "README.md").read_text()
    record = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    for told in (
        f"Trained with pixelrag from `{lesson['student']['name_or_path']}`",
        "step 3",
        'AutoModelForCausalLM.from_pretrained("out")',
        lesson["data"]["train"],
        f"| eval/kd_loss | {record['eval/kd_loss']:.4f} |",
    ):
        assert told in card, told


@pytest.mark.parametrize(
    ("kind", "place", "form", "message"),
    [
        ("full", "checkpoint-2", "adapter", "holds no adapters; take --to hf"),
        ("full", "best", "merged", "holds no adapters; take --to hf"),
        ("lora", "checkpoint-2", "hf", "take --to merged for the whole model, or --to adapter"),
        ("full", ".", "hf", "neither a checkpoint .state.json. nor an export of a run"),
    ],
)
def test_what_does_not_fit_is_refused(runs, tmp_path, capsys, kind, place, form, message):
    run, _ = runs(kind)
    words = ["export", str(run / place), "--to", form, "--output", str(tmp_path / "out")]
    assert main(words) in (2, 5)
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_an_altered_checkpoint_is_refused(runs, tmp_path, capsys):
    run, _ = runs("full")
    copy = shutil.copytree(run / "checkpoint-2", tmp_path / "checkpoint-2")
    with next(copy.glob("model*.safetensors")).open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\x00\x01\x02\x03")
    words = ["export", str(copy), "--to", "hf", "--output", str(tmp_path / "out")]
    assert main(words) == 5
    assert "altered" in capsys.readouterr().err
