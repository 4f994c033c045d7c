"""From token states to one vector: mean, cls and last-token pooling."""

from __future__ import annotations

from typing import Literal

import torch

PoolingMode = Literal["mean", "cls", "last"]
POOLING_MODES: tuple[PoolingMode, ...] = ("mean", "cls", "last")


def pool(hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, mode: PoolingMode) -> torch.Tensor:
    """Pool real tokens only; the attention mask says which are real, on either padding side.

    Args:
        hidden_BTD: floating point. Padded positions may hold anything, NaN included.
        mask_BT: 1 for real tokens; each row has at least one.
        mode: "mean" of all real tokens, "cls" the first real one, "last" the last real one.

    Returns:
        [B, D] of the dtype of `hidden_BTD`.

    Raises:
        ValueError: unknown mode.
    """
    real_BT = mask_BT.bool()
    if mode == "mean":
        summed_BD = hidden_BTD.masked_fill(~real_BT[..., None], 0).sum(1)
        return summed_BD / real_BT.sum(1, keepdim=True)
    length = mask_BT.shape[1]
    position_T = torch.arange(length, device=mask_BT.device)
    if mode == "cls":
        index_B = torch.where(real_BT, position_T, length - 1).amin(1)
    elif mode == "last":
        index_B = torch.where(real_BT, position_T, 0).amax(1)
    else:
        raise ValueError(f"pooling {mode!r}: expected one of {', '.join(POOLING_MODES)}")
    return hidden_BTD[torch.arange(len(index_B), device=index_B.device), index_B]


def embeddings(
    hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, mode: PoolingMode, *, normalize: bool = True
) -> torch.Tensor:
    """Pool and divide by the Euclidean norm (no epsilon), in at least float32.

    Autocast is off inside: a bf16 sum over a few hundred tokens keeps two digits.

    Returns:
        emb_BD, of unit norm where `normalize`; float64 where `hidden_BTD` is, else float32.
    """
    with torch.autocast(hidden_BTD.device.type, enabled=False):
        wide = hidden_BTD if hidden_BTD.dtype == torch.float64 else hidden_BTD.float()
        pooled_BD = pool(wide, mask_BT, mode)
        return pooled_BD / pooled_BD.norm(dim=1, keepdim=True) if normalize else pooled_BD
