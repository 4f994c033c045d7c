"""Loads a model and its tokenizer from a folder, an installed package or Hugging Face."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    PreTrainedModel,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging as transformers_logging

from pixelrag.config.parts import LoraConfig, ModelConfig
from pixelrag.errors import ModelError
from pixelrag.models.dpr import dpr_class, inner_bert
from pixelrag.models.embedder import Embedder
from pixelrag.models.kernels import choose_attention
from pixelrag.models.lora import adapters_to_fp32, with_adapters
from pixelrag.models.pooling import PoolingMode
from pixelrag.models.preprocess import Preprocessor
from pixelrag.models.settings import is_vision, load_preprocessor
from pixelrag.models.source import (
    ADAPTER_FILE,
    ModelSource,
    as_model_error,
    resolve_source,
    saved_settings,
)
from pixelrag.models.tower_parts import unfreeze

logger = logging.getLogger("pixelrag")


def load_embedder(
    model_cfg: ModelConfig,
    lora_cfg: LoraConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    half_precision: bool = False,
    seed: int = 0,
    as_saved: bool = False,
    frozen: bool = False,
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
        as_saved: keep the adapter of a LoRA folder as it is, whatever ``lora_cfg`` says.
        frozen: no parameter of it trains.

    Raises:
        ModelError: the model is not there, lacks weights, or does not fit what is asked of it.
    """
    lora_cfg = lora_cfg or LoraConfig()
    source, base = _sources(model_cfg)
    adapter = source.json(ADAPTER_FILE)
    if model_cfg.random_init and (adapter or lora_cfg.enabled):
        raise ModelError(
            "model.random_init with LoRA: an adapter for random weights is of no use without "
            "them. Set model.random_init false, or lora.enabled false"
        )
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        model, is_dpr = _load_model(model_cfg, base, dtype, half_precision)
        preprocessor, pooling = load_preprocessor(model_cfg, source, base, model)
        backbone = with_adapters(
            model,
            lora_cfg,
            source if adapter else None,
            base,
            has_vision=is_vision(model),
            probe=preprocessor.queries(["What does the adapter change?"])["input_ids"],
            as_saved=as_saved,
        )

    if dtype == torch.float64:
        # Buffers stay: rotary tables shall be the numbers that the float32 model uses.
        for parameter in backbone.parameters():
            parameter.data = parameter.data.double()
    else:
        adapters_to_fp32(backbone)
    # Only the contrastive job trains parts of a tower.
    if unfrozen := getattr(model_cfg, "unfrozen", None):
        unfreeze(backbone, unfrozen)
    if is_dpr and model_cfg.pooling == "auto":
        pooling = "cls"
    # Only jobs that can do with raw vectors have the option.
    normalize = getattr(model_cfg, "normalize", True)
    if normalize is None:
        normalize = saved_settings(source).get("normalize", not is_dpr)
    embedder = Embedder(backbone, pooling, normalize=normalize)
    if model_cfg.unpadded is not False:
        embedder.leave_padding_out(required=model_cfg.unpadded is True)
    if model_cfg.gradient_checkpointing:
        embedder.enable_gradient_checkpointing()
    if frozen:
        embedder.requires_grad_(False)
    _report(embedder, preprocessor, source)
    return embedder.train(), preprocessor


def outline_embedder(model_cfg: ModelConfig, lora_cfg: LoraConfig | None = None) -> Embedder:
    """The modules and shapes of `load_embedder` without weights: nothing is allocated.

    Raises:
        ModelError: its configuration is not there or not one of an encoder.
    """
    _, base = _sources(model_cfg)
    # What runs on other hardware need not run here.
    attention = "eager" if model_cfg.attention == "eager" else "sdpa"
    plain = model_cfg.model_copy(update={"attention": attention, "random_init": True})
    with quiet(), torch.device("meta"):
        model, is_dpr = _load_model(plain, base, torch.float32, False)
        backbone = with_adapters(
            model, lora_cfg or LoraConfig(), None, base, has_vision=is_vision(model), probe=None
        )
    pooling: PoolingMode = "cls" if is_dpr else "last" if is_vision(model) else "mean"
    if model_cfg.pooling != "auto":
        pooling = model_cfg.pooling
    if unfrozen := getattr(model_cfg, "unfrozen", None):
        unfreeze(backbone, unfrozen)
    normalize = getattr(model_cfg, "normalize", True)
    embedder = Embedder(backbone, pooling, normalize=not is_dpr if normalize is None else normalize)
    if model_cfg.unpadded is not False:
        embedder.leave_padding_out(required=model_cfg.unpadded is True)
        # The self-test needs numbers; it is taken to succeed.
        embedder.unpadded = embedder.unpadded is None
    if model_cfg.gradient_checkpointing:
        embedder.enable_gradient_checkpointing()
    return embedder


