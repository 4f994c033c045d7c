"""The parts of an encoder that are frozen, trained or given a learning rate by themselves."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

import torch
from torch import nn

from pixelrag.errors import ModelError

TowerPart = Literal["text", "vision", "merger"]

_MERGER = re.compile(r"(?:^|\.)visual\.(?:merger|deepstack_merger_list)\.")
_VISION = re.compile(r"(?:^|\.)visual\.")


def part_of(name: str) -> TowerPart:
    """Where a parameter belongs by its name; wrappers' prefixes do not matter.

    The merger is what joins Qwen3-VL's vision tower to its language model, deepstack's mergers
    included; all that is not in the vision tower is text.
    """
    if _MERGER.search(name):
        return "merger"
    return "vision" if _VISION.search(name) else "text"


def unfreeze(backbone: nn.Module, parts: Collection[TowerPart]) -> None:
    """Train the weights of these parts, in float32, and no others beside adapters.

    Raises:
        ModelError: the model lacks a part.
    """
    of_part = {name: part_of(name) for name, _ in backbone.named_parameters()}
    for part in parts:
        if part not in of_part.values():
            raise ModelError(
                f"model.unfrozen names {part}, which the model lacks: it has no vision tower"
            )
    for name, parameter in backbone.named_parameters():
        if _in_adapter(name):
            continue
        parameter.requires_grad_(of_part[name] in parts)
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def trains_beside_adapters(model: nn.Module) -> bool:
    """Whether more is trained than an adapter's file can hold."""
    return any(p.requires_grad and not _in_adapter(n) for n, p in model.named_parameters())


def _in_adapter(name: str) -> bool:
    return "lora_" in name or ".modules_to_save." in name
