"""Floating-point operations of a distillation step, and what share of the device's peak they are.

Counted is what the mathematics needs: real tokens, causal attention within documents, heads at the
supervised tokens. Recomputed activations and padding are no progress and do not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from pixelrag.models.causal import CausalLM

# Dense bf16 peaks by what the device calls itself, in operations a second (vendors' data sheets).
_PEAKS = (
    ("B200", 2.25e15),
    ("H200", 9.89e14),
    ("H100 PCIe", 7.56e14),
    ("H100 NVL", 8.35e14),
    ("H100", 9.89e14),
    ("A100", 3.12e14),
    ("L40S", 3.62e14),
    ("A10G", 7.0e13),
    ("A10", 1.25e14),
    ("L4", 1.21e14),
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's cost depends on.

    Attributes:
        body: parameters of the transformer layers.
        attention_width: heads times their size, of all layers together.
        head: columns of the vocabulary that count, times the width of the final states.
    """

    body: int
    attention_width: int
    head: int

    @classmethod
    def of(cls, model: CausalLM, vocab_size: int) -> ModelShape:
        """The shape of a loaded, unsharded model."""
        config = model.base_model.config.get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        blocks = model.blocks()
        body = sum(p.numel() for block in blocks for p in block.parameters())
        return cls(body, heads * head_dim * len(blocks), vocab_size * model.hidden_size)

    def forward(self, num_tokens: int, squares: int, num_supervised: int) -> float:
        """Operations of a forward pass.

        Args:
            num_tokens: real tokens.
            squares: sum of the documents' squared lengths.
            num_supervised: tokens that go through the head.
        """
        return 2.0 * (
            self.body * num_tokens + self.attention_width * squares + self.head * num_supervised
        )

    @property
    def attention_cost(self) -> float:
        """Cost of a pair of tokens in the same document, in that of a token."""
        return self.attention_width / max(self.body, 1)


def attention_cost(student: PreTrainedConfig, teacher: PreTrainedConfig | None) -> float:
    """The same from the models' configurations alone, before weights are loaded.

    Args:
        student, teacher: transformers configurations; None where no teacher runs.
    """
    width = body = 0.0
    # A training step is three forward passes.
    for config, passes in ((student, 3), (teacher, 1)):
        if config is None:
            continue
        config = config.get_text_config()
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        layers = config.num_hidden_layers
        layer = config.hidden_size * (2 * (heads + groups) * size + 3 * inner)
        width += passes * layers * heads * size
        body += passes * layers * layer
    return width / body


def peak_of(device: torch.device, precision: str) -> float | None:
    """Operations a second of the device in bf16 at most; None where that is not known."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    # By whole words: an L40 is no L4, an A1000 no A100.
    return next((peak for part, peak in _PEAKS if re.search(rf"\b{part}\b", name)), None)
