"""Adapters and training states of PixelRAG's and ms-swift's trainers."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pixelrag.config.parts import LoraConfig, ModelConfig
from pixelrag.errors import ModelError
from pixelrag.models import load_embedder
from pixelrag.models.biencoder import BiEncoder
from pixelrag.models.training_state import load_training_state

LORA = LoraConfig(enabled=True, r=4, alpha=8, dropout=0, vision=True)


@pytest.fixture
def base(tiny_models) -> str:
    return str(tiny_models["qwen3_vl"])


@pytest.fixture
def adapter(base, tmp_path) -> Path:
    """A saved adapter with random weights in all of its matrices."""
    embedder, _ = load_embedder(ModelConfig(name_or_path=base), LORA, seed=3)
    torch.manual_seed(0)
    for name, parameter in embedder.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    embedder.backbone.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def load(base: str, folder: Path, lora: LoraConfig | None = LORA):
    return load_embedder(ModelConfig(name_or_path=base, adapter=str(folder)), lora)


def output(embedder, preprocessor) -> torch.Tensor:
    with torch.no_grad():
        return embedder.eval()(**preprocessor.queries(["a query"]))


def change(folder: Path, edit) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({edit(key): value for key, value in load_file(path).items()}, path)


def test_an_adapter_is_put_onto_the_model_merged_or_not(base, adapter):
    plain = output(*load_embedder(ModelConfig(name_or_path=base)))
    adapted, merged = output(*load(base, adapter)), output(*load(base, adapter, None))
    assert not torch.allclose(plain, adapted, atol=1e-3)
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-5)


def test_the_wrapper_of_ms_swift_is_taken_off(base, adapter):
    expected = output(*load(base, adapter))
    change(adapter, lambda key: key.replace("base_model.model.", "base_model.model.model.", 1))
    config = json.loads((adapter / "adapter_config.json").read_text())
    config |= {"target_modules": r"^(model\.language_model.*q_proj)$", "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert torch.equal(output(*load(base, adapter)), expected)


def test_keys_that_do_not_fit_are_named(base, adapter):
    change(adapter, lambda key: key.replace("q_proj", "x_proj"))
    with pytest.raises(ModelError, match=r"does not fit .*x_proj"):
        load(base, adapter)


@pytest.mark.parametrize("part", ["everything", "language_model"])
def test_an_adapter_without_effect_is_an_error(base, adapter, part):
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    for key, value in tensors.items():
        if "lora_B" in key and (part == "everything" or part in key):
            value.zero_()
    save_file(tensors, path)
    if part == "everything":
        with pytest.raises(ModelError, match="the adapter changes no output"):
            load(base, adapter)
    else:
        load(base, adapter)  # images show that it acts


def test_a_folder_without_adapter_is_refused(base, adapter):
    with pytest.raises(ModelError, match=r"model.adapter .* is no adapter"):
        load(base, Path(base))
    with pytest.raises(ModelError, match="is put onto another adapter"):
        load(str(adapter), adapter)


def test_weights_and_temperature_of_a_training_state(base, adapter, tmp_path, caplog):
    trained = load(base, adapter)[0].backbone.state_dict()
    state = {
        "step": 200,
        "epoch": 1,
        "model_state_dict": trained,
        "optimizer_state_dict": {"state": {}, "param_groups": []},
        "scheduler_state_dict": {"last_epoch": 200},
        "logit_scale_state_dict": {"log_scale": torch.tensor(3.0)},
    }
    torch.save(state, tmp_path / "training_state.pt")
    embedder, preprocessor = load_embedder(ModelConfig(name_or_path=base), LORA)
    container = BiEncoder(embedder)
    with caplog.at_level(logging.INFO, "pixelrag"):
        load_training_state(str(tmp_path), container)
    assert f"took {len(trained)} tensors and temperature 0.04979; not taken: step, " in caplog.text
    assert container.logit_scale.log_scale.tolist() == [3.0]
    assert torch.equal(output(embedder, preprocessor), output(*load(base, adapter)))

    fixed = BiEncoder(embedder, learnable_temperature=False)
    before = fixed.logit_scale.log_scale.clone()
    load_training_state(str(tmp_path), fixed)
    assert torch.equal(fixed.logit_scale.log_scale, before)
    with pytest.raises(ModelError, match="model and lora must be as in its run"):
        load_training_state(
            str(tmp_path), BiEncoder(load_embedder(ModelConfig(name_or_path=base))[0])
        )


class _Evil:
    def __reduce__(self):
        return print, ("ran",)


def test_a_training_state_runs_no_code(base, tmp_path, capsys):
    torch.save({"step": 1, "model_state_dict": _Evil()}, tmp_path / "training_state.pt")
    container = BiEncoder(load_embedder(ModelConfig(name_or_path=base), LORA)[0])
    with pytest.raises(ModelError, match="cannot be read"):
        load_training_state(str(tmp_path), container)
    assert "ran" not in capsys.readouterr().out
    with pytest.raises(ModelError, match="cannot be read"):
        load_training_state(str(tmp_path / "gone.pt"), container)
