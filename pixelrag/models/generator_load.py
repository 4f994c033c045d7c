"""Loads a generator and what builds its prompts: encoder-decoders, decoders, Qwen3-VL, GGUF."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import torch
from peft import TaskType
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    Qwen3VLForConditionalGeneration,
)

from pixelrag.config.parts import LoraConfig
from pixelrag.config.rag_models import GeneratorConfig
from pixelrag.errors import ModelError
from pixelrag.models.causal_load import load_tokenizer, pretrained, widened
from pixelrag.models.generator import Generator
from pixelrag.models.generator_prompt import GeneratorPreprocessor
from pixelrag.models.kernels import choose_attention
from pixelrag.models.load import quiet
from pixelrag.models.lora import with_adapters
from pixelrag.models.passage_attention import require_observable
from pixelrag.models.prompt_text import PromptText
from pixelrag.models.settings import load_image_processor
from pixelrag.models.source import ModelSource, as_model_error, base_of, resolve_source

logger = logging.getLogger("pixelrag")

_SETTING = "generator.name_or_path"


def load_generator(
    config: GeneratorConfig,
    lora: LoraConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    half_precision: bool = False,
    seed: int = 0,
    observed: bool = False,
) -> tuple[Generator, GeneratorPreprocessor]:
    """Load what `generator` and `generator_lora` describe, on the CPU, in training mode.

    Args:
        config: the configuration's `generator` section.
        lora: its `generator_lora` section; None = no adapters.
        dtype: of the weights; float64 holds the very numbers of float32.
        half_precision: the engine will compute in bf16.
        seed: for fresh weights (`random_init`, adapters); the global generators are left alone.
        observed: its attention will be asked for (`Generator.attend`).

    Raises:
        ModelError: the model is not there, lacks weights, or does not fit what is asked of it.
    """
    lora = lora or LoraConfig()
    source = resolve_source(config.name_or_path, setting=_SETTING, gguf_file=config.gguf_file)
    base, adapter = base_of(source)
    if config.random_init and (adapter or lora.enabled):
        raise ModelError(
            "generator.random_init with an adapter: it is of no use without the weights it was "
            "trained on. Set generator.random_init false, or generator_lora.enabled false"
        )
    with torch.random.fork_rng(devices=[]), quiet():
        torch.random.default_generator.manual_seed(seed)
        model = _load_model(config, base, dtype, half_precision, observed)
        preprocessor = _preprocessor(config, base, model)
        is_seq2seq = model.config.is_encoder_decoder
        lm = with_adapters(
            model,
            lora,
            adapter,
            base,
            has_vision=preprocessor.has_vision,
            task_type=TaskType.SEQ_2_SEQ_LM if is_seq2seq else TaskType.CAUSAL_LM,
        )
    generator = Generator(widened(lm, dtype))
    if config.gradient_checkpointing:
        generator.enable_gradient_checkpointing()
    total = sum(p.numel() for p in lm.parameters())
    trained = sum(p.numel() for p in lm.parameters() if p.requires_grad)
    logger.info(
        "generator %s: %s of %s parameters train, %s, prompts up to %d and answers up to %d tokens",
        source.name, f"{trained:,}", f"{total:,}",
        "encoder-decoder" if is_seq2seq else "decoder",
        preprocessor.text.prompt_max_length, preprocessor.text.target_max_length,
    )  # fmt: skip
    return generator.train(), preprocessor


def outline_generator(
    config: GeneratorConfig, lora: LoraConfig | None = None, *, observed: bool = False
) -> Generator:
    """The modules and shapes of `load_generator` without weights: nothing is allocated.

    Args:
        config, lora, observed: as for `load_generator`.

    Raises:
        ModelError: its configuration is not there or not one of a generator.
    """
    source = resolve_source(config.name_or_path, setting=_SETTING, gguf_file=config.gguf_file)
    base, _ = base_of(source)
    # What runs on other hardware need not run here.
    attention = "eager" if config.attention == "eager" else "sdpa"
    plain = config.model_copy(update={"attention": attention, "random_init": True})
    with quiet(), torch.device("meta"):
        model = _load_model(plain, base, torch.float32, False, observed)
        seq2seq = model.config.is_encoder_decoder
        lm = with_adapters(
            model,
            lora or LoraConfig(),
            None,
            base,
            has_vision=model.config.model_type == "qwen3_vl",
            task_type=TaskType.SEQ_2_SEQ_LM if seq2seq else TaskType.CAUSAL_LM,
        )
    generator = Generator(lm)
    if config.gradient_checkpointing:
        generator.enable_gradient_checkpointing()
    return generator


def read_prompts(config: GeneratorConfig, *, observed: bool = False) -> GeneratorPreprocessor:
    """What builds the generator's prompts, from its small files alone: no weights.

    Args:
        config, observed: as for `load_generator`.

    Raises:
        ModelError: they are not there, or do not fit what is asked of them.
    """
    source = resolve_source(config.name_or_path, setting=_SETTING, gguf_file=config.gguf_file)
    base, _ = base_of(source)
    with quiet():
        model_config = _read_config(config, base)
        _classes(model_config, base, config.trust_remote_code, observed)
        return _preprocessor(config, base, SimpleNamespace(config=model_config))


def _read_config(config: GeneratorConfig, source: ModelSource) -> Any:
    gguf = {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
    with as_model_error(source):
        return AutoConfig.from_pretrained(
            source.location, **gguf, trust_remote_code=config.trust_remote_code
        )


def _load_model(
    config: GeneratorConfig,
    source: ModelSource,
    dtype: torch.dtype,
    half_precision: bool,
    observed: bool,
) -> PreTrainedModel:
    trust: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    model_config = _read_config(config, source)
    loader, model_class = _classes(model_config, source, config.trust_remote_code, observed)
    options = trust | {
        "dtype": torch.float32 if dtype == torch.float64 else dtype,
        "attn_implementation": choose_attention(
            config.attention,
            model_class,
            half_precision=half_precision,
            setting="generator.attention",
        ),
    }
    if loader is Qwen3VLForConditionalGeneration:
        options.pop("trust_remote_code")
    if not config.random_init:
        model = pretrained(source, model_config, options, loader)
    elif loader is Qwen3VLForConditionalGeneration:
        model = loader._from_config(model_config, **options)
    else:
        model = loader.from_config(model_config, **options)
    for section in (model.config, model.config.get_text_config()):
        section.use_cache = False
    return model


def _classes(
    config: Any, source: ModelSource, trusted: bool, observed: bool
) -> tuple[Any, type | None]:
    """What loads the model, and the class it will be where that is known."""
    if config.model_type == "qwen3_vl":
        return Qwen3VLForConditionalGeneration, Qwen3VLForConditionalGeneration
    if getattr(config, "vision_config", None) is not None:
        raise ModelError(
            f"{source.name} is of the kind {config.model_type}; the vision models pixelrag trains "
            "are of the kind qwen3_vl, such as Qwen/Qwen3-VL-2B-Instruct"
        )
    seq2seq = config.is_encoder_decoder
    mapping = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if seq2seq else MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = mapping.get(type(config), None)
    model_class = model_class if isinstance(model_class, type) else None
    if model_class is None and not trusted:
        raise ModelError(
            f"{source.name} is of the kind {config.model_type}, which transformers does not know "
            "as a model that writes text; give one such as BART, T5, Qwen3 or Qwen3-VL"
        )
    if observed:
        require_observable(model_class, source.name)
    return (AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM), model_class


def _preprocessor(
    config: GeneratorConfig, source: ModelSource, model: PreTrainedModel | SimpleNamespace
) -> GeneratorPreprocessor:
    tokenizer = load_tokenizer(source, trust_remote_code=config.trust_remote_code)
    is_seq2seq = model.config.is_encoder_decoder
    has_template = bool(tokenizer.chat_template)
    if config.chat == "on" and (is_seq2seq or not has_template):
        what = (
            "an encoder-decoder" if is_seq2seq else "a model whose tokenizer has no chat template"
        )
        raise ModelError(f"generator.chat on for {source.name}, {what}; set it to auto")
    images = None
    if model.config.model_type == "qwen3_vl":
        images = load_image_processor(source, model.config, config.max_visual_tokens)
    prompt, target = _lengths(config, model)
    text = PromptText(
        tokenizer,
        is_seq2seq=is_seq2seq,
        template=config.template,
        in_chat=has_template and not is_seq2seq and config.chat != "off",
        prompt_max_length=prompt,
        target_max_length=target,
    )
    return GeneratorPreprocessor(text, images)


def _lengths(config: GeneratorConfig, model: PreTrainedModel | SimpleNamespace) -> tuple[int, int]:
    """Tokens of prompts and answers, within what the model can tell apart by position."""
    prompt, target = config.prompt_max_length, config.target_max_length
    # T5 has relative positions and its `n_positions` means nothing.
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not limit:
        return prompt, target
    if model.config.is_encoder_decoder:
        return min(prompt, limit), min(target, limit)
    if target >= limit:
        raise ModelError(
            f"generator.target_max_length {target}: the model reads {limit} tokens, prompt and "
            "answer together; lower it"
        )
    return min(prompt, limit - target), target
