"""A causal language model in two parts: final hidden states, and the head that makes logits.

The distillation loss needs no logits as a whole, so the body runs alone and the head's weights are
lent to the loss. They are lent from inside the head's own forward: there, and only there, are they
whole under ZeRO-3 and FSDP2, tied to the embedding or not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, TypeVar, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from pixelrag.errors import ModelError
from pixelrag.losses.kd_head import Head, Lora
from pixelrag.models.attention import VARLEN
from pixelrag.models.blocks import checkpoint_blocks, transformer_blocks
from pixelrag.models.precision import keep_float64
from pixelrag.models.rows import Rows

T = TypeVar("T")
UseWeights = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], T]
UseHead = Callable[[torch.Tensor, Head], T]


class LendingLinear(nn.Linear):
    """A linear layer that can hand out its weight for the time of its forward."""

    def forward(self, hidden: torch.Tensor, use: UseWeights | None = None) -> Any:
        """Return the layer's output, or what ``use(hidden, weight, bias)`` makes of the weights.

        The states are an argument of their own because sharding engines hang their hooks on the
        tensors that go in and come out.
        """
        if use is None:
            return super().forward(hidden)
        return use(hidden, self.weight, self.bias)


class CausalLM(nn.Module):
    """Body and head of a Hugging Face causal language model.

    Build it with `pixelrag.models.causal_load.load_causal`.

    Args:
        lm: transformers model with a language-model head, or a `PeftModel` around one.
        setting: configuration section it came from (`student`), for messages.

    Attributes:
        lm: as given.
        setting: as given.
    """

    def __init__(self, lm: nn.Module, setting: str = "student") -> None:
        super().__init__()
        self.lm = lm
        self.setting = setting
        model = self.base_model
        self._takes_positions = "position_ids" in inspect.signature(self.body.forward).parameters
        self._logit_scale = _logit_scale(model)
        self._soft_cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        for linear in _linears(model.get_output_embeddings()):
            if type(linear) is nn.Linear:
                linear.__class__ = LendingLinear

    @property
    def base_model(self) -> PreTrainedModel:
        """The transformers model itself, without PEFT's wrapper."""
        model = self.lm.get_base_model() if isinstance(self.lm, PeftModel) else self.lm
        return cast(PreTrainedModel, model)

    @property
    def body(self) -> nn.Module:
        """What turns tokens into final hidden states."""
        return self.base_model.base_model

    @property
    def dtype(self) -> torch.dtype:
        """Of the body's weights."""
        return next(self.body.parameters()).dtype

    @property
    def hidden_size(self) -> int:
        """H of the final hidden states."""
        return self.base_model.get_output_embeddings().in_features

    @property
    def vocab_rows(self) -> int:
        """Rows of the head, padding included."""
        return self.base_model.get_output_embeddings().out_features

    @property
    def attention(self) -> str:
        """Name of the attention implementation."""
        return self.base_model.config._attn_implementation

    def use_attention(self, name: str) -> None:
        """Run on another attention implementation from now on."""
        self.base_model.set_attn_implementation(name)

    def hidden(self, rows: Rows) -> torch.Tensor:
        """Final hidden states [B, T, H], of which the head alone makes logits.

        Raises:
            ModelError: documents that count their own positions, for a model that takes none.
        """
        with keep_float64(self.dtype):
            output = self.body(**self._inputs(rows), return_dict=True)
            return output.last_hidden_state

    def with_head(self, hidden_NH: torch.Tensor, use: UseHead) -> Any:
        """Return ``use(hidden, head)``, called where the head's weights are whole.

        Args:
            hidden_NH: from `hidden`, any selection of tokens.
            use: makes tensors of both; they may carry gradients to both.

        Raises:
            ModelError: the head is not one linear layer, with or without an adapter.
        """
        head = self.base_model.get_output_embeddings()
        linears = _linears(head)
        if not linears or any(not isinstance(linear, LendingLinear) for linear in linears):
            raise ModelError(
                f"{self.setting}: {type(self.base_model).__name__} has a head of the kind "
                f"{type(head).__name__}, which cannot be used apart from its model; set "
                "loss.implementation to logits"
            )
        if not isinstance(head, LoraLayer):
            return head(hidden_NH, lambda h, weight, bias: use(h, self._head(weight, bias, None)))
        base, down, up = linears
        scaling, dropout = _adapter_settings(head)

        def with_base(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
            def with_down(h: torch.Tensor, a_RH: torch.Tensor, _: None) -> Any:
                def with_up(h: torch.Tensor, b_VR: torch.Tensor, _: None) -> Any:
                    return use(h, self._head(weight, bias, Lora(a_RH, b_VR, scaling, dropout)))

                return up(h, with_up)

            return down(h, with_down)

        return base(hidden_NH, with_base)

    def _head(self, weight: torch.Tensor, bias: torch.Tensor | None, lora: Lora | None) -> Head:
        return Head(weight, bias, lora, logit_scale=self._logit_scale, soft_cap=self._soft_cap)

    def logits(self, rows: Rows) -> torch.Tensor:
        """Logits [B, T, V] as the model itself computes them, whatever its head is."""
        with keep_float64(self.dtype):
            return self.base_model(**self._inputs(rows), return_dict=True).logits

    def blocks(self) -> list[nn.Module]:
        """The transformer layers, to be sharded or checkpointed one by one."""
        return transformer_blocks(self.base_model)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer in the backward pass.

        Raises:
            ModelError: the architecture does not support it.
        """
        checkpoint_blocks(self.base_model, self.dtype, f"{self.setting}.gradient_checkpointing")

    def compile_blocks(self) -> None:
        """Compile each layer where it stands; names of parameters stay as they are."""
        block: Any
        for block in self.blocks():
            if getattr(block, "gradient_checkpointing", False):
                # Nothing within a checkpoint is compiled if the compiler cannot trace all of it.
                block._gradient_checkpointing_func = _Recomputed(block._gradient_checkpointing_func)
            else:
                block.compile()

    def _inputs(self, rows: Rows) -> dict[str, Any]:
        # Neither mask nor cache: with either, transformers stops telling documents apart.
        inputs: dict[str, Any] = {
            "input_ids": rows.input_ids_BT,
            "attention_mask": None,
            "use_cache": False,
        }
        if self._takes_positions:
            inputs["position_ids"] = rows.position_ids_BT
        elif len(rows.bounds) - 1 > len(rows.input_ids_BT):
            raise ModelError(
                f"{self.setting}: {type(self.base_model).__name__} takes no position ids, so "
                "documents of a row cannot be told apart; set packing.enabled false"
            )
        if self.attention == VARLEN or "flash" in self.attention:
            inputs["cu_seq_lens_q"] = inputs["cu_seq_lens_k"] = rows.cu_seqlens
            inputs["max_length_q"] = inputs["max_length_k"] = rows.max_length
        return inputs


class _Recomputed:
    """Checkpoints a layer whose forward is compiled.

    Args:
        checkpoint: transformers' function; its first argument is `partial(forward, layer, ...)`.
    """

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self._checkpoint = checkpoint

    def __call__(self, layer: partial[Any], *arguments: Any) -> Any:
        compiled = _compiled(layer.func)
        return self._checkpoint(partial(compiled, *layer.args, **layer.keywords), *arguments)


@cache
def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(forward)


def uncompiled() -> AbstractContextManager[None]:
    """Within it compiled layers run as they are, so that rows of rare shapes compile nothing."""
    return torch.compiler.set_stance("force_eager")


def head_logits(hidden_NH: torch.Tensor, head: Head) -> torch.Tensor:
    """Logits [N, V] of a few tokens, without dropout, in at least fp32; for checks."""
    wide = torch.promote_types(hidden_NH.dtype, torch.float32)
    with torch.autocast(hidden_NH.device.type, enabled=False):
        hidden_NH = hidden_NH.to(wide)
        logits_NV = hidden_NH @ head.weight_VH.to(wide).t()
        if head.bias_V is not None:
            logits_NV = logits_NV + head.bias_V.to(wide)
        if head.lora is not None:
            low_NR = hidden_NH @ head.lora.a_RH.to(wide).t()
            logits_NV = logits_NV + low_NR @ head.lora.b_VR.to(wide).t() * head.lora.scaling
        logits_NV = logits_NV * head.logit_scale
        if head.soft_cap is not None:
            logits_NV = head.soft_cap * torch.tanh(logits_NV / head.soft_cap)
        return logits_NV


def _linears(head: nn.Module | None) -> list[nn.Module]:
    """The linear layers a head consists of: itself, or base, A and B of an adapter."""
    if head is None:
        return []
    if not isinstance(head, LoraLayer):
        return [head]
    name = head.active_adapters[0]
    return [head.base_layer, head.lora_A[name], head.lora_B[name]]


def _adapter_settings(head: LoraLayer) -> tuple[float, float]:
    name = head.active_adapters[0]
    if head.use_dora.get(name, False):
        raise ModelError("a DoRA adapter on lm_head is not supported; use plain LoRA there")
    dropout = head.lora_dropout[name]
    p = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
    return head.scaling[name], p


def _logit_scale(model: PreTrainedModel) -> float:
    """What the model multiplies its logits by."""
    config = model.config.get_text_config()
    if factor := getattr(config, "logit_scale", None):  # Cohere
        return float(factor)
    if divisor := getattr(config, "logits_scaling", None):  # Granite
        return 1.0 / float(divisor)
    if factor := getattr(config, "lm_head_multiplier", None):  # Falcon-H1
        return float(factor)
    return 1.0
