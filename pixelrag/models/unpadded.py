"""Real tokens without their padding: the rows of a batch, one behind the other, as a single row.

Every layer then computes real tokens only, and attention goes row by row (`models.attention`).
Whether an architecture can do that shows when it is tried: see `try_out`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pixelrag.errors import ModelError
from pixelrag.models.attention import document_attention, varlen_obstacle

logger = logging.getLogger("pixelrag")

States = Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]

UNPADDED = "pixelrag_unpadded"
"""Its name among transformers' attention implementations."""

# Rows of the self-test, in tokens: of unlike length, of equal ones, and of a single token.
_LENGTHS = (7, 1, 4, 8, 4, 2)
# Relative L2 difference of final states: rounding of a few dozen layers. A row that sees another,
# or counts its positions from elsewhere, differs by far more.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.03}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the N real tokens of padded rows [B, T] lie, and how they are lined up.

    Attributes:
        index_N: int64, place of each among the flattened rows.
        position_N: int64, place of each among the real tokens of its own row.
        cu_seqlens: where rows begin and end among the N, 0 to N, int32.
        max_length: tokens of the longest row.
        shape: (B, T).
    """

    index_N: torch.Tensor
    position_N: torch.Tensor
    cu_seqlens: torch.Tensor
    max_length: int
    shape: tuple[int, int]

    @classmethod
    def of(cls, mask_BT: torch.Tensor, *, keep_order: bool = False) -> Layout:
        """Line up what the mask says is real, on whichever side the padding stands.

        Args:
            mask_BT: 1 for real tokens.
            keep_order: rows stay in their order (that of their images); otherwise rows of one
                length become neighbours, which attention takes together.
        """
        real_BT = mask_BT.cpu().bool()
        length_B = real_BT.sum(1)
        if not keep_order:
            order_B = length_B.argsort(stable=True)
            length_B, real_BT = length_B[order_B], real_BT[order_B]
        place_BT = torch.arange(real_BT.numel()).view(real_BT.shape)
        index_N = (place_BT if keep_order else place_BT[order_B])[real_BT]
        position_N = (real_BT.cumsum(1) - 1)[real_BT]
        cu_seqlens = torch.nn.functional.pad(length_B.cumsum(0), (1, 0)).int()
        rows, length = mask_BT.shape
        return cls(
            index_N.to(mask_BT.device),
            position_N.to(mask_BT.device),
            cu_seqlens.to(mask_BT.device),
            int(length_B.max()),
            (rows, length),
        )

    def take(self, rows_BT: torch.Tensor) -> torch.Tensor:
        """Real tokens of [..., B, T] as one row, [..., 1, N]."""
        return rows_BT.flatten(-2)[..., self.index_N].unsqueeze(-2)

    def spread(self, hidden_1ND: torch.Tensor) -> torch.Tensor:
        """States put back into rows, [B, T, D], with zeros at padding."""
        batch, length = self.shape
        rows = hidden_1ND.new_zeros(batch * length, hidden_1ND.shape[-1])
        return rows.index_copy(0, self.index_N, hidden_1ND[0]).unflatten(0, (batch, length))

    def attention_arguments(self, implementation: str) -> dict[str, Any]:
        """What tells the attention where rows begin and end."""
        # A mask of four dimensions passes for a finished one, so that transformers makes none of
        # the size N x N; flash attention makes none anyway.
        ready = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.index_N.device)
        return {
            "attention_mask": ready if implementation == UNPADDED else None,
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_length,
            "max_length_k": self.max_length,
        }


def prepare(model: PreTrainedModel, *, takes_positions: bool, required: bool) -> bool:
    """Let a loaded model take rows without padding, if its kind allows; padded ones go as before.

    Args:
        model: the transformers model itself, of text.
        takes_positions: it lets itself be told the position of each token.
        required: the user insists.

    Raises:
        ModelError: it does not allow it, and it is required.
    """
    implementation = model.config._attn_implementation
    known = type(model).__module__.startswith("transformers.")
    obstacle = varlen_obstacle(type(model) if known else None, model.config)
    if implementation not in ("sdpa", "flash_attention_2"):
        obstacle = f"the model runs on {implementation} attention"
    elif not takes_positions:
        obstacle = f"{type(model).__name__} takes no position ids"
    if obstacle is not None:
        return _stay_padded(obstacle, required)
    if implementation == "sdpa":
        AttentionInterface.register(UNPADDED, _attend)
        AttentionMaskInterface.register(UNPADDED, sdpa_mask)
        model.set_attn_implementation(UNPADDED)
    return True


def try_out(model: PreTrainedModel, states: States, *, required: bool) -> bool:
    """Run a few random rows padded and unpadded, and say in a log line what will be done.

    A collective where parameters are sharded: every rank runs the same two forwards.

    Args:
        model: as given to `prepare`.
        states: ``states(ids_BT, mask_BT, unpadded)``, the final states [B, T, D].
        required: the user insists.

    Returns:
        Whether real tokens have the same states either way, to rounding.

    Raises:
        ModelError: they have not, and it is required.
    """
    try:
        difference, precision = _compare(model, states)
    except ModelError as error:
        return _stay_padded(str(error), required)
    tolerance = _TOLERANCES[precision]
    if not difference <= tolerance:
        return _stay_padded(
            "other states without padding in the self-test, relative difference "
            f"{difference:.2g}, tolerance {tolerance:g}",
            required,
        )
    if not required and next(model.parameters()).is_cuda and _many_calls(model, precision):
        # Attention would then be a call for each length of a batch, which no kernel makes up for.
        return _stay_padded(
            "on CUDA attention without padding is one call for bf16 without attention dropout, or "
            "with flash_attention_2",
            required,
        )
    logger.info(
        "model.unpadded: %s computes no padding (self-test: relative difference %.2g)",
        *(type(model).__name__, difference),
    )
    return True


def first_position(model: PreTrainedModel) -> int:
    """The position of a row's first token: RoBERTa and its like count from behind the padding's."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


