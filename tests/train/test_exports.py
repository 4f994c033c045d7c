"""`best/` and `last/` hold what was trained: other tools load them and get the same embeddings."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train import nursery
from tests.train.material import command, lines_of, merged, series

pytestmark = pytest.mark.distributed

QUERIES = ["how to open a file", "sort", "a picture of tile 3 and of nothing else at all"]
TOLERANCE = 1e-5


@pytest.fixture
def trained(tmp_path, base, shelf):
    """Trains on two ranks; returns the folder, and what the engine itself embedded at the end."""

    def _train(*overrides: dict, nproc: int = 2) -> tuple[Path, dict[str, np.ndarray]]:
        settings = {"output_dir": str(tmp_path / "run"), "optim": {"max_steps": 2}}
        config = merged(base, settings, *overrides)
        payload = {
            "file": str(tmp_path / "embeddings.npz"),
            "queries": QUERIES,
            "documents": _documents(config, shelf),
        }
        options = {"setup": "tests.train.faults:embed_at_the_end", "payload": payload}
        nursery.run(command(tmp_path, config), nproc=nproc, **options).check()
        return tmp_path / "run", dict(np.load(tmp_path / "embeddings.npz"))

    return _train


def _documents(config: dict[str, Any], shelf: Path) -> list[dict[str, str]]:
    texts = [{"text": "the call open_file does it"}, {"text": "server"}]
    if "qwen3_vl" not in config["model"]["name_or_path"]:
        return texts
    return [*texts, *({"image": str(shelf / "tiles" / f"{i}.png")} for i in (1, 3))]


def _loaded(folder: Path, documents: list[dict[str, str]]) -> dict[str, np.ndarray]:
    """Embeddings by pixelrag's own loader, one row at a time."""
    from pixelrag.config.parts import ModelConfig
    from pixelrag.data.schema import Document
    from pixelrag.models import load_embedder

    embedder, preprocessor = load_embedder(ModelConfig(name_or_path=str(folder)))
    embedder.eval()
    built = [
        Document.of_image(d["image"]) if "image" in d else Document.of_text(d["text"])
        for d in documents
    ]
    with torch.no_grad():
        rows = [embedder(**preprocessor.queries([query])) for query in QUERIES]
        found = [embedder(**preprocessor.documents([document])) for document in built]
    return {"query": torch.cat(rows).numpy(), "document": torch.cat(found).numpy()}


