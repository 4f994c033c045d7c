"""Loads a model and its tokenizer from a folder, an installed package or Hugging Face."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import logging as transformers_logging

from pixelrag.config.parts import LoraConfig, ModelConfig
from pixelrag.errors import ModelError
from pixelrag.models.embedder import Embedder
from pixelrag.models.kernels import choose_attention
from pixelrag.models.lora import (
    adapters_to_fp32,
    apply_lora,
    check_same_lora,
    load_adapter,
    set_lora_dropout,
)
from pixelrag.models.pooling import PoolingMode
from pixelrag.models.preprocess import Preprocessor
from pixelrag.models.source import (
    ADAPTER_FILE,
    ModelSource,
    declared_pooling,
    declared_prompts,
    not_found,
    resolve_source,
    saved_settings,
)
from pixelrag.models.template import DOCUMENT_INSTRUCTION, QUERY_INSTRUCTION, ended

logger = logging.getLogger("pixelrag")

# Where a tokenizer says nothing, transformers writes a length of 1e30.
_NO_LIMIT = 10**9


def load_embedder(
    model_cfg: ModelConfig,
    lora_cfg: LoraConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    half_precision: bool = False,
    seed: int = 0,
) -> tuple[Embedder, Preprocessor]:
    """Load what `model` and `lora` of a configuration describe, on the CPU, in training mode.

    A folder that `pixelrag.export` wrote brings its own pooling and instructions, which hold
    wherever the configuration leaves them open. A LoRA folder is put onto its base model: with
    `lora.enabled` the adapter is trained further, without it is merged.

    Args:
        model_cfg: the configuration's `model` section.
        lora_cfg: its `lora` section; None = no adapters.
        dtype: of the weights. float64 holds the very same numbers as float32, so it can serve as
            its reference.
        half_precision: the engine will compute in bf16; lets flash_attention_2 be chosen.
        seed: for fresh weights (`random_init`, adapters); the global generators are left alone.

    Raises:
        ModelError: the model is not there, lacks weights, or does not fit what is asked of it.
    """
    lora_cfg = lora_cfg or LoraConfig()
    source = resolve_source(model_cfg.name_or_path)
    adapter = source.json(ADAPTER_FILE)
    base = resolve_source(_base_name(source, adapter)) if adapter else source
    if model_cfg.random_init and (adapter or lora_cfg.enabled):
        raise ModelError(
            "model.random_init with LoRA: an adapter for random weights is of no use without "
            "them. Set model.random_init false, or lora.enabled false"
        )
    with _quiet(), torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        backbone = _load_backbone(model_cfg, base, dtype, half_precision)
        has_vision = backbone.config.model_type == "qwen3_vl"
        if adapter:
            loaded = load_adapter(backbone, Path(source.location), source.name, base.name)
            if lora_cfg.enabled:
                check_same_lora(loaded, lora_cfg, source.name)
                set_lora_dropout(loaded, lora_cfg.dropout)
            backbone = loaded if lora_cfg.enabled else loaded.merge_and_unload()
        elif lora_cfg.enabled:
            backbone = apply_lora(backbone, lora_cfg, has_vision=has_vision, base_name=base.name)
        preprocessor, pooling = _load_preprocessor(model_cfg, source, base, backbone, has_vision)
    if adapter and not lora_cfg.enabled:
        backbone.requires_grad_(True)
        logger.info("merged the adapter %s into %s", source.name, base.name)

    if dtype == torch.float64:
        # Buffers stay: rotary tables shall be the numbers that the float32 model uses.
        for parameter in backbone.parameters():
            parameter.data = parameter.data.double()
    else:
        adapters_to_fp32(backbone)
    embedder = Embedder(backbone, pooling)
    if model_cfg.gradient_checkpointing:
        embedder.enable_gradient_checkpointing()
    _report(embedder, preprocessor, source)
    return embedder.train(), preprocessor


def _load_backbone(
    model_cfg: ModelConfig, base: ModelSource, dtype: torch.dtype, half_precision: bool
) -> nn.Module:
    trust: dict[str, Any] = {"trust_remote_code": model_cfg.trust_remote_code}
    with _as_model_error(base):
        config = AutoConfig.from_pretrained(base.location, **trust)
    _check_kind(config, base)
    model_class = MODEL_MAPPING.get(type(config), None)
    model_class = model_class if isinstance(model_class, type) else None
    options: dict[str, Any] = trust | {
        "dtype": torch.float32 if dtype == torch.float64 else dtype,
        "attn_implementation": choose_attention(
            model_cfg.attention, model_class, half_precision=half_precision
        ),
    }
    if takes_pooling_layer(model_class):
        # BERT's pooler stands behind the states that we pool: it would never get a gradient.
        options["add_pooling_layer"] = False
    if model_cfg.random_init:
        backbone = AutoModel.from_config(config, **options)
    else:
        with _as_model_error(base):
            # Safetensors only: the older format is a pickle, which may run code when read.
            backbone, info = AutoModel.from_pretrained(
                base.location,
                config=config,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
        _check_weights(info, base)
    for section in (backbone.config, backbone.config.get_text_config()):
        section.use_cache = False
    return backbone


def takes_pooling_layer(model_class: type | None) -> bool:
    """Whether the class can be built without BERT's pooler."""
    if model_class is None:
        return False
    return "add_pooling_layer" in inspect.signature(model_class.__init__).parameters


