"""Optimizer state by parameter name, the form in which every engine gives and takes it.

For a parameter, every state tensor of the parameter's shape (Adam's moments) is stored whole;
other entries (the step count) as they are. The form knows nothing of shards, so what one engine
wrote another can read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from pixelrag.errors import CheckpointError

OptimizerState = dict[str, dict[str, torch.Tensor]]

AVERAGE = "ema"
"""The optimizer's state that is a moving average of the weights, where it keeps one."""


def plain_state(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]]
) -> OptimizerState:
    """State of an optimizer over unsharded parameters, copied to the CPU."""
    return {
        name: {
            key: torch.as_tensor(value).detach().to("cpu", copy=True)
            for key, value in optimizer.state[parameter].items()
        }
        for name, parameter in named
        if parameter in optimizer.state
    }


def load_plain_state(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, nn.Parameter]],
    state: Mapping[str, Mapping[str, torch.Tensor]],
) -> None:
    """Install ``state`` into an optimizer over unsharded parameters.

    Raises:
        CheckpointError: names or shapes do not fit.
    """
    check_names(state, dict(named), {n: tuple(p.shape) for n, p in named})
    for name, parameter in named:
        if name in state:
            optimizer.state[parameter] = {
                key: value.to(parameter.device, copy=True)
                if is_moment(value, parameter.shape)
                else value.clone()
                for key, value in state[name].items()
            }


def is_moment(value: torch.Tensor, shape: tuple[int, ...] | torch.Size) -> bool:
    """True for state that has one entry per weight, such as Adam's moments."""
    # A [1] parameter's step count may have one entry as well; step counts are 0-dimensional.
    return value.dim() > 0 and tuple(value.shape) == tuple(shape)


def check_names(
    state: Mapping[str, Mapping[str, torch.Tensor]],
    parameters: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise unless every entry of ``state`` belongs to a trained parameter of its shape.

    Raises:
        CheckpointError: names the first entries that do not fit.
    """
    unknown = sorted(set(state) - set(parameters))
    if unknown:
        raise CheckpointError(
            f"the optimizer state holds {len(unknown)} parameters that this model does not train, "
            f"first {unknown[0]!r}; was the checkpoint written with other lora or freezing options?"
        )
    for name, entries in state.items():
        for key, value in entries.items():
            if value.dim() > 0 and tuple(value.shape) != shapes[name]:
                raise CheckpointError(
                    f"optimizer state {name}/{key} has shape {list(value.shape)}, "
                    f"expected {list(shapes[name])}"
                )
