"""Attention document by document: a row of packed samples costs what its samples cost alone.

A mask over a packed row computes the square of the row and throws most of it away. Here each
document is attended to by itself: on CUDA in bf16 through PyTorch's variable-length kernel, which
needs no further package, else by one call a document. `register` makes it an attention
implementation of transformers, which then builds no mask at all: the bounds that come along with
the call are the only source of isolation.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from pixelrag.errors import ModelError

VARLEN = "pixelrag_varlen"
"""Its name among transformers' attention implementations."""

# Arguments of other implementations that would change the result if they were left out.
_UNKNOWN = ("s_aux", "sinks", "position_bias", "head_mask", "alibi", "attention_bias")


def register() -> str:
    """Make it known to transformers; returns its name. May be called again."""
    AttentionInterface.register(VARLEN, document_attention)
    return VARLEN


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
    document_bounds: tuple[int, ...] | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document, in the form transformers expects.

    Args:
        module: the attention layer; only named in messages.
        query_BHTD: queries of H heads.
        key_BKTD, value_BKTD: keys and values of K heads, H a multiple of K.
        attention_mask: must be None.
        scaling: of the scores; None = 1 / sqrt(D).
        dropout: probability on attention weights.
        sliding_window: see only so many tokens, the own one included.
        softcap: cap * tanh(score / cap) before the soft-max.
        document_bounds: where documents begin and end in the flattened rows, 0 to B * T; a bound
            stands between any two rows.
        cu_seq_lens_q: the same as int32 on the device.
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
    if attention_mask is not None or document_bounds is None:
        got = "a mask" if attention_mask is not None else "no document bounds"
        raise ModelError(
            f"{name}: varlen attention got {got}; it runs through pixelrag's CausalLM only"
        )
    batch, heads, length, width = query_BHTD.shape
    scale = 1 / math.sqrt(width) if scaling is None else scaling
    # [tokens, heads, D]: documents are slices of the flattened rows.
    query, key, value = (
        x.transpose(1, 2).flatten(0, 1) for x in (query_BHTD, key_BKTD, value_BKTD)
    )
    if _kernel_takes(query, value, dropout, softcap):
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q,
            scale=scale,
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=key.shape[1] != heads,
        )  # fmt: skip
        return out.unflatten(0, (batch, length)), None
    sizes = [stop - start for start, stop in itertools.pairwise(document_bounds)]
    parts = [
        _one(q, k, v, scale, dropout, sliding_window, softcap)
        for q, k, v in zip(*(x.split(sizes) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(parts).unflatten(0, (batch, length)), None


def _kernel_takes(
    query: torch.Tensor, value: torch.Tensor, dropout: float, softcap: float | None
) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16)
    plain = dropout == 0 and softcap is None and query.shape[-1] == value.shape[-1]
    return query.is_cuda and half and plain


def _one(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    scale: float,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of one document, [T, H, D]."""
    length, heads = query_THD.shape[:2]
    shared = heads // key_TKD.shape[1]
    query, key, value = (x.transpose(0, 1) for x in (query_THD, key_TKD, value_TKD))
    limited = window is not None and length > window
    if softcap is None and not limited:
        out = F.scaled_dot_product_attention(
            query[None], key[None], value[None],
            dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=shared > 1,
        )  # fmt: skip
        return out[0].transpose(0, 1)
    key, value = key.repeat_interleave(shared, 0), value.repeat_interleave(shared, 0)
    age = torch.arange(length, device=query.device)
    age = age[:, None] - age
    seen = (age >= 0) & (age < window) if limited else age >= 0
    scores = query @ key.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    weights = F.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return (F.dropout(weights, dropout) @ value).transpose(0, 1)
