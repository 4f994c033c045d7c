"""Attention document by document: a row of packed samples costs what its samples cost alone.

A mask over a packed row computes the square of the row and throws most of it away. Here each
document is attended to by itself: on CUDA in bf16 through PyTorch's variable-length kernel, which
needs no further package, else by one call for neighbours of one length. `register` makes it an
attention implementation of transformers, which then builds no mask at all: the bounds that come
along with the call are the only source of isolation.
"""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from pixelrag.errors import ModelError
from pixelrag.models.kernels import pick_attention

logger = logging.getLogger("pixelrag")

VARLEN = "pixelrag_varlen"
"""Its name among transformers' attention implementations."""

# Kinds of layers that attend to the whole document, within a window or not.
_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
# Arguments of other implementations that would change the result if they were left out.
_UNKNOWN = ("s_aux", "sinks", "position_bias", "head_mask", "alibi", "attention_bias")


def register() -> str:
    """Make it known to transformers; returns its name. May be called again."""
    AttentionInterface.register(VARLEN, document_attention)
    return VARLEN


def choose_causal_attention(
    requested: str,
    model_class: type | None,
    config: Any,
    *,
    half_precision: bool,
    cuda: bool,
    setting: str = "student",
    flash_attn: bool | None = None,
) -> str:
    """Pick the attention implementation of a causal model, and say so in one log line.

    `auto` takes flash_attention_2 where it runs, else varlen where the architecture's attention is
    causal and goes through transformers' attention interface, else sdpa or eager.

    Args:
        requested: what the configuration says.
        model_class: the transformers class; None when unknown (remote code).
        config: the model's configuration.
        half_precision: the model computes in bf16.
        cuda: it runs on CUDA.
        setting: configuration section, for messages.
        flash_attn: whether the package is there; None = look.

    Raises:
        ModelError: an explicit request that cannot be met.
    """
    obstacle = varlen_obstacle(model_class, config)
    if requested == "varlen":
        if obstacle is not None:
            raise ModelError(
                f"{setting}.attention varlen: {obstacle}. Set {setting}.attention to auto"
            )
        logger.info("%s attention: %s (as configured)", setting, VARLEN)
        return register()
    chosen, why = pick_attention(
        requested, model_class, half_precision=half_precision, cuda=cuda, flash_attn=flash_attn,
        setting=f"{setting}.attention",
    )  # fmt: skip
    if requested == "auto" and chosen != "flash_attention_2":
        if obstacle is None:
            chosen, why = register(), f"{why}; document by document"
        elif getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
            chosen = "eager"  # sdpa would leave the cap out
    logger.info("%s attention: %s (%s)", setting, chosen, why)
    return chosen


def varlen_obstacle(model_class: type | None, config: Any) -> str | None:
    """Why the attention of a model cannot be `document_attention`; None = it can.

    Args:
        model_class: the transformers class; None when unknown (remote code).
        config: the model's configuration.
    """
    if not getattr(model_class, "_supports_attention_backend", False):
        name = "a model of remote code" if model_class is None else model_class.__name__
        return f"{name} does not go through transformers' attention interface"
    text = config.get_text_config()
    other = set(getattr(text, "layer_types", None) or ()) - _PLAIN_LAYERS
    if other or getattr(text, "attention_chunk_size", None):
        return f"its layers are of the kind {min(other, default='chunked_attention')}"
    return None


