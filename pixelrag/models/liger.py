"""Liger's kernels for norms, rotary positions and gated MLPs; never its losses.

Its fused cross entropy would hide from the distillation loss what it needs. Results differ from
the plain modules' by rounding only. A model is changed by itself: another one of its kind, a
teacher without the kernels or on another device, stays as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from transformers import PreTrainedModel

from pixelrag.errors import ModelError
from pixelrag.models.blocks import transformer_blocks

logger = logging.getLogger("pixelrag")

KINDS = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Model types of plain decoders; each is compared with its own modules in the tests."""

_KERNELS = {"rms_norm": True, "rope": False, "swiglu": True}
_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}
_ROTARY = "apply_rotary_pos_emb"


def apply_liger(
    model: PreTrainedModel, switch: str, setting: str, *, cuda: bool | None = None
) -> bool:
    """Put the kernels into a loaded model where ``switch`` and the machine say so.

    Args:
        model: is changed in place; no other one is.
        switch: `auto` (on CUDA, where the package is installed and the model is of `KINDS`), `on`,
            `off`.
        setting: configuration section, for messages.
        cuda: whether the model will run on CUDA; None = look for a device.

    Returns:
        Whether they are in.

    Raises:
        ModelError: `on`, and they cannot be.
    """
    if switch == "off":
        return False
    obstacle = _obstacle(model, torch.cuda.is_available() if cuda is None else cuda)
    if obstacle is not None:
        if switch == "on":
            raise ModelError(f"{setting}.liger on: {obstacle}. Set {setting}.liger to auto or off")
        logger.info("%s: no Liger kernels (%s)", setting, obstacle)
        return False
    liger = importlib.import_module("liger_kernel.transformers")
    apply = getattr(liger, f"apply_liger_kernel_to_{model.config.model_type}")
    with _names_kept(sys.modules[type(model).__module__]):
        apply(**_KERNELS, **_LOSSES, model=model)
    for block in transformer_blocks(model):
        attention: Any = block.self_attn
        forward = _with_rotary(type(attention).forward, liger.liger_rotary_pos_emb)
        attention.forward = MethodType(forward, attention)
    logger.info("%s: Liger kernels for RMSNorm, RoPE and SwiGLU", setting)
    return True


def _obstacle(model: PreTrainedModel, cuda: bool) -> str | None:
    if not cuda:
        return "it needs CUDA"
    if importlib.util.find_spec("liger_kernel") is None:
        return "the package liger-kernel is not installed (pip install liger-kernel)"
    if model.config.model_type not in KINDS or not _is_of_transformers(model):
        return f"it has not been tried with {type(model).__name__} ({model.config.model_type})"
    if model.config.hidden_act not in ("silu", "swish"):
        # Liger puts SwiGLU in place of any MLP of a loaded model.
        return f"its MLPs know SiLU only, and the model has {model.config.hidden_act}"
    return None


def _is_of_transformers(model: PreTrainedModel) -> bool:
    return type(model).__module__.startswith("transformers.models.")


@contextmanager
def _names_kept(modeling: ModuleType) -> Iterator[None]:
    """Undo what happens to a module's names: Liger also replaces the classes of models to come."""
    before = dict(vars(modeling))
    try:
        yield
    finally:
        vars(modeling).update(before)


def _with_rotary(forward: Callable[..., Any], rotary: Callable[..., Any]) -> FunctionType:
    """An attention layer's forward that finds another function under the rotary one's name."""
    plain = inspect.unwrap(forward)
    names = {**plain.__globals__, _ROTARY: rotary}
    copy = FunctionType(
        plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    return copy
