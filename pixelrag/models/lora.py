"""Low-rank adapters (PEFT): wrapping a model, loading and comparing a saved adapter."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping

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
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from pixelrag.config.parts import LoraConfig
from pixelrag.errors import ModelError
from pixelrag.models.adapter_keys import check_effect, unwrapped
from pixelrag.models.lora_targets import (
    LoraLayerPlan,
    planned_layers,
    target_pattern,
    vision_patterns,
)
from pixelrag.models.source import ModelSource

logger = logging.getLogger("pixelrag")

ADAPTER_WEIGHTS = "adapter_model.safetensors"


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
    r, alpha = config.of_vision
    vision = vision_patterns(config)
    peft_config = PeftLoraConfig(
        task_type=task_type,
        r=config.r,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # PEFT says int and takes any number
        lora_dropout=config.dropout,
        target_modules=target_pattern(backbone, config, has_vision=has_vision),
        rank_pattern=dict.fromkeys(vision, r) if r != config.r else {},
        alpha_pattern=dict.fromkeys(vision, alpha) if alpha != config.alpha else {},
        use_dora=config.dora,
        use_rslora=config.rslora,
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
    as_saved: bool = False,
) -> PreTrainedModel | PeftModel:
    """New adapters, the saved ones continued, the saved ones merged, or none at all.

    Args:
        model: the loaded base model.
        config: the configuration's `lora` section.
        adapter: the folder of a saved adapter, or None.
        base: where the base model is.
        has_vision, task_type: as for `apply_lora`.
        probe: token ids [1, T] of a text, on which a saved adapter must change the model's output.
        as_saved: keep a saved adapter as it is, whatever ``config`` says.

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
    compared = config.enabled and not as_saved
    wanted = planned_layers(model, config, has_vision=has_vision) if compared else {}
    loaded = load_adapter(model, adapter, base.name)
    if probe is not None:
        check_effect(loaded, probe, adapter.name)
    if compared:
        check_same_lora(loaded, wanted, adapter.name)
        set_lora_dropout(loaded, config.dropout)
    if compared or as_saved:
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


def check_same_lora(model: PeftModel, wanted: Mapping[str, LoraLayerPlan], name: str) -> None:
    """Refuse a configuration that asks for another adapter than the one that was loaded.

    Compared is what makes the function that a checkpoint's numbers mean: the layers that are
    adapted, and of each rank, scale (alpha, rsLoRA) and DoRA. Dropout is no part of it.

    Raises:
        ModelError: names the first layer that differs.
    """
    layers = model.get_base_model().named_modules()
    saved = {
        path: LoraLayerPlan(m.r["default"], m.scaling["default"], m.use_dora["default"])
        for path, m in layers
        if isinstance(m, LoraLayer)
    }
    unlike = sorted(p for p in saved.keys() | wanted.keys() if saved.get(p) != wanted.get(p))
    if unlike:
        has, asked = saved.get(unlike[0], "no adapter"), wanted.get(unlike[0], "no adapter")
        raise ModelError(
            f"{name} holds another adapter than the configuration's lora section describes: "
            f"{len(unlike)} layers differ, first {unlike[0]}: the file has {has}, lora asks for "
            f"{asked}. Set these options as they were, or enabled false to merge the adapter and "
            "train the whole model"
        )


def set_lora_dropout(model: PeftModel, dropout: float) -> None:
    """Give a loaded adapter the configured dropout; it is no part of the weights."""
    for name, module in model.named_modules():
        if name.endswith("lora_dropout"):
            for key in module:
                module[key] = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
    settings = model.peft_config["default"]
    assert isinstance(settings, PeftLoraConfig)
    settings.lora_dropout = dropout


def adapters_to_fp32(model: nn.Module) -> None:
    """Keep adapter weights in float32 whatever the frozen model is in."""
    for name, parameter in model.named_parameters():
        if "lora_" in name and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def _some(keys: set[str]) -> str:
    listed = ", ".join(sorted(keys)[:3]) or "none"
    return f"{listed} and {len(keys) - 3} more" if len(keys) > 3 else listed
