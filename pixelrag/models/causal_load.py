"""Loads a causal language model, its tokenizer or its configuration, GGUF files included."""

from __future__ import annotations

import logging
from typing import Any

import torch
from peft import PeftModel, TaskType
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

from pixelrag.config.distill_parts import AdapterConfig, StudentConfig, TeacherConfig
from pixelrag.config.parts import LoraConfig
from pixelrag.errors import ModelError
from pixelrag.models.attention import choose_causal_attention
from pixelrag.models.blocks import transformer_blocks
from pixelrag.models.causal import CausalLM
from pixelrag.models.liger import apply_liger
from pixelrag.models.load import check_weights, quiet
from pixelrag.models.lora import adapters_to_fp32, with_adapters
from pixelrag.models.source import ModelSource, as_model_error, base_of, resolve_source

logger = logging.getLogger("pixelrag")


def student_source(config: StudentConfig) -> ModelSource:
    """Where the student's files lie."""
    return resolve_source(
        config.name_or_path, setting="student.name_or_path", gguf_file=config.gguf_file
    )


def teacher_source(config: TeacherConfig) -> ModelSource:
    """Where the teacher's files lie."""
    return resolve_source(
        config.name_or_path or "", setting="teacher.name_or_path", gguf_file=config.gguf_file
    )


