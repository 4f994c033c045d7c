"""Tiny random causal language models of several kinds, complete with tokenizer and chat template.

For tests, `pixelrag verify` and the demo, as in `tiny.py`; they load with `AutoModelForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen3Config,
)

from pixelrag.models.load import quiet
from pixelrag.models.tiny_tokenizer import SAMPLE, byte_tokenizer

# At transformers' 0.02 a narrow model gives nearly the same logits everywhere.
_WEIGHT_SCALE = 0.2


def _common(rows: int, hidden: int, layers: int, length: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": rows,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": length,
        "initializer_range": _WEIGHT_SCALE,
        **more,
    }


_KINDS: dict[str, Callable[..., PretrainedConfig]] = {
    # Grouped queries, norms of queries and keys.
    "qwen3": lambda *sizes, **more: Qwen3Config(**_common(*sizes, head_dim=8, **more)),
    "llama": lambda *sizes, **more: LlamaConfig(**_common(*sizes, **more)),
    # A window of 8 tokens on all layers.
    "mistral": lambda *sizes, **more: MistralConfig(**_common(*sizes, sliding_window=8, **more)),
    # Capped scores and logits, windows on every other layer.
    "gemma2": lambda *sizes, **more: Gemma2Config(
        **_common(
            *sizes, head_dim=8, sliding_window=8, attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0, query_pre_attn_scalar=8, **more,
        )
    ),
    # Scaled logits, by factor and by divisor.
    "cohere": lambda *sizes, **more: CohereConfig(**_common(*sizes, logit_scale=0.25, **more)),
    "granite": lambda *sizes, **more: GraniteConfig(**_common(*sizes, logits_scaling=4.0, **more)),
    # A bias on the head.
    "phi": lambda *sizes, **more: PhiConfig(**_common(*sizes, **more)),
    # Learned positions.
    "gpt2": lambda rows, hidden, layers, length, **more: GPT2Config(
        vocab_size=rows, n_embd=hidden, n_layer=layers, n_head=4, n_positions=length,
        initializer_range=_WEIGHT_SCALE, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **more,
    ),
}  # fmt: skip

KINDS = tuple(_KINDS)


def save_tiny_causal(
    folder: str | Path,
    kind: str = "qwen3",
    *,
    texts: Sequence[str] = SAMPLE,
    vocab_size: int = 600,
    padded_rows: int = 0,
    hidden_size: int = 32,
    num_layers: int = 2,
    max_length: int = 512,
    tied: bool = True,
    seed: int = 0,
) -> Path:
    """Write a tiny model.

    Args:
        folder: where to.
        kind: one of `KINDS`.
        texts: shape the tokenizer; equal texts and sizes give equal tokenizers.
        vocab_size: tokens, at most.
        padded_rows: rows of the embedding and head that belong to no token.
        hidden_size: H.
        num_layers: transformer layers.
        max_length: positions.
        tied: head and embedding share their weight.
        seed: of the weights.
    """
    folder = Path(folder)
    tokenizer = byte_tokenizer(texts, vocab_size=vocab_size, max_length=max_length)
    rows = len(tokenizer) + padded_rows
    config = _KINDS[kind](
        rows, hidden_size, num_layers, max_length,
        tie_word_embeddings=tied, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), quiet():
        torch.random.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero otherwise, and then no test would miss it
                torch.nn.init.normal_(parameter, std=_WEIGHT_SCALE)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder
