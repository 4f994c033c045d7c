"""Tokenizer, image bounds, instructions, lengths and pooling of a model.

Each comes from the first that has something to say: the configuration, the `pixelrag.json` of an
exported folder, the model's own files, the default of its kind.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pixelrag.config.parts import ModelConfig
from pixelrag.errors import ModelError
from pixelrag.models.pooling import PoolingMode
from pixelrag.models.preprocess import Preprocessor
from pixelrag.models.source import (
    ModelSource,
    as_model_error,
    declared_pooling,
    declared_prompts,
    saved_settings,
)
from pixelrag.models.template import DOCUMENT_INSTRUCTION, QUERY_INSTRUCTION, ended

# Where a tokenizer says nothing, transformers writes a length of 1e30.
_NO_LIMIT = 10**9
# What servers want of an exported Qwen3-VL besides what transformers' classes write.
_EXTRA_FILES = ("video_preprocessor_config.json", "chat_template.json", "generation_config.json")


def load_preprocessor(
    model_cfg: ModelConfig, source: ModelSource, base: ModelSource, model: PreTrainedModel
) -> tuple[Preprocessor, PoolingMode]:
    """The preprocessor, and the pooling mode, that fit `model`.

    Args:
        model_cfg: the configuration's `model` section.
        source: the folder or name that it gives.
        base: the same, or the model below it where `source` is a LoRA adapter.
        model: the loaded model, without adapters.

    Raises:
        ModelError: the tokenizer or image processor is missing or does not fit.
    """
    saved = saved_settings(source)
    # An adapter's folder may leave the tokenizer to the base model.
    home = source if source.file("tokenizer_config.json") else base
    with as_model_error(home):
        tokenizer = AutoTokenizer.from_pretrained(
            home.location, trust_remote_code=model_cfg.trust_remote_code
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ModelError(f"{home.name}: its tokenizer has neither a padding nor an end token")
        # Padding is masked out everywhere, so any token will do.
        tokenizer.pad_token = tokenizer.eos_token
    if is_vision(model):
        images = load_image_processor(home, model.config, model_cfg.max_visual_tokens)
        defaults = {"query": QUERY_INSTRUCTION, "document": DOCUMENT_INSTRUCTION}
    else:
        images, defaults = None, declared_prompts(base)
    limit = _length_limit(model, tokenizer)
    preprocessor = Preprocessor(
        tokenizer,
        images,
        query_instruction=_instruction("query", model_cfg, saved, defaults, images is not None),
        document_instruction=_instruction(
            "document", model_cfg, saved, defaults, images is not None
        ),
        query_max_length=min(model_cfg.query_max_length, limit),
        document_max_length=min(model_cfg.document_max_length, limit),
        extra_files=_extra_files(home) if images is not None else None,
    )
    return preprocessor, _pooling(model_cfg, saved, base, model)


def _extra_files(home: ModelSource) -> dict[str, bytes]:
    found = {name: home.file(name) for name in _EXTRA_FILES}
    return {name: path.read_bytes() for name, path in found.items() if path is not None}


def is_vision(model: PreTrainedModel) -> bool:
    """Whether the model reads images (Qwen3-VL)."""
    return model.config.model_type == "qwen3_vl"


def _instruction(
    role: str,
    model_cfg: ModelConfig,
    saved: dict[str, Any],
    defaults: dict[str, str],
    in_chat: bool,
) -> str:
    text = getattr(model_cfg, f"{role}_instruction")
    if text is None:
        text = saved.get(f"{role}_instruction", defaults.get(role, ""))
    return ended(text) if in_chat else text


def _pooling(
    model_cfg: ModelConfig, saved: dict[str, Any], base: ModelSource, model: PreTrainedModel
) -> PoolingMode:
    if model_cfg.pooling != "auto":
        return model_cfg.pooling
    if "pooling" in saved:
        return saved["pooling"]
    if is_vision(model):
        return "last"
    declared = declared_pooling(base)
    return declared or ("last" if _is_causal(model) else "mean")


def _is_causal(model: PreTrainedModel) -> bool:
    """Whether tokens see only what is before them, so that only the last has read everything."""
    config = model.config
    if getattr(config, "use_bidirectional_attention", False):
        return False
    kind = type(config)
    # Most encoders can also be had as decoders; the kinds that are nothing else are causal.
    decoder_only = kind in MODEL_FOR_CAUSAL_LM_MAPPING and kind not in MODEL_FOR_MASKED_LM_MAPPING
    return decoder_only or getattr(config, "is_decoder", False)


def load_image_processor(
    home: ModelSource, config: PreTrainedConfig, max_tokens: int
) -> Qwen2VLImageProcessorPil:
    """The processor whose patches are the model's, with its pixel bounds set."""
    with as_model_error(home):
        images = Qwen2VLImageProcessorPil.from_pretrained(home.location)
    vision = config.vision_config
    sizes = (images.patch_size, images.merge_size, images.temporal_patch_size)
    expected = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
    if sizes != expected:
        raise ModelError(
            f"{home.name}: preprocessor_config.json has patch, merge and temporal sizes {sizes}, "
            f"the model expects {expected}"
        )
    largest = max_tokens * (images.patch_size * images.merge_size) ** 2
    smallest = min(images.size["shortest_edge"], largest)
    images.size = {"shortest_edge": smallest, "longest_edge": largest}
    return images


def _length_limit(model: PreTrainedModel, tokenizer: Any) -> int:
    limits = [position_limit(model)]
    if tokenizer.model_max_length and tokenizer.model_max_length < _NO_LIMIT:
        limits.append(tokenizer.model_max_length)
    return min(limits)


def position_limit(model: PreTrainedModel) -> int:
    """Tokens the model can tell apart by position, special tokens included."""
    limits = [_NO_LIMIT]
    if (length := getattr(model.config.get_text_config(), "max_position_embeddings", None)) and (
        length > 0
    ):
        limits.append(length)
    for name, module in model.named_modules():
        # RoBERTa and MPNet start counting behind the padding index.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            start = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - start)
    return min(limits)
