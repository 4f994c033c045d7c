"""Exported folders: other libraries load them and compute the same embeddings."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from torch import nn
from transformers import AutoModel, AutoTokenizer, Qwen3VLForConditionalGeneration

from pixelrag.config.contrastive import RetrieverConfig
from pixelrag.config.parts import LoraConfig, ModelConfig
from pixelrag.data.schema import Document
from pixelrag.errors import CheckpointError
from pixelrag.export.hf import export_embedder
from pixelrag.models import Embedder, Preprocessor, load_embedder

KINDS = ["bert", "qwen3", "qwen3_vl"]


def _load(folder: Path, **options: object) -> tuple[Embedder, Preprocessor]:
    lora = options.pop("lora", None)
    embedder, preprocessor = load_embedder(ModelConfig(name_or_path=str(folder), **options), lora)
    return embedder.eval(), preprocessor


@torch.no_grad()
def _trained(embedder: Embedder) -> Embedder:
    """Moves every trainable weight, so that nothing equals the base by chance."""
    generator = torch.Generator().manual_seed(5)
    for parameter in embedder.parameters():
        if parameter.requires_grad:
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return embedder


def _batch(preprocessor: Preprocessor, tiles: list[Path]) -> dict[str, torch.Tensor]:
    documents = [Document.of_text("def add(a, b): return a + b"), Document.of_text("sort")]
    if preprocessor.has_vision:
        documents.append(Document.of_image(tiles[3]))
    return preprocessor.documents(documents)


@torch.no_grad()
def _by_hand(model: nn.Module, batch: dict[str, torch.Tensor], pooling: str) -> torch.Tensor:
    """Embeddings as a reader of the README would compute them, without pixelrag."""
    inputs = {name: value for name, value in batch.items() if name != "num_images"}
    if "pixel_values" in inputs:
        image_token = model.config.image_token_id
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == image_token).int()
    hidden = model.eval()(**inputs).last_hidden_state
    mask = inputs["attention_mask"]
    if pooling == "mean":
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    else:
        pooled = hidden[torch.arange(len(mask)), mask.sum(1) - 1]
    return pooled / pooled.norm(dim=1, keepdim=True)


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


def _export(embedder: Embedder, preprocessor: Preprocessor, folder: Path) -> Path:
    return export_embedder(embedder, preprocessor, embedder.state_dict(), folder, temperature=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_full_model_loads_with_auto_model(
    tiny_models: dict[str, Path], tiles: list[Path], tmp_path: Path, kind: str
) -> None:
    base, preprocessor = _load(tiny_models[kind])
    batch = _batch(preprocessor, tiles)
    before = base(**batch)
    embedder = _trained(base)
    expected = embedder(**batch)
    assert _relative(before, expected) > 1e-2
    folder = _export(embedder, preprocessor, tmp_path / "best")
    model, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert all("pooler" in key for key in info["missing_keys"])
    assert not info["unexpected_keys"]
    assert _relative(_by_hand(model, batch, embedder.pooling), expected) <= 1e-6
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("some text")["input_ids"] == preprocessor.tokenizer("some text")["input_ids"]


def test_qwen3_vl_keeps_its_original_architecture(
    tiny_models: dict[str, Path], tiles: list[Path], tmp_path: Path
) -> None:
    embedder, preprocessor = _load(tiny_models["qwen3_vl"])
    batch = _batch(preprocessor, tiles)
    expected = _trained(embedder)(**batch)
    folder = _export(embedder, preprocessor, tmp_path / "best")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3VLForConditionalGeneration"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        kinds = {".".join(key.split(".")[:2]) for key in file.keys()}  # noqa: SIM118
    assert kinds == {"model.visual", "model.language_model"}
    model, info = Qwen3VLForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert _relative(_by_hand(model.model, batch, "last"), expected) <= 1e-6


def test_qwen3_vl_with_a_head_of_its_own(
    tiny_models: dict[str, Path], tiles: list[Path], tmp_path: Path
) -> None:
    """As in the 8B model: the head is read past on loading and left out of the export."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(tiny_models["qwen3_vl"])
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    source = Path(shutil.copytree(tiny_models["qwen3_vl"], tmp_path / "source"))
    Qwen3VLForConditionalGeneration(model.config).save_pretrained(
        source, state_dict=model.state_dict()
    )
    with safe_open(source / "model.safetensors", "pt") as file:
        assert "lm_head.weight" in file.keys()  # noqa: SIM118
    embedder, preprocessor = _load(source)
    batch = _batch(preprocessor, tiles)
    expected = _trained(embedder)(**batch)
    folder = _export(embedder, preprocessor, tmp_path / "best")
    reloaded, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert _relative(_by_hand(reloaded, batch, "last"), expected) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_loads_with_peft(
    tiny_models: dict[str, Path], tiles: list[Path], tmp_path: Path, kind: str
) -> None:
    towers = {"vision": "attention", "vision_r": 3, "merger": True, "dora": True}
    lora = LoraConfig(enabled=True, **(towers if kind == "qwen3_vl" else {}))
    embedder, preprocessor = _load(tiny_models[kind], lora=lora)
    batch = _batch(preprocessor, tiles)
    before = embedder(**batch)
    expected = _trained(embedder)(**batch)
    assert _relative(before, expected) > 1e-2
    folder = _export(embedder, preprocessor, tmp_path / "best")
    assert not (folder / "model.safetensors").exists()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_models[kind])
    base = AutoModel.from_pretrained(tiny_models[kind])
    model = PeftModel.from_pretrained(base, folder)
    assert _relative(_by_hand(model, batch, embedder.pooling), expected) <= 1e-6