def _check_kind(config: Any, base: ModelSource) -> None:
    kind = config.model_type
    if kind == "qwen3_vl":
        return
    if getattr(config, "vision_config", None) is not None:
        raise ModelError(
            f"{base.name} is of the kind {kind}; the vision models pixelrag trains are of the "
            "kind qwen3_vl, such as Qwen/Qwen3-VL-Embedding-2B"
        )
    if config.is_encoder_decoder:
        raise ModelError(
            f"{base.name} is an encoder-decoder ({kind}); pixelrag trains encoders (BERT and its "
            "like) and decoders (Qwen3 and its like)"
        )


def _check_weights(info: dict[str, Any], base: ModelSource) -> None:
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{base.name}: {len(missing)} weights that the architecture needs are not in the "
            f"checkpoint and would start at random, first {', '.join(missing[:3])}. Keys it has "
            f"instead: {', '.join(sorted(info['unexpected_keys'])[:3]) or 'none'}. Give the "
            "complete checkpoint, or set model.random_init true to train from scratch"
        )


def _load_preprocessor(
    model_cfg: ModelConfig,
    source: ModelSource,
    base: ModelSource,
    backbone: nn.Module,
    has_vision: bool,
) -> tuple[Preprocessor, PoolingMode]:
    """The preprocessor and the pooling that hold once files and configuration are weighed."""
    model = backbone.get_base_model() if isinstance(backbone, PeftModel) else backbone
    saved = saved_settings(source)
    # A LoRA folder carries the tokenizer; older ones may leave it to the base model.
    home = source if source.file("tokenizer_config.json") else base
    with _as_model_error(home):
        tokenizer = AutoTokenizer.from_pretrained(
            home.location, trust_remote_code=model_cfg.trust_remote_code
        )
        images = None
        if has_vision:
            images = Qwen2VLImageProcessorPil.from_pretrained(home.location)
    if images is not None:
        _bound_images(images, model_cfg.max_visual_tokens, model.config.vision_config, home)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ModelError(f"{home.name}: its tokenizer has neither a padding nor an end token")
        # Padding is masked out everywhere, so any token will do.
        tokenizer.pad_token = tokenizer.eos_token
    limit = _length_limit(model, tokenizer)
    prompts = {} if has_vision else declared_prompts(base)
    instructions = {}
    for role, default in (("query", QUERY_INSTRUCTION), ("document", DOCUMENT_INSTRUCTION)):
        kind_default = default if has_vision else prompts.get(role, "")
        given = getattr(model_cfg, f"{role}_instruction")
        if given is None:
            given = saved.get(f"{role}_instruction", kind_default)
        instructions[f"{role}_instruction"] = ended(given) if has_vision else given
    preprocessor = Preprocessor(
        tokenizer,
        images,
        query_max_length=min(model_cfg.query_max_length, limit),
        document_max_length=min(model_cfg.document_max_length, limit),
        **instructions,
    )
    return preprocessor, _pooling(model_cfg, saved, base, model, has_vision)


