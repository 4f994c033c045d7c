"""The contrastive job's container: an encoder for queries and documents, and the temperature."""

from __future__ import annotations

import torch
from torch import nn

from pixelrag.losses.temperature import LogitScale
from pixelrag.models.embedder import Embedder


class BiEncoder(nn.Module):
    """Everything that the contrastive job trains, in one module.

    Args:
        encoder: ``encoder(touch_vision=bool, **inputs) -> [B, D]``, normalised.
        temperature: initial temperature.
        learnable_temperature: whether the logit scale is trained.
        bias: initial bias of a sigmoid loss, trained; None = no bias.
    """

    def __init__(
        self,
        encoder: Embedder,
        *,
        temperature: float = 0.07,
        learnable_temperature: bool = True,
        bias: float | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.logit_scale = LogitScale(temperature, learnable=learnable_temperature, bias=bias)

    def forward(
        self, role: str, *, touch_vision: bool = False, **inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(embedding_BD, log_scale)``, the latter as `LogitScale` does.

        The scale is part of every output because sharded parameters may only be used inside a
        forward pass. One encoder serves both roles; ``role`` names the pass for the engine.
        """
        if role not in ("query", "document"):
            raise ValueError(f"role: got {role!r}, expected query or document")
        return self.encoder(touch_vision=touch_vision, **inputs), self.logit_scale()
