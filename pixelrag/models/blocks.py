"""The transformer layers of any Hugging Face model: what is sharded, checkpointed or compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from pixelrag.errors import ModelError
from pixelrag.models.precision import recompute_contexts


def transformer_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The outermost layers in the order of the forward pass (vision blocks before text layers)."""
    blocks: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and id(module) not in inside:
            blocks.append(module)
            inside.update(id(child) for child in module.modules())
    if not blocks:
        # Older architectures: the layers are the longest list of equal modules.
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
        alike = [m for m in lists if len({type(child) for child in m}) == 1]
        blocks = list(max(alike, key=len, default=[]))
    return blocks


def checkpoint_blocks(model: PreTrainedModel, dtype: torch.dtype, setting: str) -> None:
    """Recompute each block in the backward pass (non-reentrant, dropout replayed).

    Raises:
        ModelError: the architecture does not support it; names ``setting``.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelError(f"{setting}: {type(model).__name__} does not support it; set it false")
    options: dict[str, Any] = {"use_reentrant": False}
    if dtype == torch.float64:
        options["context_fn"] = recompute_contexts
    model.activation_checkpointing_enable(options)
    # Only reentrant checkpointing needs inputs that require gradients.
    model.disable_input_require_grads()
