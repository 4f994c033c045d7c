"""How much a generator looks at each passage while it reads an answer: what ADist learns from.

The weights come from transformers' attention interface, which hands every layer's queries, keys and
values to a function by name: while a reading is observed, the decoder uses the one below. So a
model may train with any implementation, fused ones too, that never show their weights.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from pixelrag.errors import ModelError
from pixelrag.losses.reader import pool_attention

_NAME = "pixelrag_observed"
_observer: ContextVar[PassageAttention | None] = ContextVar("observer", default=None)


class PassageAttention:
    """Collects one forward pass's attention onto passages, layer after layer.

    Args:
        document_NS: int64, the passage of each token that is attended to, -1 for none; see
            `pixelrag.losses.reader.pool_attention`.
        target_mask_NT: tokens of the answers.
        num_documents: K.
        rows: of the attention matrix, those that predict the answer's tokens.
        crossed: look at the layers that attend to an encoder, not to the decoder itself.
    """

    def __init__(
        self,
        document_NS: torch.Tensor,
        target_mask_NT: torch.Tensor,
        num_documents: int,
        *,
        rows: slice,
        crossed: bool,
    ) -> None:
        self._document_NS = document_NS
        self._target_mask_NT = target_mask_NT.bool()
        self._num_documents = num_documents
        self._rows = rows
        self._crossed = crossed
        self._layers: list[torch.Tensor] = []

    def look(self, module: nn.Module, weights_NHQS: torch.Tensor, value_NGSD: torch.Tensor) -> None:
        """Take in one layer; heads may share values."""
        if bool(getattr(module, "is_causal", False)) == self._crossed:
            return
        shared = weights_NHQS.shape[1] // value_NGSD.shape[1]
        wide = torch.promote_types(value_NGSD.dtype, torch.float32)
        norms_NHS = value_NGSD.to(wide).norm(dim=-1).repeat_interleave(shared, 1)
        self._layers.append(
            pool_attention(
                weights_NHQS[:, :, self._rows],
                norms_NHS,
                self._document_NS,
                self._target_mask_NT,
                self._num_documents,
            )
        )

    def mean(self) -> torch.Tensor:
        """Over the layers: [N, K], float32 or float64.

        Raises:
            ModelError: no layer was seen.
        """
        if not self._layers:
            raise ModelError(
                "loss.retriever adist: the generator's attention does not go through transformers' "
                "attention interface, so that nothing can be learned from it; set loss.retriever "
                "to pdist, emdr2 or loop"
            )
        return torch.stack(self._layers).mean(0)


@contextlib.contextmanager
def observed(model: PreTrainedModel, observer: PassageAttention | None) -> Iterator[None]:
    """Let ``observer``, if there is one, look at all that ``model``'s decoder attends to inside."""
    if observer is None:
        yield
        return
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, eager_mask)
    config = model.get_decoder().config
    usual = config._attn_implementation
    token = _observer.set(observer)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = usual
        _observer.reset(token)


def require_observable(model_class: type | None, name: str) -> None:
    """Refuse a model whose attention cannot be observed, before its weights are loaded.

    Args:
        model_class: transformers' class; None where unknown (remote code), which then shows at the
            first reading.
        name: of the model, for the message.

    Raises:
        ModelError: it cannot.
    """
    if model_class is None or cast(Any, model_class)._can_set_attn_implementation():
        return
    raise ModelError(
        f"loss.retriever adist: the attention of {name} ({model_class.__name__}) cannot be "
        "observed; set loss.retriever to pdist, emdr2 or loop"
    )


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Each modeling file has an eager attention of its own, with what is peculiar to the model.
    eager = sys.modules[type(module).__module__].eager_attention_forward
    output, weights = eager(module, query, key, value, attention_mask, **options)
    observer = _observer.get()
    if observer is not None:
        observer.look(module, weights, value)
    return output, weights
