"""Merges adapters into weights that were gathered, without reading the model's own parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer

_PEFT = "base_model.model."


def merged(named: Mapping[str, torch.Tensor], model: PeftModel) -> dict[str, torch.Tensor]:
    """Weights by the base model's names, with the adapter in them where there is one.

    LoRA: V = W + scaling * B A. DoRA: m * V / ||V||, row by row (Liu et al. 2024, eq. 5).

    Args:
        named: full tensors under the keys of ``model.state_dict()``.
        model: says where adapters are, and their scale.
    """
    found: dict[str, torch.Tensor] = {}
    for key, tensor in named.items():
        if ".lora_" in key:
            continue
        path, _, leaf = key.rpartition(".")
        layer = model.get_submodule(path.removesuffix(".base_layer"))
        if path.endswith(".base_layer") and isinstance(layer, LoraLayer):
            path = path.removesuffix(".base_layer")
            if leaf == "weight":
                tensor = _with_adapter(tensor.float(), named, path, layer)
        found[f"{path}.{leaf}".removeprefix(_PEFT)] = tensor
    return found


def _with_adapter(
    weight: torch.Tensor, named: Mapping[str, torch.Tensor], path: str, layer: LoraLayer
) -> torch.Tensor:
    name = layer.active_adapters[0]
    turned = bool(getattr(layer, "fan_in_fan_out", False))  # of layers that store W transposed
    down, up = (named[f"{path}.lora_{part}.{name}.weight"].float() for part in "AB")
    change = up @ down * layer.scaling[name]
    weight = weight + (change.t() if turned else change)
    if not layer.use_dora[name]:
        return weight
    rows = 1 if turned else 0  # the dimension of the outputs
    length = weight.norm(dim=1 - rows, keepdim=True)
    magnitude = named[f"{path}.lora_magnitude_vector.{name}.weight"].float()
    return magnitude.view_as(length) / length * weight
