"""The contrastive job's loss over a global batch, as one rank's partial sum.

With s_ij = <q_i, d_j> of normalised embeddings, a query's positives P_i, its negatives N_i (every
other document of the global batch that no mask takes out) and logits z_ij = s_ij / temperature,
where negatives add alpha sg(s_ij) (LLaVE; Lan et al. 2025, equation 5; sg stops the gradient)::

    InfoNCE   1/B sum_i 1/|P_i| sum_p  log(exp z_ip + sum_n exp z_in) - z_ip
    SigLIP    1/B sum_i  sum_p log(1 + exp -(z_ip + b)) + sum_n log(1 + exp(z_in + b))

(van den Oord et al. 2018, equation 4; Zhai et al. 2023, equation 1). Positives of one query do not
compete with each other: each is classified against the negatives alone, so that the loss of a
perfect model is 0 however many there are (in Khosla et al. 2020, equation 2, it is
``log |P_i|``).

A rank computes the terms of its own queries and divides by the global B, so that summing over
ranks gives the loss and, with summed gradients, the gradient of one process with the whole batch.
All sums over columns come from `losses.tiles`; what is here works on vectors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from pixelrag.losses.tiles import Columns, Rows, RowSums, row_sums


@dataclass(frozen=True, slots=True)
class Objective:
    """What is minimised; `config.contrastive_loss` says what each option means.

    Attributes:
        matryoshka: (dimensions, weight) of every prefix that is trained beside the whole; the
            whole has weight 1 unless it is named.
    """

    name: Literal["infonce", "siglip"] = "infonce"
    hardness_alpha: float = 0.0
    label_smoothing: float = 0.0
    bidirectional: bool = False
    matryoshka: tuple[tuple[int, float], ...] = ()
    mask_margin: float | None = None
    tile_size: int | None = None


@dataclass(frozen=True, slots=True)
class EmbeddedBatch:
    """One rank's queries, and everything that they compete with.

    Attributes:
        query_BD: [B, D] its normalised queries.
        positive_BK: [B, K] int64, the rows of ``documents.emb_CD`` that answer each query, filled
            with -1.
        documents: of all ranks.
        queries: of all ranks, where the loss is bidirectional; the ids of a query are those of its
            positives.
        guide_BG: its queries by a guide, where ``documents`` have such embeddings.
    """

    query_BD: torch.Tensor
    positive_BK: torch.Tensor
    documents: Columns
    queries: Columns | None = None
    guide_BG: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PartialLoss:
    """What one rank contributes: scalars that sum over ranks.

    Attributes:
        loss: the partial loss.
        num_correct: queries with a positive that is more similar than all negatives (ties lose).
    """

    loss: torch.Tensor
    num_correct: torch.Tensor


def whole_batch(
    query_BD: torch.Tensor,
    document_ND: torch.Tensor,
    positive_BK: torch.Tensor,
    ids_N: torch.Tensor | None = None,
    guide: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> EmbeddedBatch:
    """The batch of one process that holds all of it.

    Args:
        query_BD, document_ND: normalised embeddings.
        positive_BK: [B] or [B, K], see `EmbeddedBatch`.
        ids_N: [N] int64 of 0 or more, equal for documents of equal content; None = all differ.
        guide: embeddings of queries [B, G] and documents [N, G] by a guide, or None.
    """
    guide_BG, guide_NG = guide or (None, None)
    if positive_BK.dim() == 1:
        positive_BK = positive_BK[:, None]
    if ids_N is None:
        ids_N = torch.arange(len(document_ND), device=document_ND.device)
    documents = Columns(document_ND, ids_N[None, :, None], guide_CG=guide_NG)
    queries = Columns(query_BD, documents.ids_of(positive_BK)[None], guide_CG=guide_BG)
    return EmbeddedBatch(query_BD, positive_BK, documents, queries, guide_BG)


def contrastive_loss(
    objective: Objective,
    batch: EmbeddedBatch,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    num_queries: int,
) -> PartialLoss:
    """Compute this rank's share of the loss; a collective where columns rotate, backward too.

    Args:
        objective: what to compute.
        batch: what this rank brings and sees.
        scale: [1], 1 / temperature.
        bias: [1], of siglip; None for infonce.
        num_queries: queries of all ranks together; the divisor.

    Returns:
        Both in fp32, or fp64 when the embeddings are: under autocast a matmul would round
        similarities to bf16, a gradient error of 42 % at scale 100.

    Raises:
        ValueError: a Matryoshka prefix is longer than the embeddings.
    """
    query_BD = batch.query_BD
    dtype = torch.promote_types(torch.promote_types(query_BD.dtype, scale.dtype), torch.float32)
    whole = query_BD.shape[1]
    weights = {whole: 1.0} | dict(objective.matryoshka)
    if max(weights) > whole:
        raise ValueError(
            f"loss.matryoshka_dims: got {max(weights)}, the embeddings have {whole} dimensions"
        )
    with torch.autocast(query_BD.device.type, enabled=False):
        scale, bias = scale.to(dtype), None if bias is None else bias.to(dtype)
        batch = _map_embeddings(batch, lambda emb: emb.to(dtype))
        result = _of_one_length(objective, batch, scale, bias)
        loss = result.loss * weights.pop(whole)
        for dim, weight in weights.items():
            prefix = _map_embeddings(batch, partial(_prefix, dim=dim))
            loss = loss + weight * _of_one_length(objective, prefix, scale, bias).loss
    return PartialLoss(loss / num_queries, result.num_correct)


def _of_one_length(
    objective: Objective, batch: EmbeddedBatch, scale: torch.Tensor, bias: torch.Tensor | None
) -> PartialLoss:
    """The loss of embeddings of one length, not yet divided by the number of queries."""
    documents, num_queries = batch.documents, len(batch.query_BD)
    query_K, slot_K = (batch.positive_BK >= 0).nonzero(as_tuple=True)
    document_K = batch.positive_BK[query_K, slot_K]
    positive_KD = documents.emb_CD.index_select(0, document_K)
    similarity_K = torch.linalg.vecdot(batch.query_BD.index_select(0, query_K), positive_KD)
    logit_K = similarity_K * scale if bias is None else similarity_K * scale + bias
    share_K = 1.0 / torch.bincount(query_K, minlength=num_queries)[query_K].to(logit_K.dtype)
    by_guide_K = None
    if documents.guide_CG is not None:
        assert batch.guide_BG is not None  # a guide encodes both sides
        by_guide_K = torch.linalg.vecdot(batch.guide_BG[query_K], documents.guide_CG[document_K])

    def highest(value_K: torch.Tensor) -> torch.Tensor:
        lowest_B = value_K.new_full((num_queries,), -torch.inf)
        return lowest_B.scatter_reduce(0, query_K, value_K.detach(), "amax")

    best_B, margin = highest(similarity_K), objective.mask_margin
    rows = Rows(
        batch.query_BD,
        documents.ids_of(batch.positive_BK, fill=-1),
        None if margin is None else best_B + margin,
        batch.guide_BG,
        None if by_guide_K is None else highest(by_guide_K),
    )
    sums = _sums(objective, rows, documents, scale, bias)
    loss = _sum_of_terms(objective, sums, query_K, logit_K, share_K)
    with torch.no_grad():
        # Compared as `best_R` is made; the order is that of the similarities.
        best_B = best_B * (scale + objective.hardness_alpha)
        num_correct = ((best_B if bias is None else best_B + bias) > sums.best_R).sum()
    if objective.bidirectional:
        assert batch.queries is not None  # see `EmbeddedBatch`
        rows = Rows(
            positive_KD,
            documents.ids_of(document_K[:, None]),
            None if margin is None else similarity_K.detach() + margin,
            None if documents.guide_CG is None else documents.guide_CG[document_K],
            by_guide_K,
        )
        sums = _sums(objective, rows, batch.queries, scale, bias)
        own_K = torch.arange(len(document_K), device=document_K.device)
        loss = (loss + _sum_of_terms(objective, sums, own_K, logit_K, share_K)) / 2
    return PartialLoss(loss, num_correct.to(logit_K.dtype))


def _sums(
    objective: Objective,
    rows: Rows,
    columns: Columns,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> RowSums:
    return row_sums(
        rows,
        columns,
        scale,
        bias,
        kind="softmax" if objective.name == "infonce" else "sigmoid",
        hardness=objective.hardness_alpha,
        with_sums=objective.label_smoothing > 0,
        tile_size=objective.tile_size,
    )


def _sum_of_terms(
    objective: Objective,
    sums: RowSums,
    row_K: torch.Tensor,
    logit_K: torch.Tensor,
    share_K: torch.Tensor,
) -> torch.Tensor:
    """Join positives and negatives: the sum over rows, before any division.

    Label smoothing is that of Szegedy et al. 2016, section 7: the target gives its share evenly to
    all classes, which are a positive and its negatives, or the two answers of a sigmoid.
    """
    smoothing = objective.label_smoothing
    if objective.name == "siglip":
        negatives = (sums.reduced_R - smoothing / 2 * sums.sum_R).sum()
        return negatives + (smoothing / 2 * logit_K - F.logsigmoid(logit_K)).sum()
    rest_K = sums.reduced_R[row_K]
    term_K = -F.logsigmoid(logit_K - rest_K)
    if smoothing:
        mean_K = (logit_K + sums.sum_R[row_K]) / (1 + sums.count_R[row_K])
        even_K = torch.logaddexp(logit_K, rest_K) - mean_K
        term_K = (1 - smoothing) * term_K + smoothing * even_K
    return (share_K * term_K).sum()


def _prefix(emb_MD: torch.Tensor, dim: int) -> torch.Tensor:
    """The first ``dim`` dimensions, normalised anew (Kusupati et al. 2022, section 3)."""
    return F.normalize(emb_MD[:, :dim], dim=-1)


def _map_embeddings(
    batch: EmbeddedBatch, change: Callable[[torch.Tensor], torch.Tensor]
) -> EmbeddedBatch:
    queries = batch.queries
    return dataclasses.replace(
        batch,
        query_BD=change(batch.query_BD),
        documents=dataclasses.replace(batch.documents, emb_CD=change(batch.documents.emb_CD)),
        queries=queries and dataclasses.replace(queries, emb_CD=change(queries.emb_CD)),
    )