def _compare(model: PreTrainedModel, states: States) -> tuple[float, torch.dtype]:
    """Relative difference of the real tokens' states, and the precision that they come in."""
    config = model.config.get_text_config()
    mask_BT = torch.arange(max(_LENGTHS)) < torch.tensor(_LENGTHS)[:, None]
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(config.vocab_size - 1, mask_BT.shape, generator=generator)
    # Some models tell padding by its token.
    padding = getattr(config, "pad_token_id", None)
    padding = config.vocab_size - 1 if padding is None else padding
    ids_BT = torch.where(mask_BT, ids_BT + (ids_BT >= padding), padding)
    device = next(model.parameters()).device
    ids_BT, mask_BT = ids_BT.to(device), mask_BT.long().to(device)
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            padded, unpadded = (
                states(ids_BT, mask_BT, without)[mask_BT.bool()] for without in (False, True)
            )
    finally:
        for module, was in training.items():
            module.training = was
    low = torch.is_autocast_enabled(device.type)
    precision = torch.get_autocast_dtype(device.type) if low else padded.dtype
    padded, unpadded = padded.double(), unpadded.double()
    return ((unpadded - padded).norm() / padded.norm()).item(), precision


def _many_calls(model: PreTrainedModel, precision: torch.dtype) -> bool:
    config = model.config.get_text_config()
    if config._attn_implementation != UNPADDED:
        return False
    names = ("attention_probs_dropout_prob", "attention_dropout")
    dropout = max(getattr(config, name, None) or 0.0 for name in names)
    return precision not in (torch.bfloat16, torch.float16) or dropout > 0


def _stay_padded(reason: str, required: bool) -> bool:
    if required:
        raise ModelError(f"model.unpadded true: {reason}. Set model.unpadded to auto or false")
    logger.info("model.unpadded auto: padding is computed along (%s)", reason)
    return False


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return document_attention(
        module, query, key, value, None, cu_seq_lens_q=cu_seq_lens_q, **options
    )
