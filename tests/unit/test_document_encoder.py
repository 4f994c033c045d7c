"""Real models in a refresh: a snapshot, a worker, and the vectors that training would make."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pixelrag.config.rag_models import EncoderConfig
from pixelrag.config.rag_parts import IndexConfig, RefreshConfig
from pixelrag.data.passages import load_passages
from pixelrag.errors import ModelError
from pixelrag.models.load import load_embedder
from pixelrag.retrieval.document_encoder import (
    embedder,
    encode_passages,
    fingerprints,
    load_snapshot,
    passage_document,
)
from pixelrag.retrieval.generations import Generations
from pixelrag.retrieval.recipe import refresh_recipe
from pixelrag.retrieval.refresh import Refresher
from pixelrag.retrieval.refresh_spec import Call
from tests.unit.rag_stand_ins import StandInPassage

TEXTS = ["the river rises in the north", "a bridge", "iron " * 30, "Zoë sees 3 birds", "x"]


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    rows = [{"id": f"p{i}", "title": "A title" if i % 2 else "", "text": t}
            for i, t in enumerate(TEXTS * 5)]  # fmt: skip
    path = tmp_path / "passages.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """As after some training."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    ("title", "template", "text"),
    [
        ("Rhine", "{title}\n{text}", "Rhine\nflows"),
        ("Rhine", "{text} ({title})", "flows (Rhine)"),
        ("{text}", "{title}: {text}", "{text}: flows"),
        ("", "{title}\n{text}", "flows"),
        ("Rhine", "{text} {other}", "flows {other}"),
    ],
)
def test_what_the_encoder_sees(title: str, template: str, text: str) -> None:
    document = passage_document(StandInPassage("1", title, "flows"), template)
    assert document.text == text


def test_a_tile_is_an_image(tmp_path: Path) -> None:
    tile = tmp_path / "1.png"
    assert passage_document(StandInPassage("1", "T", None, tile)).image == tile


def test_a_refresh_makes_the_vectors_of_the_training(
    tiny_models: dict[str, Path], collection: Path, tmp_path: Path
) -> None:
    config = {"name_or_path": str(tiny_models["bert_dropout"]), "document_max_length": 24}
    model, preprocessor = load_embedder(EncoderConfig(**config))
    moved(model)
    store = load_passages(str(collection))
    recipe = refresh_recipe(
        IndexConfig(factory="Flat"),
        RefreshConfig(nice=0, batch_size=3, shard_rows=10),
        passages=Call("pixelrag.retrieval.reopen:passages", {"source": str(collection)}),
        store=store,
        encoder=Call("pixelrag.retrieval.document_encoder:embedder", {"model_config": config}),
        dim=model.embedding_dim,
        fingerprints=fingerprints(model, preprocessor),
        devices=["cpu"],
    )
    generations = Generations(tmp_path / "index")
    refresher = Refresher(generations, recipe, retries=0)
    folder = refresher.begin(4)
    save_file(model.state_dict(), folder / "weights.safetensors")
    refresher.start(folder, 4)
    status = refresher.wait(120)
    assert status.state == "published", status.reason
    generation = generations.open_newest(recipe.fingerprints)
    # As a training step does it: one batch, the order of the rows, no sorting; eval, no dropout.
    model.eval()
    with torch.no_grad():
        inputs = preprocessor.documents([passage_document(p) for p in store])
        expected = model(**inputs).numpy()
    np.testing.assert_allclose(generation.vectors_ND, expected, atol=2e-6)
    assert generation.manifest.validation["parity"] < 1e-5
    assert generation.ids(range(3)) == ["p0", "p1", "p2"]


def test_encoding_leaves_the_mode_and_needs_no_gradient(tiny_models) -> None:
    model, preprocessor = load_embedder(
        EncoderConfig(name_or_path=str(tiny_models["bert_dropout"]))
    )
    passages = [StandInPassage(str(i), "", text) for i, text in enumerate(TEXTS)]
    beats: list[int] = []
    first = encode_passages(
        model, preprocessor, passages, batch_size=2, progress=lambda: beats.append(1)
    )
    assert model.training
    assert len(beats) == 3
    assert (first == encode_passages(model, preprocessor, passages, batch_size=2)).all()
    alone = encode_passages(model, preprocessor, passages[1:2], batch_size=1)
    np.testing.assert_allclose(alone[0], first[1], atol=1e-6)
    rounded = encode_passages(model, preprocessor, passages, batch_size=2, bf16=True)
    assert rounded.dtype == np.float32
    assert 1e-4 < np.abs(rounded - first).max() < 5e-2


