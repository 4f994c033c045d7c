"""Tiny random encoder-decoders, complete with tokenizer, as in `tiny.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    T5Config,
)

from pixelrag.models.load import quiet
from pixelrag.models.tiny_tokenizer import SAMPLE, byte_tokenizer

# At transformers' 0.02 a narrow model gives nearly the same logits everywhere.
_WEIGHT_SCALE = 0.2
_START, _END = "<|im_start|>", "<|im_end|>"

KINDS = ("t5", "bart")


def save_tiny_seq2seq(
    folder: str | Path,
    kind: str = "t5",
    *,
    texts: Sequence[str] = SAMPLE,
    vocab_size: int = 600,
    hidden_size: int = 32,
    num_layers: int = 2,
    max_length: int = 512,
    dropout: float = 0.0,
    seed: int = 0,
) -> Path:
    """Write a tiny model.

    Args:
        folder: where to.
        kind: `t5` (relative positions, answers end) or `bart` (learned ones, answers begin with a
            token of their own and end).
        texts: shape the tokenizer.
        vocab_size: tokens, at most.
        hidden_size: H.
        num_layers: layers of encoder and decoder, each.
        max_length: positions of BART.
        dropout: everywhere that the model has it.
        seed: of the weights.
    """
    folder = Path(folder)
    tokenizer = _tokenizer(kind, texts, vocab_size, max_length)
    config = _config(kind, tokenizer, hidden_size, num_layers, max_length, dropout)
    with torch.random.fork_rng(devices=[]), quiet():
        torch.random.default_generator.manual_seed(seed)
        model = AutoModelForSeq2SeqLM.from_config(config)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(
    kind: str, texts: Sequence[str], vocab_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(texts, vocab_size=vocab_size, max_length=max_length)
    tokenizer.chat_template = None
    ends = {token: tokenizer.convert_tokens_to_ids(token) for token in (_START, _END)}
    form = f"{_START} $A {_END}" if kind == "bart" else f"$A {_END}"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=form, special_tokens=list(ends.items())
    )
    return tokenizer


def _config(
    kind: str,
    tokenizer: PreTrainedTokenizerFast,
    hidden_size: int,
    num_layers: int,
    max_length: int,
    dropout: float,
) -> PreTrainedConfig:
    pad, end = tokenizer.pad_token_id, tokenizer.convert_tokens_to_ids(_END)
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer), "d_model": hidden_size, "pad_token_id": pad,
        "eos_token_id": end,
    }  # fmt: skip
    if kind == "t5":
        common["decoder_start_token_id"] = pad
        return T5Config(
            **common, d_kv=8, d_ff=2 * hidden_size, num_layers=num_layers, num_heads=4,
            relative_attention_num_buckets=8, dropout_rate=dropout,
            initializer_factor=1.0, feed_forward_proj="gated-gelu",
        )  # fmt: skip
    common |= {
        "decoder_start_token_id": end,
        "bos_token_id": tokenizer.convert_tokens_to_ids(_START),
    }
    return BartConfig(
        **common, encoder_layers=num_layers, decoder_layers=num_layers, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=2 * hidden_size, decoder_ffn_dim=2 * hidden_size,
        max_position_embeddings=max_length, dropout=dropout, attention_dropout=dropout,
        init_std=_WEIGHT_SCALE, forced_eos_token_id=None,
    )  # fmt: skip
