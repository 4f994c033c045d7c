"""Exported folders are laid out as vLLM reads them; checked against its source, vLLM is not run.

What is read here, in this project's own words, is what `vllm/transformers_utils/config.py` and the
weight loader read: `get_pooling_config` (a folder with a pooling is served with the pooling
runner, any other with what its architecture says), the architecture's name, the tensors' names.
"""

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from pixelrag.config.distill_parts import AdapterConfig, StudentConfig
from pixelrag.config.parts import ModelConfig
from pixelrag.export.causal import export_causal
from pixelrag.export.hf import export_embedder
from pixelrag.models import load_embedder
from pixelrag.models.causal_load import load_student
from pixelrag.models.tiny_causal import save_tiny_causal

PREFIX = "sentence_transformers.models."


def _json(folder: Path, name: str):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def _pooling(folder: Path) -> tuple[str, bool] | None:
    """Pooling and normalising as vLLM finds them; None: a model that generates."""
    if not (folder / "modules.json").exists():
        return None
    paths = {module["type"]: module["path"] for module in _json(folder, "modules.json")}
    options = _json(folder, f"{paths[PREFIX + 'Pooling']}/config.json")
    # Versions differ in what they do with further options that are true, so it must be the first.
    first = next(name for name, value in options.items() if value is True)
    kind = first.removeprefix("pooling_mode_").split("_")[0]
    return {"lasttoken": "LAST"}.get(kind, kind.upper()), f"{PREFIX}Normalize" in paths


def _names(folder: Path) -> set[str]:
    """Of the tensors, in the files that the index names, if there is one."""
    index = folder / "model.safetensors.index.json"
    places = _json(folder, index.name)["weight_map"] if index.exists() else {}
    names = set()
    for file in {*places.values()} or {"model.safetensors"}:
        with safe_open(folder / file, "pt") as stream:
            here = set(stream.keys())
            assert stream.metadata() == {"format": "pt"}
        assert not places or here == {name for name, place in places.items() if place == file}
        names |= here
    return names


@pytest.mark.parametrize(
    ("kind", "pooling", "read", "architecture", "prefixes"),
    [
        ("bert", "mean", "MEAN", "BertModel", {"embeddings", "encoder"}),
        ("bert", "cls", "CLS", "BertModel", {"embeddings", "encoder"}),
        ("qwen3", "auto", "LAST", "Qwen3Model", {"embed_tokens", "layers", "norm"}),
        ("qwen3_vl", "auto", "LAST", "Qwen3VLForConditionalGeneration", {"model"}),
    ],
)
def test_an_encoder(tiny_models, tmp_path, kind, pooling, read, architecture, prefixes):
    model = ModelConfig(name_or_path=str(tiny_models[kind]), pooling=pooling)
    embedder, preprocessor = load_embedder(model)
    folder = tmp_path / "best"
    export_embedder(
        embedder, preprocessor, embedder.state_dict(), folder, temperature=0.05,
        max_shard_size="100KB",
    )  # fmt: skip
    assert _pooling(folder) == (read, True)
    assert _json(folder, "config.json")["architectures"] == [architecture]
    names = _names(folder)
    assert {name.split(".")[0] for name in names} == prefixes
    assert (folder / "tokenizer.json").exists()
    if kind == "qwen3_vl":
        assert {".".join(n.split(".")[:2]) for n in names} == {
            "model.visual",
            "model.language_model",
        }
        assert (folder / "preprocessor_config.json").exists()
        assert (folder / "chat_template.jinja").exists()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("adapters", [False, True])
def test_a_student(tmp_path, tied, adapters):
    source = save_tiny_causal(tmp_path / "qwen3", "qwen3", tied=tied)
    config = StudentConfig(name_or_path=str(source))
    student = load_student(config, AdapterConfig(enabled=adapters))
    folder = tmp_path / "last"
    tokenizer = AutoTokenizer.from_pretrained(source)
    export_causal(student, tokenizer, student.state_dict(), folder, max_shard_size="100KB")
    assert _pooling(folder) is None
    config = _json(folder, "config.json")
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is tied
    names = _names(folder)
    assert len([*folder.glob("model-*-of-*.safetensors")]) > 1
    assert {name.split(".")[0] for name in names} == {"model"} if tied else {"model", "lm_head"}
    assert ("lm_head.weight" in names) is not tied
    assert not any("lora" in name or "base_layer" in name for name in names)
    assert not (folder / "adapter_config.json").exists()
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / file).exists(), file
