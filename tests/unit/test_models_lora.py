"""Adapters: where they sit, what trains, what is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pixelrag.config.contrastive import RetrieverConfig
from pixelrag.config.parts import LoraConfig, ModelConfig
from pixelrag.errors import ModelError
from pixelrag.export.merge import merged
from pixelrag.models import Embedder, load_embedder
from pixelrag.models.lora import check_same_lora
from pixelrag.models.lora_targets import planned_layers, target_pattern
from pixelrag.models.tower_parts import part_of


def _load(folder: Path, dtype: torch.dtype = torch.float32, **options: object) -> Embedder:
    lora = LoraConfig(enabled=True, **options)
    return load_embedder(ModelConfig(name_or_path=str(folder)), lora, dtype=dtype)[0]


def _adapted(embedder: Embedder) -> set[str]:
    """Layers with an adapter, block numbers written as N."""
    names = [n for n, m in embedder.base_model.named_modules() if hasattr(m, "lora_A")]
    return {re.sub(r"\.\d+\.", ".N.", name) for name in names}


def test_qwen3_vl_language_model_by_default(tiny_models: dict[str, Path]) -> None:
    expected = {f"language_model.layers.N.self_attn.{n}_proj" for n in "qkvo"}
    assert _adapted(_load(tiny_models["qwen3_vl"])) == expected


def test_qwen3_vl_vision_adds_blocks_but_no_merger(tiny_models: dict[str, Path]) -> None:
    vision = {
        f"visual.blocks.N.{name}"
        for name in ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
    }
    expected = {f"language_model.layers.N.self_attn.{n}_proj" for n in "qkvo"} | vision
    assert _adapted(_load(tiny_models["qwen3_vl"], vision=True)) == expected


def test_named_targets_stay_in_the_language_model(tiny_models: dict[str, Path]) -> None:
    targets = ["down_proj", "mlp.up_proj"]
    adapted = _adapted(_load(tiny_models["qwen3_vl"], target_modules=targets))
    assert adapted == {f"language_model.layers.N.mlp.{n}_proj" for n in ("down", "up")}
    # `proj` and `qkv` exist in the vision tower only, and whole names match, never parts of them.
    for name in ("qkv", "proj", "attn.proj"):
        with pytest.raises(ModelError, match=rf"'{name}' matches no linear layer in the language"):
            _load(tiny_models["qwen3_vl"], target_modules=[name])


def test_defaults_of_text_models(tiny_models: dict[str, Path]) -> None:
    assert _adapted(_load(tiny_models["bert"])) == {
        "encoder.layer.N.attention.self.query",
        "encoder.layer.N.attention.self.key",
        "encoder.layer.N.attention.self.value",
        "encoder.layer.N.attention.output.dense",
    }
    expected = {f"layers.N.self_attn.{n}_proj" for n in "qkvo"}
    assert _adapted(_load(tiny_models["qwen3"])) == expected


TOWERS = {"vision": "attention", "vision_r": 3, "vision_alpha": 6, "merger": True}


def test_the_vision_towers_own_rank_attention_alone_and_the_mergers(
    tiny_models: dict[str, Path],
) -> None:
    embedder = _load(tiny_models["qwen3_vl"], r=4, alpha=2, **TOWERS)
    layers = {n: m for n, m in embedder.base_model.named_modules() if hasattr(m, "lora_A")}
    in_tower = {name for name in layers if name.startswith("visual.")}
    mergers = {name for name in in_tower if "merger" in name}
    assert _adapted(embedder) == {
        *(f"language_model.layers.N.self_attn.{n}_proj" for n in "qkvo"),
        *(f"visual.blocks.N.attn.{n}" for n in ("qkv", "proj")),
        *(f"visual.merger.linear_fc{n}" for n in (1, 2)),
        *(f"visual.deepstack_merger_list.N.linear_fc{n}" for n in (1, 2)),
    }
    assert len(mergers) == 4, "a merger, and one of deepstack's"
    for name, layer in layers.items():
        expected = (3, 2.0) if name in in_tower else (4, 0.5)
        assert (layer.r["default"], layer.scaling["default"]) == expected, name
        assert layer.lora_A["default"].weight.shape[0] == expected[0]


def test_rank_stabilised_scale(tiny_models: dict[str, Path]) -> None:
    embedder = _load(tiny_models["qwen3_vl"], r=16, alpha=8, rslora=True, merger=True, vision_r=4)
    scales = {
        n.startswith("visual."): m.scaling["default"]
        for n, m in embedder.base_model.named_modules()
        if hasattr(m, "lora_A")
    }
    assert scales == {False: 8 / 16**0.5, True: 8 / 4**0.5}


def _unfrozen(folder: Path, parts: list[str], dtype: torch.dtype = torch.float32, **lora: object):
    config = RetrieverConfig(name_or_path=str(folder), unfrozen=parts)
    return load_embedder(config, LoraConfig(**lora), dtype=dtype)[0]


def test_unfrozen_parts_train_in_float32_and_nothing_else(tiny_models: dict[str, Path]) -> None:
    embedder = _unfrozen(
        tiny_models["qwen3_vl"], ["vision", "merger"], torch.bfloat16, enabled=True
    )
    for name, parameter in embedder.named_parameters():
        trains = "visual." in name or "lora_" in name
        assert parameter.requires_grad == trains, name
        assert parameter.dtype == (torch.float32 if trains else torch.bfloat16), name
    for parts in (["vision"], ["merger"], ["text", "merger"]):
        embedder = _unfrozen(tiny_models["qwen3_vl"], parts)
        found = {part_of(n) for n, p in embedder.named_parameters() if p.requires_grad}
        assert found == set(parts)


def test_published_parameter_count() -> None:
    """Qwen3-VL-Embedding-2B: 12,845,056 in the language model, 12,582,912 in the tower at r 32."""
    from transformers import Qwen3VLConfig, Qwen3VLModel

    config = Qwen3VLConfig(
        text_config={
            "hidden_size": 2048,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 6144,
            "vocab_size": 151936,
        },
        vision_config={
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "out_hidden_size": 2048,
        },
    )
    with torch.device("meta"):
        model = Qwen3VLModel(config)

    def count(**options: bool) -> int:
        pattern = target_pattern(model, LoraConfig(**options), has_vision=True)
        layers = [m for n, m in model.named_modules() if re.fullmatch(pattern, n)]
        return sum(32 * (m.in_features + m.out_features) for m in layers)

    assert count() == 12_845_056
    assert count(vision=True) == 25_427_968


@pytest.mark.parametrize("dora", [False, True])
def test_only_adapters_train_and_start_as_the_identity(
    tiny_models: dict[str, Path], dora: bool
) -> None:
    for kind in ("bert", "qwen3", "qwen3_vl"):
        embedder = _load(tiny_models[kind], dropout=0.0, dora=dora, rslora=dora)
        trained = [n for n, p in embedder.named_parameters() if p.requires_grad]
        assert trained
        assert all("lora_" in name for name in trained)
        plain, preprocessor = load_embedder(ModelConfig(name_or_path=str(tiny_models[kind])))
        batch = preprocessor.queries(["how do I read a file?"])
        assert torch.equal(embedder.eval()(**batch), plain.eval()(**batch))


def test_fresh_adapters_depend_on_the_seed_alone(tiny_models: dict[str, Path]) -> None:
    config, lora = ModelConfig(name_or_path=str(tiny_models["bert"])), LoraConfig(enabled=True)
    state = torch.get_rng_state()
    first = load_embedder(config, lora, seed=3)[0].state_dict()
    assert torch.equal(torch.get_rng_state(), state), "loading moved the global generator"
    torch.manual_seed(99)
    again = load_embedder(config, lora, seed=3)[0].state_dict()
    other = load_embedder(config, lora, seed=4)[0].state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first if "lora_A" in name)


def test_adapters_stay_float32_on_a_bf16_model(tiny_models: dict[str, Path]) -> None:
    embedder = _load(tiny_models["qwen3_vl"], dtype=torch.bfloat16, vision=True)
    dtypes = {("lora_" in name): p.dtype for name, p in embedder.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


def test_refusals(tiny_models: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match=r"'q_proj' matches no linear layer in BertModel.*query"):
        _load(tiny_models["bert"], target_modules=["query", "q_proj"])
    with pytest.raises(ModelError, match=r"lora\.vision is all, but Qwen3Model has no vision"):
        _load(tiny_models["qwen3"], vision=True)
    with pytest.raises(ModelError, match=r"lora\.merger is true, but Qwen3Model has no vision"):
        _load(tiny_models["qwen3"], merger=True)
    with pytest.raises(ModelError, match=r"model\.unfrozen names vision, which the model lacks"):
        _unfrozen(tiny_models["qwen3"], ["vision"])
    odd = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="no default LoRA targets are known for Sequential"):
        target_pattern(odd, LoraConfig(), has_vision=False)
    config = ModelConfig(name_or_path=str(tiny_models["bert"]), random_init=True)
    with pytest.raises(ModelError, match=r"model\.random_init with LoRA"):
        load_embedder(config, LoraConfig(enabled=True))


@pytest.fixture
def adapter(tiny_models: dict[str, Path], tmp_path: Path) -> Path:
    """A saved adapter whose B matrices are not zero."""
    embedder = _load(tiny_models["qwen3"], r=4, alpha=8, dropout=0.5)
    for name, parameter in embedder.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    embedder.backbone.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_saved_adapter_goes_on_training(tiny_models: dict[str, Path], adapter: Path) -> None:
    embedder = _load(adapter, r=4, alpha=8, dropout=0.1)
    assert all("lora_" in n for n, p in embedder.named_parameters() if p.requires_grad)
    assert any(p.requires_grad for p in embedder.parameters())
    rates = {m.p for n, m in embedder.named_modules() if n.endswith("lora_dropout.default")}
    assert rates == {0.1}
    plain, preprocessor = load_embedder(ModelConfig(name_or_path=str(tiny_models["qwen3"])))
    batch = preprocessor.queries(["how do I read a file?"])
    adapted = embedder.eval()(**batch)
    assert (adapted - plain.eval()(**batch)).norm() > 0.05
    merged, _ = load_embedder(ModelConfig(name_or_path=str(adapter)))
    assert all(p.requires_grad for p in merged.parameters())
    assert not any("lora_" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(merged.eval()(**batch), adapted, rtol=0, atol=1e-6)


def test_saved_adapter_of_other_rank_is_refused(adapter: Path) -> None:
    with pytest.raises(
        ModelError, match=r"8 layers differ.*has r 4, scale 2, lora asks for r 32, scale 1"
    ):
        _load(adapter)


def test_saved_dora_of_both_towers_goes_on_is_compared_and_merges(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    options = {"r": 4, "alpha": 8, "dropout": 0.0, "dora": True, "rslora": True} | TOWERS
    embedder = _load(tiny_models["qwen3_vl"], **options)
    for name, parameter in embedder.named_parameters():
        if "lora_" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
    embedder.backbone.save_pretrained(tmp_path / "adapter")
    again = _load(tmp_path / "adapter", **options)
    bare = load_embedder(ModelConfig(name_or_path=str(tiny_models["qwen3_vl"])))[0].base_model
    expected = embedder.backbone.state_dict()
    trained = {n for n, p in again.backbone.named_parameters() if p.requires_grad}
    assert any("lora_magnitude_vector" in name for name in trained)
    for name, tensor in again.backbone.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    for option, other in (
        ("dora", False), ("rslora", False), ("alpha", 4), ("vision", "all"), ("vision_r", 4),
        ("merger", False), ("target_modules", ["q_proj"]),
    ):  # fmt: skip
        asked = LoraConfig(enabled=True, **options | {option: other})
        wanted = planned_layers(bare, asked, has_vision=True)
        with pytest.raises(ModelError, match="layers differ, first"):
            check_same_lora(again.backbone, wanted, "adapter")
    kept, _ = load_embedder(ModelConfig(name_or_path=str(tmp_path / "adapter")), as_saved=True)
    assert kept.state_dict().keys() == again.state_dict().keys()
    # By the gathered weights, as an engine gives them, and by PEFT itself.
    by_hand = merged(embedder.backbone.state_dict(), embedder.backbone)
    by_peft = embedder.backbone.merge_and_unload().state_dict()
    assert by_hand.keys() == by_peft.keys()
    for name, tensor in by_peft.items():
        torch.testing.assert_close(by_hand[name], tensor, rtol=1e-5, atol=1e-6)


def test_adapter_that_would_do_nothing_is_refused(adapter: Path, tmp_path: Path) -> None:
    """Keys that fit no layer load without any effect elsewhere."""
    weights = load_file(adapter / "adapter_model.safetensors")
    prefix = "base_model.model."
    moved = {key.replace(prefix, prefix + "other."): value for key, value in weights.items()}
    save_file(moved, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"does not fit .*keys that only the model has"):
        _load(adapter, r=4, alpha=8)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"but no adapter_model\.safetensors"):
        _load(adapter, r=4, alpha=8)
    shutil.copytree(adapter, tmp_path / "nameless")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = None
    (tmp_path / "nameless" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="names no base_model_name_or_path"):
        _load(tmp_path / "nameless", r=4, alpha=8)