def load_tokenizer(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer, from its files alone; a padding token is set where it has none.

    Raises:
        ModelError: it is not there, or has neither a padding nor an end token.
    """
    with quiet(), as_model_error(source):
        tokenizer = AutoTokenizer.from_pretrained(
            source.location, **_gguf(source), trust_remote_code=trust_remote_code
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ModelError(f"{source.name}: its tokenizer has neither a padding nor an end token")
        # Padding is no part of any loss, so any token will do.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """The configuration (`config.json` or a GGUF file's header).

    Raises:
        ModelError: it is not there, or of a model that makes no text from left to right.
    """
    with quiet(), as_model_error(source):
        config = AutoConfig.from_pretrained(
            source.location, **_gguf(source), trust_remote_code=trust_remote_code
        )
    if config.is_encoder_decoder:
        raise ModelError(
            f"{source.name} is an encoder-decoder ({config.model_type}); distillation takes "
            "decoders, such as Qwen3 or Llama"
        )
    return config


def load_student(
    config: StudentConfig,
    adapter_config: AdapterConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    half_precision: bool = False,
    cuda: bool = False,
    seed: int = 0,
) -> CausalLM:
    """Load what `student` and `lora` of a configuration describe, on the CPU, in training mode.

    Args:
        config: the configuration's `student` section.
        adapter_config: its `lora` section; None = no adapters.
        dtype: of the weights; float64 holds the very numbers of float32.
        half_precision: the engine will compute in bf16.
        cuda: the engine will run on CUDA.
        seed: for fresh weights (`random_init`, adapters); the global generators are left alone.

    Raises:
        ModelError: the model is not there, lacks weights, or does not fit what is asked of it.
    """
    source = student_source(config)
    base, adapter = base_of(source)
    if adapter and config.random_init:
        raise ModelError("student.random_init with an adapter's folder: choose one")
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        model = _load(base, config, "student", dtype, half_precision, cuda, config.random_init)
        if config.num_layers is not None:
            keep_layers(model, config.num_layers)
        with quiet():
            lm = _with_adapters(model, adapter_config, adapter, base)
    student = CausalLM(widened(lm, dtype), "student")
    if config.gradient_checkpointing:
        student.enable_gradient_checkpointing()
    if config.compile:
        student.compile_blocks()
    total = sum(p.numel() for p in lm.parameters())
    trained = sum(p.numel() for p in lm.parameters() if p.requires_grad)
    logger.info(
        "student %s: %s of %s parameters train, %d layers, %d vocabulary rows",
        source.name, f"{trained:,}", f"{total:,}", len(student.blocks()), student.vocab_rows,
    )  # fmt: skip
    return student.train()


def load_frozen(
    config: TeacherConfig, *, dtype: torch.dtype = torch.float32, cuda: bool = False
) -> CausalLM:
    """Load a teacher on the CPU, in eval mode, without gradients.

    Raises:
        ModelError: the model is not there, lacks weights, or does not fit what is asked of it.
    """
    source = teacher_source(config)
    model = _load(source, config, "teacher", dtype, dtype == torch.bfloat16, cuda, False)
    teacher = CausalLM(widened(model, dtype).requires_grad_(False), "teacher")
    logger.info(
        "teacher %s: %s parameters in %s, %d layers, %d vocabulary rows",
        source.name, f"{sum(p.numel() for p in model.parameters()):,}",
        str(dtype).removeprefix("torch."), len(teacher.blocks()), teacher.vocab_rows,
    )  # fmt: skip
    return teacher.eval()


def outline(
    config: StudentConfig | TeacherConfig,
    adapter_config: AdapterConfig | None = None,
    *,
    attention: str = "eager",
) -> CausalLM:
    """A model's modules and shapes without its weights: nothing is allocated.

    Args:
        config: the configuration's `student` or `teacher` section.
        adapter_config: its `lora` section; None = no adapters.
        attention: implementation, in place of the configuration's.

    Raises:
        ModelError: its configuration is not there or not one of a causal language model.
    """
    student = config if isinstance(config, StudentConfig) else None
    setting = "teacher" if student is None else "student"
    source = student_source(config) if isinstance(config, StudentConfig) else teacher_source(config)
    base, _ = base_of(source)
    # What runs on other hardware need not run here.
    plain = config.model_copy(update={"attention": attention, "liger": "off"})
    with torch.device("meta"):
        model = _load(base, plain, setting, torch.float32, False, False, True)
    if student is not None and student.num_layers is not None:
        keep_layers(model, student.num_layers)
    if adapter_config is not None and adapter_config.enabled:
        with quiet():
            return CausalLM(_with_adapters(model, adapter_config, None, base), setting)
    return CausalLM(model, setting)


def _load(
    source: ModelSource,
    config: StudentConfig | TeacherConfig,
    setting: str,
    dtype: torch.dtype,
    half_precision: bool,
    cuda: bool,
    random_init: bool,
) -> PreTrainedModel:
    trust: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    model_config = load_config(source, **trust)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    model_class = model_class if isinstance(model_class, type) else None
    if model_class is None and not config.trust_remote_code:
        raise ModelError(
            f"{source.name} is of the kind {model_config.model_type}, which transformers does not "
            "know as a causal language model"
        )
    attention = choose_causal_attention(
        config.attention, model_class, model_config,
        half_precision=half_precision, cuda=cuda, setting=setting,
    )  # fmt: skip
    options: dict[str, Any] = trust | {
        "dtype": torch.float32 if dtype == torch.float64 else dtype,
        "attn_implementation": attention,
    }
    with quiet():
        if random_init:
            model = AutoModelForCausalLM.from_config(model_config, **options)
        else:
            model = pretrained(source, model_config, options)
    for section in (model.config, model.config.get_text_config()):
        section.use_cache = False
    apply_liger(model, config.liger, setting, cuda=cuda)
    return model


def pretrained(
    source: ModelSource,
    config: Any,
    options: dict[str, Any],
    auto_class: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """Load weights, from safetensors or a GGUF file, and refuse a checkpoint that lacks some.

    Args:
        source: where they lie.
        config: the model's configuration.
        options: further ones of `from_pretrained`.
        auto_class: transformers' class that loads it.

    Raises:
        ModelError: it does not load.
    """
    # Safetensors (or GGUF) only: the older format is a pickle, which may run code when read.
    form: dict[str, Any] = {**_gguf(source)} or {"use_safetensors": True}
    with as_model_error(source):
        model, info = auto_class.from_pretrained(
            source.location, config=config, output_loading_info=True, **form, **options
        )
    check_weights(info, source, f"{source.setting.split('.')[0]}.random_init")
    # Its weights are plain numbers now; nothing quantized is left to be saved as such.
    if hasattr(model.config, "quantization_config") and source.gguf_file is not None:
        del model.config.quantization_config
        model.is_quantized = False
        model.hf_quantizer = None
    return model


def keep_layers(model: PreTrainedModel, num_layers: int) -> list[int]:
    """Drop all but ``num_layers`` layers, evenly spaced, the first and the last among them.

    Returns:
        The kept layers' former numbers.

    Raises:
        ModelError: the model has fewer, or its layers are no plain list.
    """
    blocks = transformer_blocks(model)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and list(m) == blocks]
    config = model.config.get_text_config()
    if len(lists) != 1 or config.num_hidden_layers != len(blocks):
        raise ModelError(
            f"student.num_layers: the layers of {type(model).__name__} are no plain list; "
            "leave it out"
        )
    if num_layers > len(blocks):
        raise ModelError(
            f"student.num_layers: got {num_layers}, but the checkpoint has {len(blocks)} layers"
        )
    last = len(blocks) - 1
    kept = [round(i * last / max(num_layers - 1, 1)) for i in range(num_layers)]
    del lists[0][:]
    for index, old in enumerate(kept):
        lists[0].append(blocks[old])
        for module in blocks[old].modules():
            if hasattr(module, "layer_idx"):
                setattr(module, "layer_idx", index)  # noqa: B010  # no submodule, whatever nn says
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(config, name, None):
            setattr(config, name, [kinds[old] for old in kept])
    config.num_hidden_layers = num_layers
    return kept


def _with_adapters(
    model: PreTrainedModel,
    config: AdapterConfig | None,
    adapter: ModelSource | None,
    base: ModelSource,
) -> PreTrainedModel | PeftModel:
    settings = LoraConfig() if config is None else LoraConfig(**config.model_dump())
    return with_adapters(model, settings, adapter, base, task_type=TaskType.CAUSAL_LM)


def widened(lm: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A loaded model in its final type: float64 throughout, or adapters in float32."""
    if dtype == torch.float64:
        # Buffers stay: rotary tables shall be the numbers that the float32 model uses.
        for parameter in lm.parameters():
            parameter.data = parameter.data.double()
    else:
        adapters_to_fp32(lm)
    return lm


def _gguf(source: ModelSource) -> dict[str, str]:
    return {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
