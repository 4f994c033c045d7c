"""InfoNCE over a global batch, as one rank's partial sum.

    loss = 1/N * sum_i -log softmax_j(scale * <q_i, d_j>)[positive(i)]

(van den Oord et al. 2018, equation 4), with every document of every rank as a candidate. A rank
computes the terms of its own queries and divides by the global N, so that summing over ranks
gives the loss and, with summed gradients, the gradient of one process with the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class InfoNCE:
    """What one rank contributes: scalars that sum over ranks."""

    loss: torch.Tensor
    num_correct: torch.Tensor


def info_nce(
    query_BD: torch.Tensor,
    document_ND: torch.Tensor,
    positive_B: torch.Tensor,
    scale: torch.Tensor,
    *,
    num_queries: int,
    is_document_N: torch.Tensor | None = None,
) -> InfoNCE:
    """Compute this rank's share of the InfoNCE loss.

    Args:
        query_BD: [B, D] this rank's normalised queries.
        document_ND: [N, D] the documents of all ranks.
        positive_B: [B] int64, the row of ``document_ND`` that answers each query.
        scale: [1] or scalar, 1 / temperature.
        num_queries: queries of all ranks together; the divisor.
        is_document_N: [N] bool, False for rows that only pad; None when there are none.

    Returns:
        The partial loss and the number of queries whose positive scores highest (ties lose),
        both in fp32, or fp64 when the embeddings are.
    """
    dtype = torch.promote_types(torch.promote_types(query_BD.dtype, scale.dtype), torch.float32)
    # Under autocast a matmul would round similarities to bf16: 42 % gradient error at scale 100.
    with torch.autocast(query_BD.device.type, enabled=False):
        logits_BN = (query_BD.to(dtype) @ document_ND.to(dtype).T) * scale.to(dtype)
        if is_document_N is not None:
            logits_BN = logits_BN.masked_fill(~is_document_N, float("-inf"))
        loss = F.cross_entropy(logits_BN, positive_B, reduction="sum") / num_queries
    with torch.no_grad():
        best_B1 = logits_BN.gather(1, positive_B[:, None])
        others_BN = logits_BN.scatter(1, positive_B[:, None], float("-inf"))
        num_correct = (best_B1 > others_BN.amax(1, keepdim=True)).sum().to(dtype)
    return InfoNCE(loss, num_correct)
