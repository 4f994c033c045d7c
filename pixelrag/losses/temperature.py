"""A learnable temperature, kept in log space and held in its range without a dead zone.

The scale is ``1 / temperature``; its logarithm starts at ln(1/0.07) and is held in [0, ln 100]
as in CLIP (Radford et al. 2021, section 2.5). Clamping the parameter in place after the step, as
CLIP does, is undone by optimizers that keep master weights (ZeRO), and clamping in the forward
pass alone stops the gradient for good at the border. Here the forward clamps and the backward
passes every gradient but one: a parameter that already lies outside gets no push further out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

MIN_LOG_SCALE = 0.0
MAX_LOG_SCALE = math.log(100.0)


class _HeldInRange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(log_scale)
        return log_scale.clamp(MIN_LOG_SCALE, MAX_LOG_SCALE)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (log_scale,) = ctx.saved_tensors
        # Descent moves against the gradient: a negative one pushes the value up.
        outward = ((log_scale >= MAX_LOG_SCALE) & (grad < 0)) | (
            (log_scale <= MIN_LOG_SCALE) & (grad > 0)
        )
        return grad.masked_fill(outward, 0.0)


def scale_from_log(log_scale: torch.Tensor) -> torch.Tensor:
    """Return exp(log_scale), with log_scale held in [0, ln 100].

    Args:
        log_scale: any shape, fp32 or fp64; values outside the range act as the nearest border.
    """
    return _HeldInRange.apply(log_scale).exp()


def scale_and_bias(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Take apart what a `LogitScale` returns: the scale [1], held in its range, and the bias [1].

    Args:
        raw: [1], the log scale; or [2], and the bias of a sigmoid loss.
    """
    return scale_from_log(raw[:1]), raw[1:] if len(raw) > 1 else None


class LogitScale(nn.Module):
    """The parameter, of shape [1] because sharding engines refuse 0-dimensional ones.

    Args:
        temperature: initial temperature; must lie in [0.01, 1].
        learnable: False keeps it fixed.
        bias: initial bias of a sigmoid loss, always trained (Zhai et al. 2023, section 3.2, which
            begins with temperature 0.1 and bias -10); None = no bias.
    """

    full_precision = True  # FSDP2 must not round it to bf16

    def __init__(
        self, temperature: float = 0.07, *, learnable: bool = True, bias: float | None = None
    ) -> None:
        super().__init__()
        if not 0.01 <= temperature <= 1.0:
            raise ValueError(f"loss.temperature: got {temperature}, expected 0.01 to 1")
        value = torch.tensor([math.log(1.0 / temperature)])
        self.log_scale = nn.Parameter(value, requires_grad=learnable)
        self.bias = None if bias is None else nn.Parameter(torch.tensor([bias]))

    def forward(self) -> torch.Tensor:
        """Return the raw logarithm [1], or it and the bias [2], as part of the graph."""
        if self.bias is None:
            return self.log_scale * 1.0
        return torch.cat([self.log_scale, self.bias])
