"""Names in LoRA adapters of other trainers, and whether an adapter does anything at all."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from peft import PeftModel

from pixelrag.errors import ModelError

_PEFT = "base_model.model."


def unwrapped(
    tensors: dict[str, torch.Tensor], modules: Collection[str]
) -> tuple[dict[str, torch.Tensor], list[str] | None]:
    """An adapter's tensors by the names of a bare model, and the modules it adapts if renamed.

    ms-swift trains Qwen3-VL inside its class with a language-modelling head, whose layers are
    called `model.language_model...` and `model.visual...`; the bare model's lack the `model.`.

    Args:
        tensors: content of the adapter's file.
        modules: names of all modules of the model.
    """
    adapted = {key.removeprefix(_PEFT).partition(".lora_")[0] for key in tensors}
    bare = {name.removeprefix("model.") for name in adapted}
    if adapted & set(modules) or not bare <= set(modules):
        return tensors, None
    renamed = {key.replace(f"{_PEFT}model.", _PEFT, 1): value for key, value in tensors.items()}
    return renamed, sorted(bare)


@torch.no_grad()
def check_effect(model: PeftModel, token_ids: torch.Tensor, name: str) -> None:
    """Compare one forward pass with and without the adapter, on text and on an image.

    Args:
        model: with the adapter in it.
        token_ids: int64 [1, T], any text.
        name: of the adapter, for the message.

    Raises:
        ModelError: the outputs are the same.
    """
    trains, base = model.training, model.get_base_model()
    passes = [lambda: model(input_ids=token_ids, return_dict=True).last_hidden_state]
    if hasattr(base, "visual"):
        passes.append(lambda: _look(base))
    model.eval()
    try:
        changed = False
        for run in passes:
            with_adapter = run()
            with model.disable_adapter():
                changed |= not torch.equal(with_adapter, run())
    finally:
        model.train(trains)
    if not changed:
        raise ModelError(
            f"{name}: the adapter changes no output of the model; was it saved before its first "
            "step, or are its weights all zero?"
        )


def _look(base: Any) -> torch.Tensor:
    """What the vision tower makes of one block of patches."""
    vision = base.config.vision_config
    side = vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    patches = torch.linspace(-1, 1, side * side * width).reshape(side * side, width)
    grid = torch.tensor([[1, side, side]])
    output = base.visual(patches.type(base.visual.dtype), grid_thw=grid, return_dict=True)
    return output.pooler_output
