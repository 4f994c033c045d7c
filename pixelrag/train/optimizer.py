"""AdamW with the parameter groups that retriever training wants."""

from __future__ import annotations

import torch
from torch import nn

from pixelrag.config.parts import OptimConfig
from pixelrag.engine.base import NamedParameters, OptimizerFactory


def adamw(config: OptimConfig) -> OptimizerFactory:
    """Return a factory of AdamW (Loshchilov and Hutter 2019) with two groups.

    Weight decay spares vectors: norms, biases and the logit scale (every parameter of fewer than
    two dimensions). `fused`, for jobs whose configuration has it, is PyTorch's fused kernel.
    """

    def build(named: NamedParameters) -> torch.optim.Optimizer:
        decayed: list[nn.Parameter] = []
        spared: list[nn.Parameter] = []
        for _, parameter in named:
            (decayed if parameter.dim() >= 2 else spared).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": spared, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=getattr(config, "fused", None),
        )

    return build


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
