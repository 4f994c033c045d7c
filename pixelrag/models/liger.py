"""Liger's kernels for norms, rotary positions and gated MLPs; never its losses.

Its fused cross entropy would hide from the distillation loss what it needs. Results differ from
the plain modules' by rounding only.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging

import torch
from transformers import PreTrainedModel

from pixelrag.errors import ModelError

logger = logging.getLogger("pixelrag")

_WANTED = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu")


def apply_liger(
    model: PreTrainedModel, switch: str, setting: str, *, cuda: bool | None = None
) -> bool:
    """Put the kernels into a loaded model where ``switch`` and the machine say so.

    Args:
        model: is changed in place.
        switch: `auto` (on CUDA, where the package is installed and knows the model), `on`, `off`.
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
    patch = importlib.import_module("liger_kernel.transformers.monkey_patch")
    function = patch.MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    offered = inspect.signature(function).parameters
    flags = {name: name in _WANTED for name, given in offered.items() if _is_flag(given)}
    function(**flags, model=model)
    used = [name for name, wanted in flags.items() if wanted]
    logger.info("%s: Liger kernels for %s", setting, ", ".join(used))
    return True


def _obstacle(model: PreTrainedModel, cuda: bool) -> str | None:
    if not cuda:
        return "it needs CUDA"
    if importlib.util.find_spec("liger_kernel") is None:
        return "the package liger-kernel is not installed (pip install liger-kernel)"
    patch = importlib.import_module("liger_kernel.transformers.monkey_patch")
    if model.config.model_type not in patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"it does not know the kind {model.config.model_type}"
    return None


def _is_flag(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.default, bool)