def _assert_same(got: dict[str, np.ndarray], engine: dict[str, np.ndarray]) -> None:
    for role, expected in engine.items():
        assert got[role].shape == expected.shape
        assert np.abs(got[role] - expected).max() <= TOLERANCE
        assert np.linalg.norm(expected, axis=1) == pytest.approx(1.0, abs=1e-5)
        assert np.abs(expected[0] - expected[1]).max() > 0.01, "embeddings that tell nothing apart"


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"])
def test_a_text_encoder_loads_with_auto_model(trained, shelf, engine):
    from transformers import AutoModel, AutoTokenizer

    folder, embedded = trained({"engine": {"name": engine}})
    model = AutoModel.from_pretrained(folder / "last").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "last")
    inputs = tokenizer(QUERIES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    pooled = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
    assert np.abs(pooled.numpy() - embedded["query"]).max() <= TOLERANCE
    documents = _documents({"model": {"name_or_path": "bert"}}, shelf)
    _assert_same(_loaded(folder / "last", documents), embedded)
    untrained = _loaded(shelf / "bert", documents)
    assert np.abs(untrained["query"] - embedded["query"]).max() > 100 * TOLERANCE


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"])
def test_adapters_load_with_peft(trained, shelf, engine):
    from peft import PeftModel
    from transformers import AutoModel, AutoTokenizer

    lora = {"lora": {"enabled": True, "r": 4, "alpha": 32, "dropout": 0.1}}
    rate = {"optim": {"learning_rate": 1e-2}}
    folder, embedded = trained(lora, rate, {"engine": {"name": engine}})
    base_model = AutoModel.from_pretrained(shelf / "bert", add_pooling_layer=False)
    model = PeftModel.from_pretrained(base_model, folder / "last").eval()
    inputs = AutoTokenizer.from_pretrained(folder / "last")(
        QUERIES, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    pooled = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
    assert np.abs(pooled.numpy() - embedded["query"]).max() <= TOLERANCE
    documents = _documents({"model": {"name_or_path": "bert"}}, shelf)
    _assert_same(_loaded(folder / "last", documents), embedded)
    untrained = _loaded(shelf / "bert", documents)
    assert np.abs(untrained["query"] - embedded["query"]).max() > 100 * TOLERANCE


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"])
@pytest.mark.parametrize("adapters", [False, True])
def test_qwen3_vl(trained, shelf, engine, adapters):
    settings = {
        "model": {"name_or_path": str(shelf / "qwen3_vl"), "query_instruction": "Find it."},
        "data": {"train": str(shelf / "mixed.jsonl")},
        "batch": {"per_device_batch_size": 3},
        "engine": {"name": engine},
    }
    if adapters:
        # Weights beside adapters, sharded: both are written as one model.
        settings["lora"] = {"enabled": True, "r": 4, "alpha": 32, "merger": True, "dora": True}
        settings["model"]["unfrozen"] = ["vision"]
        settings["optim"] = {"learning_rate": 1e-2}
    folder, embedded = trained(settings)
    _assert_same(_loaded(folder / "last", _documents(settings, shelf)), embedded)
    if adapters:
        return
    # The form of the published checkpoints, which servers load under this name.
    from transformers import Qwen3VLForConditionalGeneration

    _, info = Qwen3VLForConditionalGeneration.from_pretrained(
        folder / "last", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_bf16_trains_fp32_masters_and_exports_those(trained, shelf):
    folder, _ = trained({"engine": {"name": "fsdp2", "precision": "bf16"}})
    from safetensors.torch import load_file

    weights = load_file(folder / "last" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert any(not tensor.equal(tensor.bfloat16().float()) for tensor in weights.values())


@pytest.mark.parametrize("metric", ["eval/loss", "eval/mrr"])
def test_best_is_chosen_by_its_metric(trained, shelf, metric):
    """A lower loss is better, a higher rank is; the later of two equals does not replace it."""
    settings = {
        "data": {"eval": str(shelf / "eval.jsonl")},
        "optim": {"max_steps": 8, "learning_rate": 2e-2, "scheduler": "constant"},
        "eval": {"every_steps": 1},
        "checkpoint": {"best_metric": metric, "every_steps": 1, "keep_last": 9},
    }
    folder, _ = trained(settings, nproc=1)
    values = [record[metric] for record in lines_of(folder) if metric in record]
    choose = min if metric == "eval/loss" else max
    step = values.index(choose(values)) + 1
    assert values[-1] != choose(values), "the last one being the best tells nothing"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["best"] == {metric: choose(values)}
    from safetensors.torch import load_file

    best = load_file(folder / "best" / "model.safetensors")
    saved = load_file(folder / f"checkpoint-{step}" / "model.safetensors")
    assert all(best[key].equal(saved[f"encoder.backbone.{key}"]) for key in best)
    last = load_file(folder / "last" / "model.safetensors")
    assert any(not best[key].equal(last[key]) for key in best)


def test_the_temperature_is_exported(trained):
    folder, _ = trained({"optim": {"learning_rate": 0.1}}, nproc=1)
    from safetensors.torch import load_file

    scale = load_file(folder / "checkpoint-2" / "model.safetensors")["logit_scale.log_scale"]
    settings = json.loads((folder / "last" / "pixelrag.json").read_text())
    assert settings["temperature"] == pytest.approx(float((-scale).exp()), rel=1e-6)
    assert settings["temperature"] != pytest.approx(0.07, rel=0.01)


def test_a_fixed_temperature_stays(trained):
    folder, _ = trained({"loss": {"learnable_temperature": False, "temperature": 0.2}})
    assert series(folder, "train/temperature") == pytest.approx([0.2, 0.2])
    settings = json.loads((folder / "last" / "pixelrag.json").read_text())
    assert settings["temperature"] == pytest.approx(0.2)


def test_a_kill_in_the_middle_of_an_export_leaves_no_half_folder(tmp_path, base, shelf):
    settings = {
        "output_dir": str(tmp_path / "run"),
        "data": {"eval": str(shelf / "eval.jsonl")},
        "eval": {"every_steps": 1},
        "checkpoint": {"every_steps": 1},
    }
    arguments = command(tmp_path, merged(base, settings))
    killed = nursery.run(arguments, setup="tests.train.faults:kill_in_export", payload={})
    assert killed.codes == [-signal.SIGKILL]
    assert not (tmp_path / "run" / "best").exists()
    nursery.run(arguments).check()
    names = sorted(os.listdir(tmp_path / "run"))
    assert [name for name in names if name.startswith(".")] == []
    assert {"best", "last"} <= set(names)