def read_preprocessor(model_cfg: ModelConfig, outline: Embedder) -> Preprocessor:
    """What makes inputs for `outline_embedder`'s model, from its small files.

    Raises:
        ModelError: the tokenizer or image processor is missing or does not fit.
    """
    with quiet():
        return load_preprocessor(model_cfg, *_sources(model_cfg), outline.base_model)[0]


def _sources(model_cfg: ModelConfig) -> tuple[ModelSource, ModelSource]:
    """The folder that has the last word, an adapter's if there is one, and the model below it."""
    source = resolve_source(model_cfg.name_or_path)
    below = source.json(ADAPTER_FILE)
    if model_cfg.adapter is None:
        return source, resolve_source(_base_name(source, below)) if below else source
    adapter = resolve_source(model_cfg.adapter, setting="model.adapter")
    if below or adapter.json(ADAPTER_FILE) is None:
        what = "is put onto another adapter, model.name_or_path" if below else "is no adapter"
        raise ModelError(
            f"model.adapter {adapter.name} {what}; expected a folder with {ADAPTER_FILE}, and in "
            "model.name_or_path the model that it belongs to"
        )
    return adapter, source


def _load_model(
    model_cfg: ModelConfig, base: ModelSource, dtype: torch.dtype, half_precision: bool
) -> tuple[PreTrainedModel, bool]:
    """The model without a head, and whether it comes from DPR."""
    trust: dict[str, Any] = {"trust_remote_code": model_cfg.trust_remote_code}
    with as_model_error(base):
        config = AutoConfig.from_pretrained(base.location, **trust)
    _check_kind(config, base)
    is_dpr = config.model_type == "dpr"
    loader: Any = dpr_class(config, base) if is_dpr else AutoModel
    model_class = loader if is_dpr else MODEL_MAPPING.get(type(config), None)
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
        model = (loader._from_config if is_dpr else loader.from_config)(config, **options)
    else:
        with as_model_error(base):
            # Safetensors only: the older format is a pickle, which may run code when read.
            model, info = loader.from_pretrained(
                base.location,
                config=config,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
        check_weights(info, base, "model.random_init")
    model = inner_bert(model) if is_dpr else model
    for section in (model.config, model.config.get_text_config()):
        section.use_cache = False
    return model, is_dpr


def takes_pooling_layer(model_class: type | None) -> bool:
    """Whether the class can be built without BERT's pooler."""
    if model_class is None:
        return False
    return "add_pooling_layer" in inspect.signature(model_class).parameters


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


def check_weights(info: dict[str, Any], base: ModelSource, setting: str) -> None:
    """Refuse a checkpoint that leaves weights at random.

    Args:
        info: what `from_pretrained(output_loading_info=True)` returned.
        base: the checkpoint.
        setting: the option that would ask for random weights.

    Raises:
        ModelError: weights are missing.
    """
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{base.name}: {len(missing)} weights that the architecture needs are not in the "
            f"checkpoint and would start at random, first {', '.join(missing[:3])}. Keys it has "
            f"instead: {', '.join(sorted(info['unexpected_keys'])[:3]) or 'none'}. Give the "
            f"complete checkpoint, or set {setting} true to train from scratch"
        )


def _base_name(source: ModelSource, adapter: dict[str, Any]) -> str:
    name = adapter.get("base_model_name_or_path")
    if not name:
        raise ModelError(f"{source.name}: adapter_config.json names no base_model_name_or_path")
    return name


def _report(embedder: Embedder, preprocessor: Preprocessor, source: ModelSource) -> None:
    total = sum(p.numel() for p in embedder.parameters())
    trained = sum(p.numel() for p in embedder.parameters() if p.requires_grad)
    share = f"{trained:,} of {total:,} parameters train ({trained / total:.2%})"
    logger.info(
        "model %s: %s, pooling %s, queries up to %d and documents up to %d tokens",
        source.name,
        share if trained else f"{total:,} parameters, frozen",
        embedder.pooling,
        preprocessor.query_max_length,
        preprocessor.document_max_length,
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' loading report and bars: what matters in them is checked here."""
    level = transformers_logging.get_verbosity()
    bar = transformers_logging.is_progress_bar_enabled()
    gguf_bar = modeling_gguf_pytorch_utils.tqdm
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # That of GGUF files is a bar of its own, which obeys nobody.
    modeling_gguf_pytorch_utils.tqdm = transformers_logging.tqdm
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = gguf_bar
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()