def test_a_snapshot_of_trained_weights_alone(tiny_models, tmp_path: Path) -> None:
    config = {"name_or_path": str(tiny_models["bert"])}
    lora = {"enabled": True, "r": 4}
    from pixelrag.config.parts import LoraConfig

    model, preprocessor = load_embedder(EncoderConfig(**config), LoraConfig(**lora))
    moved_names = [n for n, p in model.named_parameters() if p.requires_grad]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in moved_names:
                parameter.add_(0.1)
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    save_file(trained, tmp_path / "weights.safetensors")
    encode = embedder(
        weights=tmp_path / "weights.safetensors",
        device="cpu",
        model_config=config,
        lora_config=lora,
        batch_size=2,
    )
    passages = [StandInPassage(str(i), "", text) for i, text in enumerate(TEXTS)]
    expected = encode_passages(model, preprocessor, passages, batch_size=2)
    np.testing.assert_allclose(encode(passages), expected, atol=1e-6)


def test_snapshots_of_another_model(tiny_models, tmp_path: Path) -> None:
    model, _ = load_embedder(EncoderConfig(name_or_path=str(tiny_models["bert"])))
    state = model.state_dict()
    name = next(iter(state))
    file = tmp_path / "weights.safetensors"
    bad: dict[str, tuple[dict[str, Any], str]] = {
        "lacks": ({n: t for n, t in state.items() if n != name}, "lacks 1 weights"),
        "more": (state | {"other": torch.zeros(2)}, "has 1 of another model"),
        "shape": (state | {name: torch.zeros(2, 2)}, "does not fit the model"),
    }
    for content, says in bad.values():
        save_file(content, file)
        with pytest.raises(ModelError, match=says):
            load_snapshot(model, file)
    file.write_bytes(b"no weights")
    with pytest.raises(ModelError, match="does not fit the model"):
        load_snapshot(model, file)


def test_fingerprints_change_with_what_decides_the_vectors(tiny_models) -> None:
    def of(name: str = "bert", template: str = "{text}", bf16: bool = False, **config: Any):
        model, preprocessor = load_embedder(
            EncoderConfig(name_or_path=str(tiny_models[name]), **config)
        )
        found = fingerprints(model, preprocessor, template=template, bf16=bf16)
        preprocessor.queries(["some use must not change it"])
        assert fingerprints(model, preprocessor, template=template, bf16=bf16) == found
        return found

    base = of()
    for key, changed in {
        "tokenizer": of("qwen3"),
        "template": of(template="{title} {text}"),
        "pooling": of(pooling="cls"),
        "max_length": of(document_max_length=9),
        "dtype": of(bf16=True),
    }.items():
        assert changed[key] != base[key], key
    assert of(document_instruction="passage: ")["template"] != base["template"]
    assert of(normalize=False)["pooling"] != base["pooling"]


def test_passages_are_opened_again_as_they_were(tiny_models, collection: Path) -> None:
    from transformers import AutoTokenizer

    options = {"source": str(collection), "split": "tokens", "length": 8, "overlap": 2}
    folder = str(tiny_models["bert"])
    first = load_passages(**options, tokenizer=AutoTokenizer.from_pretrained(folder))
    again = Call("pixelrag.retrieval.reopen:passages", options | {"tokenizer": folder})()
    assert len(again) == len(first) > len(TEXTS) * 5
    assert again.fingerprint == first.fingerprint


def test_reopening_needs_no_torch(collection: Path) -> None:
    script = (
        "import sys; from pixelrag.retrieval.reopen import passages\n"
        "import pixelrag.retrieval.coordinator, pixelrag.retrieval.refresh_worker\n"
        "passages(source=sys.argv[1]); print('torch' in sys.modules, 'faiss' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(collection)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