def test_weights_beside_adapters_are_written_with_them_in_one_model(
    tiny_models: dict[str, Path], tiles: list[Path], tmp_path: Path
) -> None:
    config = RetrieverConfig(
        name_or_path=str(tiny_models["qwen3_vl"]), unfrozen=["vision", "merger"]
    )
    lora = LoraConfig(enabled=True, dora=True, rslora=True)
    embedder, preprocessor = load_embedder(config, lora)
    batch = _batch(preprocessor, tiles)
    expected = _trained(embedder.eval())(**batch)
    folder = _export(embedder, preprocessor, tmp_path / "best")
    assert not (folder / "adapter_config.json").exists()
    assert _relative(_load(folder)[0](**batch), expected) <= 1e-5


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_own_loader_finds_pooling_and_instructions(
    tiny_models: dict[str, Path], tiles: list[Path], tmp_path: Path, kind: str, with_lora: bool
) -> None:
    lora = LoraConfig(enabled=with_lora)
    told = {
        "pooling": "cls",
        "query_instruction": "Find code.",
        "document_instruction": "Say it.",
    }
    embedder, preprocessor = _load(tiny_models[kind], lora=lora, **told)
    texts = ["how do I sort?", "read"]
    expected = _trained(embedder)(**preprocessor.queries(texts))
    documents = embedder(**_batch(preprocessor, tiles))
    folder = _export(embedder, preprocessor, tmp_path / "best")
    again, its_preprocessor = _load(folder, lora=lora)
    assert _relative(again(**its_preprocessor.queries(texts)), expected) <= 1e-6
    assert _relative(again(**_batch(its_preprocessor, tiles)), documents) <= 1e-6
    assert again.pooling == "cls"
    merged, _ = _load(folder)
    assert _relative(merged(**its_preprocessor.queries(texts)), expected) <= 1e-5
    other, plain = _load(folder, lora=lora, pooling="mean", query_instruction="")
    assert other.pooling == "mean"
    assert plain.query_instruction == ""
    assert plain.document_instruction == "Say it."
    twice = _export(again, its_preprocessor, tmp_path / "again")
    assert sorted(p.name for p in twice.iterdir()) == sorted(p.name for p in folder.iterdir())
    names = ("model.safetensors", "adapter_model.safetensors", "adapter_config.json")
    for path in (folder / name for name in names):
        if path.exists():
            assert (twice / path.name).read_bytes() == path.read_bytes()


def test_settings_file(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    embedder, preprocessor = _load(tiny_models["qwen3_vl"], max_visual_tokens=40)
    folder = _export(embedder, preprocessor, tmp_path / "best")
    settings = json.loads((folder / "pixelrag.json").read_text())
    assert settings["format"] == 1
    assert settings["pooling"] == "last"
    assert settings["temperature"] == 0.05
    assert settings["document_instruction"] == "Represent the user's input."
    assert settings["max_visual_tokens"] == 40
    images = json.loads((folder / "preprocessor_config.json").read_text())
    assert images["size"] == {"shortest_edge": 1024, "longest_edge": 40 * 1024}


def test_further_processor_files_are_kept(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_models["qwen3_vl"], tmp_path / "source"))
    (source / "video_preprocessor_config.json").write_text('{"fps": 2}')
    embedder, preprocessor = _load(source)
    folder = _export(embedder, preprocessor, tmp_path / "best")
    assert (folder / "video_preprocessor_config.json").read_text() == '{"fps": 2}'


