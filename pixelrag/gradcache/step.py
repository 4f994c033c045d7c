"""GradCache over any engine (Gao et al. 2021, arXiv:2101.06983, section 3).

1. Every chunk runs forward without a graph; its embedding and the random state before it are
   kept. Memory: one chunk, whatever the batch.
2. Documents are gathered over all ranks, each rank computes the loss of its own queries (a
   partial sum of the global loss), and backpropagates to the embeddings only.
3. Every chunk whose graph was not kept (see `keep`) runs forward again, with a graph and with its
   own random state, and all go backward from the surrogate <embedding, kept gradient>. By the
   chain rule the parameter gradients are those of the whole batch at once. The engine reduces them
   over ranks in the very last backward.

The order of the calls is the same on all ranks; see `schedule`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from pixelrag.distributed.collectives import agree_max, sum_over_ranks
from pixelrag.engine.base import Engine
from pixelrag.gradcache.columns import Exchange, columns_of
from pixelrag.gradcache.keep import Keeper
from pixelrag.gradcache.replay import Pass, collect, first_pass, hand_back, second_pass
from pixelrag.gradcache.schedule import Chunk, Side, agree_on_schedule, rows_of, side_of_fixed
from pixelrag.losses.contrastive import EmbeddedBatch, Objective, contrastive_loss
from pixelrag.losses.temperature import scale_and_bias


@dataclass(frozen=True, slots=True)
class Pairs:
    """What is known of one rank's documents.

    Attributes:
        positive_BK: [B, K] int64, for each query the rows of its positives among this
            rank's documents, filled with -1.
        content_M: [M] int64 of 0 or more, equal where documents have equal content, on any rank:
            such a document is no negative of a query whose positive it equals. None: all differ.
        guide: embeddings of queries [B, G] and documents [M, G] by a frozen second encoder, or
            None; see `losses.tiles`.
    """

    positive_BK: torch.Tensor
    content_M: torch.Tensor | None = None
    guide: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Figures of one global batch, equal on all ranks."""

    loss: float
    accuracy: float
    num_queries: int
    num_tokens: int
    scale: float
    bias: float | None = None  # of siglip
    num_kept_chunks: int = 0  # of this rank's forwards, those whose graph stayed
    # Rows of this rank whose embeddings hold NaN or infinity; looked for when the loss does.
    bad_queries: tuple[int, ...] = ()
    bad_documents: tuple[int, ...] = ()

    @property
    def is_finite(self) -> bool:
        """Whether the loss is a number; if not, no gradient was computed."""
        return math.isfinite(self.loss)


def gradcache_step(
    engine: Engine,
    query_chunks: list[Chunk],
    document_chunks: list[Chunk] | torch.Tensor,
    pairs: Pairs | torch.Tensor,
    *,
    num_real_queries: int | None = None,
    weight: float = 1.0,
    last: bool = True,
    objective: Objective | None = None,
    exchange: Exchange = "all_gather",
    keeper: Keeper | None = None,
) -> StepResult:
    """Accumulate the exact gradient of one global batch.

    Args:
        engine: its module answers ``engine(role, touch_vision=..., **chunk)`` with
            ``(embedding_BD, log_scale)`` for the roles ``query`` and ``document``; see
            `losses.temperature` for the latter.
        query_chunks: this rank's query inputs in chunks, on any device.
        document_chunks: this rank's positives and hard negatives in chunks, in any order; or their
            embeddings [M, D], which are fixed then: they have no forward and no gradient. Of either
            kind on all ranks.
        pairs: what this rank's documents are; or, where each query has one positive, its row [B].
        num_real_queries: rows that count; 0 on a rank that brings only a filler row. All ranks
            must be told alike whether a rank fills. None: all rows count.
        weight: factor on the loss, 1 / accumulation steps.
        last: whether this is the last batch before ``engine.step``.
        objective: the loss; None = plain InfoNCE.
        exchange: how ranks see each other's documents; see `gradcache.columns`.
        keeper: says which chunks keep their graph; one for all steps. None: every chunk runs twice.

    Returns:
        The global loss (unweighted), in-batch accuracy, number of queries and similarity scale.
        A loss that is not finite is returned, not raised; no gradient is computed then, and the
        engine is left as it was.
    """
    own_queries = sum(map(rows_of, query_chunks))
    fixed_MD = document_chunks if isinstance(document_chunks, torch.Tensor) else None
    own_documents = sum(map(rows_of, document_chunks)) if fixed_MD is None else len(fixed_MD)
    own = (0, 0) if num_real_queries == 0 else (own_queries, own_documents)
    running = {"query": query_chunks}
    if not isinstance(document_chunks, torch.Tensor):
        running["document"] = document_chunks
    sides = agree_on_schedule(
        running,
        own[: len(running)],
        rank=engine.rank,
        touches_every_chunk=engine.touches_every_chunk,
    )
    keeper = keeper or Keeper()
    num_kept = keeper.num_kept(engine, sides)
    passes, log_scale = first_pass(engine, sides, num_kept=num_kept)
    queries = sides[0]
    documents = sides[1] if fixed_MD is None else side_of_fixed("document", own[1])
    if isinstance(pairs, torch.Tensor):
        pairs = Pairs(pairs[:, None])
    result, scale_gradient = _loss_on_embeddings(
        engine, passes, queries, documents, fixed_MD, pairs, log_scale, weight,
        objective or Objective(), exchange,
    )  # fmt: skip
    if result.is_finite:
        second_pass(engine, passes, scale_gradient, last=last, keeper=keeper)
    return dataclasses.replace(result, num_kept_chunks=num_kept)


