"""The contrastive loss written out query by query: the oracle, which shares no code with `losses`.

It holds all similarities, loops over queries and is meant to be read beside the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pixelrag.losses.contrastive import Objective


def naive_loss(
    objective: Objective,
    query_BD: torch.Tensor,
    document_ND: torch.Tensor,
    positives: Sequence[Sequence[int]],
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    content: Sequence[int] | None = None,
    guide_BN: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mean loss of a whole global batch, a scalar.

    Args:
        objective: what to compute.
        query_BD, document_ND: normalised embeddings, float64 for an oracle.
        positives: for each query the documents that answer it.
        scale, bias: [1].
        content: equal numbers for documents of equal content; None = all differ.
        guide_BN: similarities by a guide.
    """
    content = list(range(len(document_ND))) if content is None else content
    total, whole = query_BD.new_zeros(()), query_BD.shape[1]
    for dim, weight in ({whole: 1.0} | dict(objective.matryoshka)).items():
        query, document = query_BD, document_ND
        if dim < whole:
            query = F.normalize(query_BD[:, :dim], dim=1)
            document = F.normalize(document_ND[:, :dim], dim=1)
        masks = _masks(objective, query @ document.T, positives, content, guide_BN)
        terms = _terms(objective, query @ document.T, positives, masks, scale, bias)
        total = total + weight * torch.stack(terms).sum() / len(query_BD)
    return total


def _masks(objective, similarity_BN, positives, content, guide_BN) -> list[torch.Tensor]:
    """What is a negative: of each query [N], then, for each pair in turn, of its document [B]."""
    of_queries, of_documents = [], []
    answers = [{content[p] for p in found} for found in positives]
    for i, found in enumerate(positives):
        others = torch.tensor([c not in answers[i] for c in content])
        for values, margin in ((similarity_BN, objective.mask_margin), (guide_BN, 0.0)):
            if values is not None and margin is not None:
                others &= values[i] <= max(values[i, p] for p in found) + margin
        of_queries.append(others)
        for p in found:
            asking = torch.tensor([content[p] not in known for known in answers])
            for values, margin in ((similarity_BN, objective.mask_margin), (guide_BN, 0.0)):
                if values is not None and margin is not None:
                    asking &= values[:, p] <= values[i, p] + margin
            of_documents.append(asking)
    return [*of_queries, *of_documents]


def _terms(objective, similarity_BN, positives, masks, scale, bias) -> list[torch.Tensor]:
    logit_BN = scale * similarity_BN
    harder_BN = logit_BN + objective.hardness_alpha * similarity_BN.detach()
    smoothing, terms = objective.label_smoothing, []
    of_queries, of_documents = masks[: len(positives)], iter(masks[len(positives) :])
    for i, found in enumerate(positives):
        negatives = harder_BN[i, of_queries[i]]
        if objective.name == "siglip":
            for logits, target in ((logit_BN[i, list(found)], 1.0), (negatives, 0.0)):
                targets = torch.full_like(logits, target * (1 - smoothing) + smoothing / 2)
                loss = F.binary_cross_entropy_with_logits(logits + bias, targets, reduction="sum")
                terms.append(loss)
            continue
        for p in found:
            ways = [negatives]
            if objective.bidirectional:
                ways.append(harder_BN[next(of_documents), p])
            for others in ways:
                logits = torch.cat([logit_BN[i, p, None], others])
                loss = F.cross_entropy(logits, torch.tensor(0), label_smoothing=smoothing)
                terms.append(loss / len(found) / len(ways))
    return terms
