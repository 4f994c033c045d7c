"""Tiny random models of the supported kinds, complete with tokenizer, written to a folder.

For tests, `pixelrag verify` and the demo: they run the real architectures' code on a CPU in
milliseconds, and load through the same door as any other model. The numbers of two folders
written with the same arguments are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pixelrag.models.load import quiet
from pixelrag.models.tiny_tokenizer import SAMPLE, byte_tokenizer, wordpiece_tokenizer

# At transformers' 0.02 a narrow model maps all texts to nearly the same vector.
_WEIGHT_SCALE = 0.2


def tiny_bert_config(
    *,
    vocab_size: int,
    hidden_size: int = 32,
    num_layers: int = 2,
    max_length: int = 128,
    dropout: float = 0.0,
) -> BertConfig:
    """A BERT encoder; `dropout` acts on hidden states and attention weights."""
    return BertConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        intermediate_size=2 * hidden_size,
        max_position_embeddings=max_length,
        type_vocab_size=1,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=_WEIGHT_SCALE,
    )


def tiny_qwen3_config(
    *,
    vocab_size: int,
    hidden_size: int = 32,
    num_layers: int = 2,
    max_length: int = 2048,
    dropout: float = 0.0,
    pad_token_id: int = 0,
) -> Qwen3Config:
    """A Qwen3 decoder with grouped-query attention; `dropout` acts on attention weights."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=2 * hidden_size,
        max_position_embeddings=max_length,
        attention_dropout=dropout,
        initializer_range=_WEIGHT_SCALE,
        tie_word_embeddings=True,
        pad_token_id=pad_token_id,
    )


def tiny_qwen3_vl_config(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden_size: int = 32,
    num_layers: int = 3,
    vision_size: int = 32,
    vision_depth: int = 2,
    max_length: int = 2048,
    dropout: float = 0.0,
) -> Qwen3VLConfig:
    """Qwen3-VL with a deepstack output of every vision block but the last.

    Patches of 16 pixels, 2 x 2 of them a token, as in the published models. `dropout` acts on the
    language model's attention weights; the architecture has none in the vision tower.
    """
    token_ids = tokenizer.get_vocab()
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 2 * hidden_size,
            "max_position_embeddings": max_length,
            "attention_dropout": dropout,
            "initializer_range": _WEIGHT_SCALE,
            # Frequencies for time, row and column: half of head_dim together.
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": vision_depth,
            "hidden_size": vision_size,
            "num_heads": 2,
            "intermediate_size": 2 * vision_size,
            "out_hidden_size": hidden_size,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": list(range(vision_depth - 1)),
            "initializer_range": _WEIGHT_SCALE,
        },
        image_token_id=token_ids["<|image_pad|>"],
        video_token_id=token_ids["<|video_pad|>"],
        vision_start_token_id=token_ids["<|vision_start|>"],
        vision_end_token_id=token_ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def save_tiny_bert(
    folder: str | Path,
    *,
    texts: Sequence[str] = SAMPLE,
    vocab_size: int = 600,
    hidden_size: int = 32,
    num_layers: int = 2,
    max_length: int = 128,
    dropout: float = 0.0,
    seed: int = 0,
) -> Path:
    """Write a tiny BERT encoder (loaded with mean pooling); `texts` shape its vocabulary."""
    tokenizer = wordpiece_tokenizer(texts, vocab_size=vocab_size, max_length=max_length)
    config = tiny_bert_config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_layers=num_layers,
        max_length=max_length,
        dropout=dropout,
    )
    return _save(folder, tokenizer, BertModel, config, seed, add_pooling_layer=False)


def save_tiny_qwen3(
    folder: str | Path,
    *,
    texts: Sequence[str] = SAMPLE,
    vocab_size: int = 600,
    hidden_size: int = 32,
    num_layers: int = 2,
    max_length: int = 2048,
    dropout: float = 0.0,
    seed: int = 0,
) -> Path:
    """Write a tiny Qwen3 decoder (loaded with last-token pooling), <|endoftext|> appended."""
    tokenizer = byte_tokenizer(texts, vocab_size=vocab_size, max_length=max_length, append_end=True)
    config = tiny_qwen3_config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_layers=num_layers,
        max_length=max_length,
        dropout=dropout,
        pad_token_id=tokenizer.pad_token_id,
    )
    return _save(folder, tokenizer, Qwen3Model, config, seed)


def save_tiny_qwen3_vl(
    folder: str | Path,
    *,
    texts: Sequence[str] = SAMPLE,
    vocab_size: int = 600,
    hidden_size: int = 32,
    num_layers: int = 3,
    vision_size: int = 32,
    vision_depth: int = 2,
    max_length: int = 2048,
    dropout: float = 0.0,
    seed: int = 0,
) -> Path:
    """Write a tiny Qwen3-VL in the form of the published checkpoints: saved with its (tied)
    language-model head, keys `model.visual.*` and `model.language_model.*`."""
    tokenizer = byte_tokenizer(texts, vocab_size=vocab_size, max_length=max_length)
    config = tiny_qwen3_vl_config(
        tokenizer,
        hidden_size=hidden_size,
        num_layers=num_layers,
        vision_size=vision_size,
        vision_depth=vision_depth,
        max_length=max_length,
        dropout=dropout,
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        # From one token up; the upper bound is set on loading, by model.max_visual_tokens.
        size={"shortest_edge": 32 * 32, "longest_edge": 1280 * 32 * 32},
    )
    path = _save(folder, tokenizer, Qwen3VLForConditionalGeneration, config, seed)
    images.save_pretrained(path)
    return path


def _save(
    folder: str | Path,
    tokenizer: PreTrainedTokenizerFast,
    model_class: type[PreTrainedModel],
    config: BertConfig | Qwen3Config | Qwen3VLConfig,
    seed: int,
    **options: bool,
) -> Path:
    folder = Path(folder)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        model = model_class(config, **options)
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder
