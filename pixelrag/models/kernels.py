"""Which attention implementation a model runs on."""

from __future__ import annotations

import importlib.util
import logging

import torch

from pixelrag.errors import ModelError

logger = logging.getLogger("pixelrag")


def choose_attention(
    requested: str,
    model_class: type | None,
    *,
    half_precision: bool,
    cuda: bool | None = None,
    flash_attn: bool | None = None,
    setting: str = "model.attention",
) -> str:
    """Pick the implementation and say so in one log line.

    An explicit request wins. `auto` takes flash_attention_2 where there is a CUDA device, the
    package `flash_attn`, a model that supports it and bf16 computation (the kernel takes no fp32);
    else sdpa where the model supports it, else eager.

    Args:
        requested: `auto`, `eager`, `sdpa` or `flash_attention_2`.
        model_class: the transformers class; None when unknown (remote code), then not consulted.
        half_precision: the model computes in bf16.
        cuda, flash_attn: what this machine has; None = look.
        setting: the option that asks, for messages.

    Raises:
        ModelError: an explicit request that cannot be met.
    """
    chosen, why = pick_attention(
        requested,
        model_class,
        half_precision=half_precision,
        cuda=cuda,
        flash_attn=flash_attn,
        setting=setting,
    )
    logger.info("attention: %s (%s)", chosen, why)
    return chosen


def pick_attention(
    requested: str,
    model_class: type | None,
    *,
    half_precision: bool,
    cuda: bool | None,
    flash_attn: bool | None,
    setting: str,
) -> tuple[str, str]:
    """`choose_attention` without the log line: the implementation, and why."""
    cuda = torch.cuda.is_available() if cuda is None else cuda
    if flash_attn is None:
        flash_attn = importlib.util.find_spec("flash_attn") is not None
    obstacles = []
    if not cuda:
        obstacles.append("there is no CUDA device")
    if not flash_attn:
        obstacles.append("the package flash-attn is not installed (pip install flash-attn)")
    if not half_precision:
        obstacles.append("it computes in bf16 only (set engine.precision to bf16)")
    kind = getattr(model_class, "__name__", "the model")
    if not getattr(model_class, "_supports_flash_attn", True):
        obstacles.append(f"{kind} does not support it")
    no_sdpa = not getattr(model_class, "_supports_sdpa", True)

    if requested == "auto":
        chosen = "flash_attention_2" if not obstacles else "eager" if no_sdpa else "sdpa"
        why = f"{setting} auto"
        if obstacles:
            why += f"; not flash_attention_2: {obstacles[0]}"
    else:
        chosen, why = requested, "as configured"
        if requested == "flash_attention_2" and obstacles:
            raise ModelError(
                f"{setting} flash_attention_2 cannot run: {'; '.join(obstacles)}. "
                f"Mend that, or set {setting} to auto"
            )
        if requested == "sdpa" and no_sdpa:
            raise ModelError(
                f"{setting} sdpa: {kind} does not support it. Set {setting} to eager or auto"
            )
    return chosen, why
