"""The touched vision tower: same calls as a real pass, no effect on any number."""

from pathlib import Path

import pytest
import torch
from torch import nn

from pixelrag.config.parts import LoraConfig, ModelConfig
from pixelrag.data.schema import Document
from pixelrag.models import Embedder, Preprocessor, load_embedder

TEXTS = ["how do I read a file?", "count the words"]
Loaded = tuple[Embedder, Preprocessor]


def _load(folder: Path, *, lora: bool = False, checkpointing: bool = False) -> Loaded:
    embedder, preprocessor = load_embedder(
        ModelConfig(name_or_path=str(folder), gradient_checkpointing=checkpointing),
        LoraConfig(enabled=lora, vision=lora, dropout=0.3 if lora else 0.0),
    )
    for name, parameter in embedder.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        embedder(**preprocessor.queries(["the first batch tries itself without padding"]))
    return embedder, preprocessor


def _step(embedder: Embedder, batch: dict[str, torch.Tensor], *, touch: bool) -> torch.Tensor:
    """Embeddings of one forward and backward pass from a fixed random state."""
    embedder.zero_grad()
    torch.manual_seed(7)
    emb = embedder(**batch, touch_vision=touch)
    (emb * torch.arange(emb.numel()).reshape(emb.shape).cos()).sum().backward()
    return emb.detach()


def _calls(embedder: Embedder, batch: dict[str, torch.Tensor], *, touch: bool) -> list[str]:
    """Names of submodules with parameters of their own, in the order of their calls."""
    names: list[str] = []
    handles = []
    for name, module in embedder.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            handles.append(module.register_forward_pre_hook(lambda *_, n=name: names.append(n)))
    embedder(**batch, touch_vision=touch)
    for handle in handles:
        handle.remove()
    return names


@pytest.mark.parametrize("lora", [False, True])
def test_calls_the_submodules_of_a_real_image_pass_in_its_order(
    tiny_models: dict[str, Path], tiles: list[Path], lora: bool
) -> None:
    embedder, preprocessor = _load(tiny_models["qwen3_vl"], lora=lora)
    texts = preprocessor.documents([Document.of_text(text) for text in TEXTS])
    image = preprocessor.documents([Document.of_image(tiles[0])])
    real = _calls(embedder, image, touch=True)
    assert _calls(embedder, texts, touch=True) == real
    untouched = _calls(embedder, texts, touch=False)
    assert not any("visual" in name for name in untouched)
    for part in ("patch_embed", "pos_embed", "blocks.1", "merger", "deepstack_merger_list.0"):
        assert any(f"visual.{part}" in name for name in real), part


@pytest.mark.parametrize("lora", [False, True])
def test_gradients_arrive_in_the_order_of_a_real_image_pass(
    tiny_models: dict[str, Path], tiles: list[Path], lora: bool
) -> None:
    """Engines that reduce during the backward pair up ranks by this order."""
    embedder, preprocessor = _load(tiny_models["qwen3_vl"], lora=lora)
    arrived: list[str] = []
    for name, parameter in embedder.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, n=name: arrived.append(n))
    _step(embedder, preprocessor.documents([Document.of_image(tiles[0])]), touch=False)
    real = arrived.copy()
    arrived.clear()
    _step(embedder, preprocessor.queries(TEXTS), touch=True)
    assert arrived == real
    assert any(".visual." in name for name in real)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_changes_no_number(tiny_models: dict[str, Path], lora: bool, checkpointing: bool) -> None:
    embedder, preprocessor = _load(tiny_models["qwen3_vl"], lora=lora, checkpointing=checkpointing)
    batch = preprocessor.queries(TEXTS)
    expected = _step(embedder, batch, touch=False)
    gradients = {n: p.grad for n, p in embedder.named_parameters()}
    state = torch.get_rng_state()
    touched = _step(embedder, batch, touch=True)
    assert torch.equal(touched, expected)
    assert torch.equal(torch.get_rng_state(), state), "the touch drew random numbers"
    for name, parameter in embedder.named_parameters():
        if ".visual." in name and parameter.requires_grad:
            assert gradients[name] is None, name
            assert parameter.grad is not None, name
            assert (parameter.grad == 0).all(), name
        elif parameter.requires_grad:
            assert torch.equal(parameter.grad, gradients[name]), name
        else:
            assert parameter.grad is None, name


def test_without_gradients(tiny_models: dict[str, Path]) -> None:
    """GradCache's first pass runs under no_grad and must draw what the second draws."""
    embedder, preprocessor = _load(tiny_models["qwen3_vl"], lora=True)
    batch = preprocessor.queries(TEXTS)
    second = _step(embedder, batch, touch=True)
    torch.manual_seed(7)
    with torch.no_grad():
        first = embedder(**batch, touch_vision=True)
    assert torch.equal(first, second)
    assert "blocks.1" in " ".join(_calls(embedder, batch, touch=True))


def test_a_real_image_makes_it_idle(tiny_models: dict[str, Path], tiles: list[Path]) -> None:
    embedder, preprocessor = _load(tiny_models["qwen3_vl"])
    batch = preprocessor.documents([Document.of_image(tiles[0])])
    touched = _calls(embedder, batch, touch=True)
    assert touched == _calls(embedder, batch, touch=False)
    assert torch.equal(_step(embedder, batch, touch=True), _step(embedder, batch, touch=False))


def test_infinite_vision_outputs_do_not_spoil_texts(tiny_models: dict[str, Path]) -> None:
    embedder, preprocessor = _load(tiny_models["qwen3_vl"])
    batch = preprocessor.queries(TEXTS)
    expected = _step(embedder, batch, touch=False)
    language = {n: p.grad for n, p in embedder.named_parameters() if ".visual." not in n}
    with torch.no_grad():
        embedder.base_model.visual.merger.linear_fc2.bias.fill_(float("inf"))
    assert torch.equal(_step(embedder, batch, touch=True), expected)
    for name, gradient in language.items():
        assert torch.equal(embedder.get_parameter(name).grad, gradient), name


def test_disarmed_after_an_error_and_for_direct_calls(tiny_models: dict[str, Path]) -> None:
    embedder, preprocessor = _load(tiny_models["qwen3_vl"])
    batch = preprocessor.queries(TEXTS)
    wrong = batch | {"input_ids": batch["input_ids"] + 10**6}
    with pytest.raises(IndexError):
        embedder(**wrong, touch_vision=True)
    assert not any("visual" in name for name in _calls(embedder, batch, touch=False))
    embedder(**batch, touch_vision=True)
    calls = []
    embedder.base_model.visual.register_forward_pre_hook(lambda *_: calls.append(1))
    embedder.backbone(**batch)
    assert calls == []


def test_text_models_have_nothing_to_touch(tiny_models: dict[str, Path]) -> None:
    embedder, preprocessor = _load(tiny_models["bert"])
    batch = preprocessor.queries(TEXTS)
    assert not embedder.has_vision
    assert torch.equal(embedder(**batch, touch_vision=True), embedder(**batch))