@pytest.mark.parametrize("with_lora", [False, True])
def test_sharded_parameters_are_never_read(
    tiny_models: dict[str, Path], tmp_path: Path, with_lora: bool
) -> None:
    """ZeRO-3 leaves empty tensors in the module; only the gathered state counts."""
    lora = LoraConfig(enabled=with_lora)
    embedder, preprocessor = _load(tiny_models["qwen3"], lora=lora)
    batch = preprocessor.queries(["how do I sort?"])
    expected = _trained(embedder)(**batch)
    state = {name: tensor.clone() for name, tensor in embedder.state_dict().items()}
    if with_lora:
        state = {name: tensor for name, tensor in state.items() if "lora_" in name}
    for parameter in embedder.parameters():
        parameter.data = torch.empty(0)
    folder = export_embedder(embedder, preprocessor, state, tmp_path / "best", temperature=0.05)
    assert _relative(_load(folder, lora=lora)[0](**batch), expected) <= 1e-6


@pytest.mark.parametrize("with_lora", [False, True])
def test_names_of_wrappers_never_appear(
    tiny_models: dict[str, Path], tmp_path: Path, with_lora: bool
) -> None:
    embedder, preprocessor = _load(tiny_models["bert"], lora=LoraConfig(enabled=with_lora))
    state = {
        "module." + name.replace("layer.0", "layer.0._orig_mod"): tensor
        for name, tensor in embedder.state_dict().items()
    }
    folder = export_embedder(embedder, preprocessor, state, tmp_path / "best", temperature=0.05)
    (weights,) = folder.glob("*.safetensors")
    with safe_open(weights, "pt") as file:
        names = list(file.keys())
    assert names
    assert not any("_orig_mod" in name or name.startswith("module.") for name in names)
    assert not any("backbone" in name or ".default." in name for name in names)


def test_weights_are_written_as_float32(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    embedder, preprocessor = load_embedder(
        ModelConfig(name_or_path=str(tiny_models["bert"])), dtype=torch.float64
    )
    folder = _export(embedder, preprocessor, tmp_path / "best")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_tensor(k).dtype for k in file.keys()} == {torch.float32}  # noqa: SIM118
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.pop("backbone.embeddings.LayerNorm.bias"), r"1 missing, first backbone\.emb"),
        (lambda s: s.update(stray=torch.ones(1)), "1 unknown, first stray"),
        (
            lambda s: s.update({"backbone.embeddings.LayerNorm.bias": torch.empty(0)}),
            r"1 weights to export are empty, first backbone\.emb.*were they gathered",
        ),
        (
            lambda s: s.update({"backbone.embeddings.LayerNorm.bias": torch.ones(16)}),
            r"LayerNorm\.bias to export has shape \[16\], expected \[32\]",
        ),
    ],
)
def test_wrong_weights_leave_nothing_behind(
    tiny_models: dict[str, Path], tmp_path: Path, spoil: object, message: str
) -> None:
    embedder, preprocessor = _load(tiny_models["bert"])
    state = embedder.state_dict()
    spoil(state)
    with pytest.raises(CheckpointError, match=message):
        export_embedder(embedder, preprocessor, state, tmp_path / "best", temperature=0.05)
    assert list(tmp_path.iterdir()) == []


def test_missing_adapter_weight(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    embedder, preprocessor = _load(tiny_models["bert"], lora=LoraConfig(enabled=True))
    state = embedder.state_dict()
    state.pop(next(name for name in state if "lora_A" in name))
    with pytest.raises(CheckpointError, match="1 missing"):
        export_embedder(embedder, preprocessor, state, tmp_path / "best", temperature=0.05)


def test_replaces_an_earlier_export_and_nothing_else(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    embedder, preprocessor = _load(tiny_models["bert"])
    folder = _export(embedder, preprocessor, tmp_path / "deep" / "best")
    (folder / "left over").write_text("")
    export_embedder(embedder, preprocessor, embedder.state_dict(), folder, temperature=0.01)
    assert json.loads((folder / "pixelrag.json").read_text())["temperature"] == 0.01
    assert not (folder / "left over").exists()
    assert list(folder.parent.iterdir()) == [folder]
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="was not written by an export"):
        _export(embedder, preprocessor, foreign)
    assert (foreign / "thesis.txt").read_text() == "years of work"


def test_a_full_disk_keeps_the_earlier_export(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder, preprocessor = _load(tiny_models["bert"])
    folder = _export(embedder, preprocessor, tmp_path / "best")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(preprocessor, "save", full)
    with pytest.raises(CheckpointError, match=r"cannot write the export .*No space left"):
        _export(_trained(embedder), preprocessor, folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert list(tmp_path.iterdir()) == [folder]
