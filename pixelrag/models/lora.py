"""Low-rank adapters (PEFT): which layers get them, wrapping a model, loading a saved adapter."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import (
    PeftConfig,
    PeftModel,
    TaskType,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from pixelrag.config.parts import LoraConfig
from pixelrag.errors import ModelError
from pixelrag.models.adapter_keys import check_effect, unwrapped
from pixelrag.models.source import ModelSource

logger = logging.getLogger("pixelrag")

ADAPTER_WEIGHTS = "adapter_model.safetensors"

# Attention projections by family; the first set that a model has all of is its default.
_DEFAULTS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
        "attention.output.dense",
    ),
    (
        "attention.self.query_proj",
        "attention.self.key_proj",
        "attention.self.value_proj",
        "attention.output.dense",
    ),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o"),
    ("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),
    ("attention.query", "attention.key", "attention.value", "attention.dense"),
    ("attn.Wqkv", "attn.Wo"),
)
# Blocks of the vision tower only: its mergers are trained whole or not at all.
_VISION = ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")


def target_pattern(backbone: nn.Module, config: LoraConfig, *, has_vision: bool) -> str:
    """The regular expression that PEFT matches whole module names against.

    With a vision tower, `target_modules` (or the default set) is looked for in the language model
    alone; `vision` adds the tower's blocks. A target "a.b" also matches "x.a.b", never "xa.b".

    Raises:
        ModelError: a target matches no layer, or no default is known for the model; or
            `lora.vision` for a model without a vision tower.
    """
    linear = [n for n, m in backbone.named_modules() if isinstance(m, nn.Linear)]
    within = r"(?:model\.)?language_model\." if has_vision else ""
    targets = config.target_modules
    if targets is None:
        targets = next(
            (
                names
                for names in _DEFAULTS
                if all(_matching(_pattern(within, [name]), linear) for name in names)
            ),
            None,
        )
        if targets is None:
            raise ModelError(
                f"no default LoRA targets are known for {type(backbone).__name__}; set "
                f"lora.target_modules, e.g. to some of {_kinds(linear)}"
            )
    for name in targets:
        if not _matching(_pattern(within, [name]), linear):
            place = "the language model of " if has_vision else ""
            candidates = _matching(_pattern(within, [r".*"], escape=False), linear)
            raise ModelError(
                f"lora.target_modules {name!r} matches no linear layer in {place}"
                f"{type(backbone).__name__}; there are {_kinds(candidates)}"
            )
    pattern = _pattern(within, targets)
    if not config.vision:
        return pattern
    if not has_vision:
        raise ModelError(
            f"lora.vision is true, but {type(backbone).__name__} has no vision tower; set it false"
        )
    return f"(?:{pattern})|(?:{_vision_pattern()})"


def apply_lora(
    backbone: nn.Module,
    config: LoraConfig,
    *,
    has_vision: bool,
    base_name: str,
    task_type: TaskType = TaskType.FEATURE_EXTRACTION,
) -> PeftModel:
    """Freeze `backbone` and put adapters into it; they are fp32 and start as the identity.

    Args:
        base_name: how the adapter's files name the model they belong to.
        task_type: PEFT's word for what the model does.
    """
    peft_config = PeftLoraConfig(
        task_type=task_type,
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=target_pattern(backbone, config, has_vision=has_vision),
    )
    with warnings.catch_warnings():
        # PEFT still asks transformers for names that it has renamed.
        warnings.simplefilter("ignore", FutureWarning)
        # Merged exports write head and embedding apart where only the head was adapted.
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        model = get_peft_model(backbone, peft_config)
    peft_config.base_model_name_or_path = base_name
    return model


def with_adapters(
    model: PreTrainedModel,
    config: LoraConfig,
    adapter: ModelSource | None,
    base: ModelSource,
    *,
    has_vision: bool = False,
    task_type: TaskType = TaskType.FEATURE_EXTRACTION,
    probe: torch.Tensor | None = None,
) -> PreTrainedModel | PeftModel:
    """New adapters, the saved ones continued, the saved ones merged, or none at all.

    Args:
        model: the loaded base model.
        config: the configuration's `lora` section.
        adapter: the folder of a saved adapter, or None.
        base: where the base model is.
        has_vision, task_type: as for `apply_lora`.
        probe: token ids [1, T] of a text, on which a saved adapter must change the model's output.

    Raises:
        ModelError: the saved adapter does not load, does nothing, or is not the one that `config`
            asks for.
    """
    if adapter is None:
        if not config.enabled:
            return model
        return apply_lora(
            model, config, has_vision=has_vision, base_name=base.name, task_type=task_type
        )
    loaded = load_adapter(model, adapter, base.name)
    if probe is not None:
        check_effect(loaded, probe, adapter.name)
    if config.enabled:
        check_same_lora(loaded, config, adapter.name)
        set_lora_dropout(loaded, config.dropout)
        return loaded
    logger.info("merging the adapter %s into %s", adapter.name, base.name)
    return loaded.merge_and_unload().requires_grad_(True)


def load_adapter(backbone: nn.Module, source: ModelSource, base_name: str) -> PeftModel:
    """Put a saved LoRA adapter into `backbone`, trainable.

    PEFT only warns about keys that do not fit and carries on without them, i.e. with an adapter
    that does nothing; here that is an error.

    Raises:
        ModelError: it is no LoRA adapter, has no safetensors file, or does not fit the model.
    """
    name = source.name
    weights = source.file(ADAPTER_WEIGHTS)
    if weights is None:
        raise ModelError(f"{name} has adapter_config.json but no {ADAPTER_WEIGHTS} beside it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the keys that are compared below
            peft_config = PeftConfig.from_pretrained(str(weights.parent))
            modules = {module for module, _ in backbone.named_modules()}
            tensors, targets = unwrapped(load_file(weights), modules)
            if targets is not None:
                peft_config.target_modules = targets
                peft_config.task_type = TaskType.FEATURE_EXTRACTION
            peft_config.inference_mode = False
            model = get_peft_model(backbone, peft_config)
            saved = set(tensors)
            expected = set(get_peft_model_state_dict(model, save_embedding_layers=False))
            if saved == expected:
                set_peft_model_state_dict(model, tensors)
    except Exception as error:  # PEFT and safetensors have no common base for what they raise
        raise ModelError(f"{name}: the adapter does not load into {base_name}: {error}") from error
    if not isinstance(model.peft_config["default"], PeftLoraConfig):
        kind = model.peft_config["default"].peft_type
        raise ModelError(f"{name} is a {kind} adapter; pixelrag continues LoRA adapters only")
    if saved != expected:
        raise ModelError(
            f"{name}: the adapter does not fit {base_name}, was it trained on another model or "
            f"written by another tool? Keys that only the file has: {_some(saved - expected)}; "
            f"keys that only the model has: {_some(expected - saved)}"
        )
    model.peft_config["default"].base_model_name_or_path = base_name
    return model


def check_same_lora(model: PeftModel, config: LoraConfig, name: str) -> None:
    """Refuse a configuration that asks for another adapter than the one that was loaded.

    Raises:
        ModelError: rank or alpha differ.
    """
    saved: Any = model.peft_config["default"]
    if (saved.r, saved.lora_alpha) != (config.r, config.alpha):
        raise ModelError(
            f"{name} holds an adapter with r {saved.r} and alpha {saved.lora_alpha:g}, but lora.r "
            f"is {config.r} and lora.alpha {config.alpha:g}. Set them alike, or set lora.enabled "
            "false to merge the adapter and train the whole model"
        )


def set_lora_dropout(model: PeftModel, dropout: float) -> None:
    """Give a loaded adapter the configured dropout; it is no part of the weights."""
    for name, module in model.named_modules():
        if name.endswith("lora_dropout"):
            for key in module:
                module[key] = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
    model.peft_config["default"].lora_dropout = dropout


def adapters_to_fp32(model: nn.Module) -> None:
    """Keep adapter weights in float32 whatever the frozen model is in."""
    for name, parameter in model.named_parameters():
        if "lora_" in name and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def _pattern(within: str, names: Iterable[str], *, escape: bool = True) -> str:
    alternatives = "|".join(re.escape(name) if escape else name for name in names)
    return rf"{within}(?:.*\.)?(?:{alternatives})"


def _vision_pattern() -> str:
    layers = "|".join(re.escape(name) for name in _VISION)
    return rf"(?:model\.)?visual\.blocks\.\d+\.(?:{layers})"


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if re.fullmatch(pattern, name)]


def _kinds(names: Sequence[str]) -> str:
    """Distinct layer names without their numbers, for messages."""
    kinds = {re.sub(r".*\.\d+\.", "", name) for name in names}
    return ", ".join(sorted(kinds)) or "none"


def _some(keys: set[str]) -> str:
    listed = ", ".join(sorted(keys)[:3]) or "none"
    return f"{listed} and {len(keys) - 3} more" if len(keys) > 3 else listed
