"""Which layers of a model get LoRA adapters, and what rank and scale each of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from pixelrag.config.parts import LoraConfig
from pixelrag.errors import ModelError

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
_VISION = {
    "attention": ("attn.qkv", "attn.proj"),
    "all": ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"),
}
_BLOCKS = r"(?:model\.)?visual\.blocks\.\d+\."
_MERGERS = r"(?:model\.)?visual\.(?:merger|deepstack_merger_list\.\d+)\.linear_fc[12]"


@dataclass(frozen=True, slots=True)
class LoraLayerPlan:
    """The adapter of one layer; two of them are alike if they mean the same function."""

    r: int
    scale: float
    dora: bool

    def __str__(self) -> str:
        return f"r {self.r}, scale {self.scale:g}{', DoRA' if self.dora else ''}"


def target_pattern(backbone: nn.Module, config: LoraConfig, *, has_vision: bool) -> str:
    """The regular expression that PEFT matches whole module names against.

    With a vision tower, `target_modules` (or the default set) is looked for in the language model
    alone; `vision` adds the tower's blocks, `merger` what joins the two. A target "a.b" also
    matches "x.a.b", never "xa.b".

    Raises:
        ModelError: a target matches no layer, or no default is known for the model; or
            `lora.vision` or `lora.merger` for a model without a vision tower.
    """
    linear = _linear(backbone)
    within = r"(?:model\.)?language_model\." if has_vision else ""
    targets: Sequence[str] | None = config.target_modules
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
    vision = vision_patterns(config)
    if vision and not has_vision:
        asked = "lora.merger is true" if config.merger else f"lora.vision is {config.vision}"
        off = "false" if config.merger else "none"
        raise ModelError(
            f"{asked}, but {type(backbone).__name__} has no vision tower; set it {off}"
        )
    return "|".join(f"(?:{pattern})" for pattern in [_pattern(within, targets), *vision])


def vision_patterns(config: LoraConfig) -> list[str]:
    """Patterns of what is adapted outside the language model."""
    patterns = [_MERGERS] if config.merger else []
    if config.vision != "none":
        layers = "|".join(re.escape(name) for name in _VISION[config.vision])
        patterns.insert(0, rf"{_BLOCKS}(?:{layers})")
    return patterns


def planned_layers(
    backbone: nn.Module, config: LoraConfig, *, has_vision: bool
) -> dict[str, LoraLayerPlan]:
    """What each layer of a bare model would get, by its name.

    rsLoRA scales by alpha / sqrt(r) in place of alpha / r (Kalajdzievski 2023, eq. 4).

    Raises:
        ModelError: see `target_pattern`.
    """
    vision = vision_patterns(config)

    def plan(name: str) -> LoraLayerPlan:
        in_vision = any(re.fullmatch(pattern, name) for pattern in vision)
        r, alpha = config.of_vision if in_vision else (config.r, config.alpha)
        return LoraLayerPlan(r, alpha / (math.sqrt(r) if config.rslora else r), config.dora)

    pattern = target_pattern(backbone, config, has_vision=has_vision)
    return {name: plan(name) for name in _matching(pattern, _linear(backbone))}


def _linear(backbone: nn.Module) -> list[str]:
    return [n for n, m in backbone.named_modules() if isinstance(m, nn.Linear)]


def _pattern(within: str, names: Iterable[str], *, escape: bool = True) -> str:
    alternatives = "|".join(re.escape(name) if escape else name for name in names)
    return rf"{within}(?:.*\.)?(?:{alternatives})"


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if re.fullmatch(pattern, name)]


def _kinds(names: Sequence[str]) -> str:
    """Distinct layer names without their numbers, for messages."""
    kinds = {re.sub(r".*\.\d+\.", "", name) for name in names}
    return ", ".join(sorted(kinds)) or "none"
