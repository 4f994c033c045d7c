"""AdamW with the parameter groups that retriever training wants."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from pixelrag.config.parts import OptimConfig
from pixelrag.engine.base import NamedParameters, OptimizerFactory
from pixelrag.errors import ConfigError
from pixelrag.train.averaging import AveragedAdamW

# The part of a container that a parameter belongs to, by its name.
PartOf = Callable[[str], str]


def adamw(
    config: OptimConfig, part_of: PartOf | None = None, *, averages: bool = False
) -> OptimizerFactory:
    """Return a factory of AdamW (Loshchilov and Hutter 2019) with two groups a learning rate.

    Weight decay spares vectors: norms, biases and the logit scale (every parameter of fewer than
    two dimensions). `fused`, for jobs whose configuration has it, is PyTorch's fused kernel.

    Args:
        config: the configuration's `optim` section.
        part_of: says whose learning rate a parameter has; None = all have the same.
        averages: also keep moving averages of the weights, see `pixelrag.train.averaging`.

    Raises:
        ConfigError: from the factory, where a learning rate is that of nothing that is trained.
    """
    rates = config.part_rates if part_of is not None else {}

    def build(named: NamedParameters) -> torch.optim.Optimizer:
        groups: dict[tuple[str | None, bool], list[nn.Parameter]] = {}
        for name, parameter in named:
            part = part_of(name) if part_of is not None else None
            part = part if part in rates else None
            groups.setdefault((part, parameter.dim() >= 2), []).append(parameter)
        unused = sorted(rates.keys() - {part for part, _ in groups})
        if unused:
            raise ConfigError(
                f"optim.{unused[0]}_learning_rate: nothing of that part is trained; leave it out, "
                "or train the part"
            )
        kind = AveragedAdamW if averages else torch.optim.AdamW
        return kind(
            [
                {
                    "params": parameters,
                    "part": part,
                    "weight_decay": config.weight_decay if decays else 0.0,
                }
                for (part, decays), parameters in groups.items()
            ],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=getattr(config, "fused", None),
        )

    return build


def set_learning_rates(
    optimizer: torch.optim.Optimizer, config: OptimConfig, factor: float
) -> dict[str, float]:
    """Set each group's rate to its peak times ``factor``; returns them as figures to log."""
    peaks: dict[str | None, float] = {None: config.learning_rate}
    peaks.update(config.part_rates.items())
    for group in optimizer.param_groups:
        group["lr"] = peaks[group["part"]] * factor
    own = {f"train/lr/{part}": peak * factor for part, peak in config.part_rates.items()}
    return {"train/lr": config.learning_rate * factor} | own