@torch.compiler.disable
def document_attention(
    module: nn.Module,
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each document, in the form transformers expects.

    Args:
        module: the attention layer; named in messages.
        query_BHTD: queries of H heads.
        key_BKTD, value_BKTD: keys and values of K heads, H a multiple of K.
        attention_mask: must be None.
        scaling: of the scores; None = 1 / sqrt(D).
        dropout: probability on attention weights.
        sliding_window: see only so many tokens, the own one included; to both sides if not causal.
        softcap: cap * tanh(score / cap) before the soft-max.
        is_causal: a token sees nothing behind it; None = as the layer's own `is_causal` says.
        cu_seq_lens_q: where documents begin and end in the flattened rows, 0 to B * T, int32 on the
            device; a bound stands between any two rows. A tensor, as compiled layers would be
            compiled anew for every other tuple of numbers.
        max_length_q: tokens of the longest document.

    Returns:
        [B, T, H, D of the values], and None for the weights.

    Raises:
        ModelError: no bounds, a mask, or an argument this implementation does not know.
    """
    name = type(module).__name__
    unknown = [key for key in _UNKNOWN if others.get(key) is not None]
    if unknown:
        raise ModelError(
            f"{name} passes {unknown[0]} to attention, which varlen does not know; "
            "set attention to eager"
        )
    if attention_mask is not None or cu_seq_lens_q is None:
        got = "a mask" if attention_mask is not None else "no document bounds"
        raise ModelError(
            f"{name}: varlen attention got {got}; it runs through pixelrag's CausalLM only"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    batch, heads, length, width = query_BHTD.shape
    scale = 1 / math.sqrt(width) if scaling is None else scaling
    # [tokens, heads, D]: documents are slices of the flattened rows.
    query, key, value = (
        x.transpose(1, 2).flatten(0, 1) for x in (query_BHTD, key_BKTD, value_BKTD)
    )
    if torch.is_autocast_enabled(query.device.type):
        # fp32 norms and rotary tables leave queries and keys wider than the values.
        low = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(low), key.to(low), value.to(low)
    if _kernel_takes(query, value, dropout, softcap):
        from torch.nn.attention.varlen import varlen_attn

        reach = -1 if sliding_window is None else sliding_window - 1
        assert max_length_q is not None  # comes with the bounds
        out = varlen_attn(
            query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q,
            scale=scale,
            window_size=(reach, 0 if causal else reach),
            enable_gqa=key.shape[1] != heads,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)  # no log-sum-exp was asked for
        return out.unflatten(0, (batch, length)), None
    # Neighbours of one length go through one call.
    sizes = [stop - start for start, stop in itertools.pairwise(cu_seq_lens_q.tolist())]
    alike = [(size, len(list(same))) for size, same in itertools.groupby(sizes) if size]
    tokens = [size * number for size, number in alike]
    parts = [
        _equally_long(
            q.unflatten(0, (-1, size)).transpose(1, 2),
            k.unflatten(0, (-1, size)).transpose(1, 2),
            v.unflatten(0, (-1, size)).transpose(1, 2),
            scale, dropout, sliding_window, softcap, causal,
        )
        for (size, _), q, k, v in zip(
            alike, *(x.split(tokens) for x in (query, key, value)), strict=True
        )
    ]  # fmt: skip
    return torch.cat(parts).unflatten(0, (batch, length)), None


def _kernel_takes(
    query: torch.Tensor, value: torch.Tensor, dropout: float, softcap: float | None
) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16)
    plain = dropout == 0 and softcap is None and query.shape[-1] == value.shape[-1]
    return query.is_cuda and half and plain


def _equally_long(
    query_NHTD: torch.Tensor,
    key_NKTD: torch.Tensor,
    value_NKTD: torch.Tensor,
    scale: float,
    dropout: float,
    window: int | None,
    softcap: float | None,
    causal: bool,
) -> torch.Tensor:
    """Attention of N documents of T tokens, [N * T, H, D]."""
    length, query, key, value = query_NHTD.shape[2], query_NHTD, key_NKTD, value_NKTD
    shared = query.shape[1] // key.shape[1]
    reach = None if window is None or length <= window else window
    if softcap is None and reach is None:
        out = F.scaled_dot_product_attention(
            query, key, value,
            dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=shared > 1,
        )  # fmt: skip
        return out.transpose(1, 2).flatten(0, 1)
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    age = torch.arange(length, device=query.device)
    age = age[:, None] - age
    seen = age >= 0 if causal else torch.ones_like(age, dtype=torch.bool)
    if reach is not None:
        seen &= age.abs() < reach
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    weights = F.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return (F.dropout(weights, dropout) @ value).transpose(1, 2).flatten(0, 1)
