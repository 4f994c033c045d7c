"""Models of given sizes with weights drawn from their configuration classes; nothing is loaded."""

from __future__ import annotations

from typing import TypedDict, cast

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3VLConfig,
)

from pixelrag.config.bench import TextModel, VisionModel
from pixelrag.models import Embedder
from pixelrag.models.attention import choose_causal_attention
from pixelrag.models.biencoder import BiEncoder
from pixelrag.models.causal import CausalLM
from pixelrag.models.load import quiet
from pixelrag.models.pooling import PoolingMode

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEARNING_RATE = 2e-5
MAX_NORM = 1.0
# Tokens with a meaning to Qwen3-VL; all others are words.
IMAGE, VIDEO, VISION_START = 1, 2, 3
FIRST_WORD = 4
_MAX_LENGTH = 32_768


class _Sizes(TypedDict):
    """What both architectures' configurations take by the same names."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    use_cache: bool


def text_config(sizes: TextModel) -> PretrainedConfig:
    """The architecture's configuration; no dropout."""
    common: _Sizes = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "intermediate_size": sizes.intermediate_size,
        "max_position_embeddings": _MAX_LENGTH if sizes.kind == "qwen3" else 512,
        "tie_word_embeddings": sizes.tied,
        "use_cache": False,
    }
    if sizes.kind == "bert":
        return BertConfig(**common, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return Qwen3Config(
        **common, num_key_value_heads=sizes.num_kv_heads, head_dim=sizes.head_dim, pad_token_id=0
    )


def vision_config(text: TextModel, vision: VisionModel) -> Qwen3VLConfig:
    """Qwen3-VL: a decoder of the text's sizes behind a vision tower."""
    part = 5 * text.head_dim // 32  # 24, 20 and 20 of 64 frequencies in the published models
    inner = text_config(text.model_copy(update={"kind": "qwen3"})).to_dict()
    rope = {
        "rope_type": "default",
        "rope_theta": 5_000_000.0,
        "mrope_section": [text.head_dim // 2 - 2 * part, part, part],
        "mrope_interleaved": True,
    }
    names = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings",
    )  # fmt: skip
    return Qwen3VLConfig(
        text_config={name: inner[name] for name in names} | {"rope_parameters": rope},
        vision_config={
            "depth": vision.depth,
            "hidden_size": vision.hidden_size,
            "num_heads": vision.num_heads,
            "intermediate_size": vision.intermediate_size,
            "out_hidden_size": text.hidden_size,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": list(range(min(3, vision.depth - 1))),
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        tie_word_embeddings=text.tied,
    )


def biencoder(config: PretrainedConfig, device: torch.device) -> BiEncoder:
    """An encoder as the contrastive job holds it; fp32 masters."""
    options = {"add_pooling_layer": False} if config.model_type == "bert" else {}
    with torch.device(device), quiet():
        torch.manual_seed(0)
        model = AutoModel.from_config(config, attn_implementation="sdpa", **options)
        pooling: PoolingMode = "mean" if config.model_type == "bert" else "last"
        return BiEncoder(Embedder(model, pooling)).train()


def causal(
    sizes: TextModel,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "auto",
    half_precision: bool = False,
    setting: str = "student",
) -> CausalLM:
    """A causal language model as the distillation job holds it.

    Args:
        sizes: of a decoder.
        device: where its weights are made; `meta` allocates none.
        dtype: of the weights.
        attention: as of `student.attention`.
        half_precision: it computes in bf16.
        setting: configuration section, for messages.

    Raises:
        ModelError: the attention cannot run here.
    """
    config = text_config(sizes)
    # transformers says a tuple, which a tokenizer's entry is; a model's is its class.
    model_class = cast(type, AutoModelForCausalLM._model_mapping[type(config)])
    chosen = choose_causal_attention(
        attention, model_class, config,
        half_precision=half_precision, cuda=device.type == "cuda", setting=setting,
    )  # fmt: skip
    with torch.device(device), quiet():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=chosen)
        return CausalLM(model, setting)


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The optimizer that every case steps with."""
    return torch.optim.AdamW([p for _, p in named], lr=LEARNING_RATE, weight_decay=0.01)