def _loss_on_embeddings(
    engine: Engine,
    passes: list[Pass],
    queries: Side,
    documents: Side,
    fixed_MD: torch.Tensor | None,
    pairs: Pairs,
    log_scale: torch.Tensor,
    weight: float,
    objective: Objective,
    exchange: Exchange,
) -> tuple[StepResult, torch.Tensor]:
    query_BD = collect(passes, queries)
    document_MD = collect(passes, documents) if fixed_MD is None else fixed_MD.to(query_BD)
    log_scale.requires_grad_()
    scale, bias = scale_and_bias(log_scale)
    num_queries = sum(queries.num_rows)
    batch = _everyone(
        engine, queries, documents, query_BD, document_MD, pairs,
        bidirectional=objective.bidirectional, exchange=exchange,
    )  # fmt: skip
    partial = contrastive_loss(objective, batch, scale, bias, num_queries=num_queries)
    sums = sum_over_ranks(torch.stack([partial.loss, partial.num_correct]).double()).tolist()
    result = StepResult(
        loss=sums[0],
        accuracy=sums[1] / num_queries,
        num_queries=num_queries,
        num_tokens=queries.num_tokens + documents.num_tokens,
        scale=float(scale.detach()),
        bias=None if bias is None else float(bias.detach()),
    )
    if not result.is_finite:
        bad = [_bad_rows(side_MD) for side_MD in (query_BD, document_MD)]
        result = dataclasses.replace(result, bad_queries=bad[0], bad_documents=bad[1])
    if result.is_finite:
        (partial.loss * weight).backward()
        hand_back(passes, queries, query_BD.grad)
        hand_back(passes, documents, document_MD.grad)
    gradient = log_scale.grad if log_scale.grad is not None else torch.zeros_like(log_scale)
    return result, gradient


def _bad_rows(rows_MD: torch.Tensor) -> tuple[int, ...]:
    return tuple((~torch.isfinite(rows_MD).all(dim=1)).nonzero().flatten().tolist())


def _everyone(
    engine: Engine,
    queries: Side,
    documents: Side,
    query_BD: torch.Tensor,
    document_MD: torch.Tensor,
    pairs: Pairs,
    *,
    bidirectional: bool,
    exchange: Exchange,
) -> EmbeddedBatch:
    """Lay this rank's part of the global batch beside the others'; a collective."""
    own_queries, own_documents = queries.num_rows[engine.rank], documents.num_rows[engine.rank]
    positive_BK = pairs.positive_BK[:own_queries].to(engine.device)
    guide_query, guide_document = pairs.guide or (None, None)
    ids_M1 = None
    if pairs.content_M is not None:
        ids_M1 = pairs.content_M.to(engine.device)[:own_documents, None]
    everyone, start = columns_of(engine, documents, document_MD, ids_M1, guide_document, exchange)
    positive_BK = positive_BK.where(positive_BK < 0, positive_BK + start)
    asking = None
    if bidirectional:
        (width,) = agree_max([positive_BK.shape[1]])
        ids_BK = everyone.ids_of(positive_BK)
        ids_BK = torch.nn.functional.pad(ids_BK, (0, width - ids_BK.shape[1]), value=-2)
        asking, _ = columns_of(engine, queries, query_BD, ids_BK, guide_query, exchange)
    return EmbeddedBatch(
        query_BD[:own_queries],
        positive_BK,
        everyone,
        asking,
        None if guide_query is None else guide_query[:own_queries],
    )