def _pooling(
    model_cfg: ModelConfig,
    saved: dict[str, Any],
    base: ModelSource,
    model: nn.Module,
    has_vision: bool,
) -> PoolingMode:
    if model_cfg.pooling != "auto":
        return model_cfg.pooling
    if "pooling" in saved:
        return saved["pooling"]
    declared = None if has_vision else declared_pooling(base)
    if declared is not None:
        return declared
    return "last" if has_vision or _is_causal(model) else "mean"


def _is_causal(model: nn.Module) -> bool:
    """Whether tokens see only what is before them, so that only the last has read everything."""
    flags = {bool(m.is_causal) for m in model.modules() if hasattr(m, "is_causal")}
    return flags == {True} or getattr(model.config, "is_decoder", False)


def _bound_images(
    images: Qwen2VLImageProcessorPil, max_tokens: int, vision: Any, home: ModelSource
) -> None:
    """Set the processor's pixel bounds, after checking that its patches are the model's."""
    ours = (images.patch_size, images.merge_size, images.temporal_patch_size)
    models = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
    if ours != models:
        raise ModelError(
            f"{home.name}: preprocessor_config.json has patch, merge and temporal sizes {ours}, "
            f"the model expects {models}"
        )
    largest = max_tokens * (images.patch_size * images.merge_size) ** 2
    smallest = min(images.size["shortest_edge"], largest)
    images.size = {"shortest_edge": smallest, "longest_edge": largest}


def _length_limit(model: nn.Module, tokenizer: Any) -> int:
    """Tokens the model can tell apart by position, special tokens included."""
    limits = [_NO_LIMIT]
    if (length := getattr(model.config.get_text_config(), "max_position_embeddings", None)) and (
        length > 0
    ):
        limits.append(length)
    if tokenizer.model_max_length and tokenizer.model_max_length < _NO_LIMIT:
        limits.append(tokenizer.model_max_length)
    for name, module in model.named_modules():
        # RoBERTa and MPNet start counting behind the padding index.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            start = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - start)
    return min(limits)


def _base_name(source: ModelSource, adapter: dict[str, Any]) -> str:
    name = adapter.get("base_model_name_or_path")
    if not name:
        raise ModelError(f"{source.name}: adapter_config.json names no base_model_name_or_path")
    return name


def _report(embedder: Embedder, preprocessor: Preprocessor, source: ModelSource) -> None:
    total = sum(p.numel() for p in embedder.parameters())
    trained = sum(p.numel() for p in embedder.parameters() if p.requires_grad)
    logger.info(
        "model %s: %s of %s parameters train (%.2f %%), pooling %s, queries up to %d and "
        "documents up to %d tokens",
        source.name,
        f"{trained:,}",
        f"{total:,}",
        100 * trained / total,
        embedder.pooling,
        preprocessor.query_max_length,
        preprocessor.document_max_length,
    )


@contextlib.contextmanager
def _as_model_error(source: ModelSource) -> Iterator[None]:
    """Turn whatever transformers and safetensors raise while reading a model into one error."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if not Path(source.location).is_dir() and isinstance(error, OSError):
            raise not_found(source.name, error) from error
        reason = (str(error).strip().splitlines() or [""])[0] or type(error).__name__
        raise ModelError(f"{source.name} ({source.location}) does not load: {reason}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' loading report and bar: what matters in them is checked here."""
    level = transformers_logging.get_verbosity()
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()
