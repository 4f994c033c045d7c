"""From a generator's logits to what the losses take of each token of an answer."""

from __future__ import annotations

import torch

from pixelrag.errors import ModelError
from pixelrag.losses.rag_objective import Vocabulary


def token_scores(
    logits_NTV: torch.Tensor,
    target_NT: torch.Tensor,
    mask_NT: torch.Tensor,
    vocabulary: Vocabulary = "none",
) -> torch.Tensor:
    """log softmax(logits) of each target, and of the whole vocabulary where that is wanted.

    Args:
        logits_NTV: floating point.
        target_NT: int64; anything at padding.
        mask_NT: 1 for real tokens.
        vocabulary: what stands behind each target's log-probability: nothing, the ``sum`` of those
            of all V entries, or ``all`` of them.

    Returns:
        [N, T * W], token after token, W = 1, 2 or 1 + V; 0 at padding; at least float32, autocast
        or not.

    Raises:
        ModelError: a target token is outside the vocabulary.
    """
    with torch.autocast(logits_NTV.device.type, enabled=False):
        wide = torch.promote_types(logits_NTV.dtype, torch.float32)
        real_NT = mask_NT.bool()
        target_NT = target_NT.masked_fill(~real_NT, 0)
        size = logits_NTV.shape[-1]
        if target_NT.numel() and int(target_NT.max()) >= size:
            raise ModelError(
                f"target token {int(target_NT.max())} is outside the generator's vocabulary of "
                f"{size}"
            )
        chosen_NT1 = logits_NTV.gather(-1, target_NT[..., None]).to(wide)
        norm_NT1 = torch.logsumexp(logits_NTV.to(wide), -1, keepdim=True)
        scores_NTW = chosen_NT1 - norm_NT1
        if vocabulary != "none":
            every_NTV = logits_NTV.to(wide) - norm_NT1
            more = every_NTV if vocabulary == "all" else every_NTV.sum(-1, keepdim=True)
            scores_NTW = torch.cat([scores_NTW, more], -1)
        return scores_NTW.masked_fill(~real_NT[..., None], 0.0).flatten(1)
