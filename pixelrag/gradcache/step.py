"""GradCache over any engine (Gao et al. 2021, arXiv:2101.06983, section 3).

1. Every chunk runs forward without a graph; its embedding and the random state before it are
   kept. Memory: one chunk, whatever the batch.
2. Documents are gathered over all ranks, each rank computes the loss of its own queries (a
   partial sum of the global loss), and backpropagates to the embeddings only.
3. Every chunk runs forward again, with a graph and with its own random state, and backward from
   the surrogate <embedding, kept gradient>. By the chain rule the parameter gradients are those
   of the whole batch at once. The engine reduces them over ranks in the very last backward.

The order of the calls is the same on all ranks; see `schedule`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pixelrag.distributed.collectives import sum_over_ranks
from pixelrag.engine.base import Engine
from pixelrag.gradcache.replay import collect, forward_without_graph, hand_back, replay
from pixelrag.gradcache.schedule import Chunk, Side, agree_on_schedule, rows_of
from pixelrag.losses.infonce import InfoNCE, info_nce
from pixelrag.losses.temperature import scale_from_log

Objective = Callable[..., InfoNCE]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Figures of one global batch, equal on all ranks."""

    loss: float
    accuracy: float
    num_queries: int
    num_tokens: int
    scale: float
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
    document_chunks: list[Chunk],
    positive_B: torch.Tensor,
    *,
    num_real_queries: int | None = None,
    weight: float = 1.0,
    last: bool = True,
    objective: Objective = info_nce,
) -> StepResult:
    """Accumulate the exact gradient of one global batch.

    Args:
        engine: its module answers ``engine(role, touch_vision=..., **chunk)`` with
            ``(embedding_BD, log_scale_1)`` for the roles ``query`` and ``document``.
        query_chunks: this rank's query inputs in chunks, on any device.
        document_chunks: this rank's positives and hard negatives in chunks, in any order.
        positive_B: [B] int64, for each query the row of its positive among this rank's documents.
        num_real_queries: rows that count; 0 on a rank that brings only a filler row. All ranks
            must be told alike whether a rank fills. None: all rows count.
        weight: factor on the loss, 1 / accumulation steps.
        last: whether this is the last batch before ``engine.step``.
        objective: the loss; see ``losses.infonce.info_nce`` for its arguments.

    Returns:
        The global loss (unweighted), in-batch accuracy, number of queries and similarity scale.
        A loss that is not finite is returned, not raised; no gradient is computed then, and the
        engine is left as it was.
    """
    own_queries = sum(map(rows_of, query_chunks))
    own_documents = sum(map(rows_of, document_chunks))
    fills = num_real_queries == 0
    queries, documents = agree_on_schedule(
        {"query": query_chunks, "document": document_chunks},
        (0, 0) if fills else (own_queries, own_documents),
        rank=engine.rank,
        touches_every_chunk=engine.touches_every_chunk,
    )
    passes, log_scale = forward_without_graph(engine, [queries, documents])
    result, scale_gradient = _loss_on_embeddings(
        engine, passes, queries, documents, positive_B, log_scale, weight, objective
    )
    if result.is_finite:
        replay(engine, passes, scale_gradient, last=last)
    return result


def _loss_on_embeddings(
    engine, passes, queries, documents, positive_B, log_scale, weight, objective
) -> tuple[StepResult, torch.Tensor]:
    query_BD = collect(passes, queries)
    document_MD = collect(passes, documents)
    log_scale.requires_grad_()
    real_queries = queries.num_rows[engine.rank]
    width = documents.max_rows
    padded = torch.nn.functional.pad(document_MD, (0, 0, 0, width - len(document_MD)))
    gathered_ND = engine.gather(padded[:width])
    is_document_N = _real_rows(documents, engine.device)
    num_queries = sum(queries.num_rows)
    partial = objective(
        query_BD[:real_queries],
        gathered_ND,
        positive_B[:real_queries].to(engine.device) + engine.rank * width,
        scale_from_log(log_scale),
        num_queries=num_queries,
        is_document_N=None if is_document_N.all() else is_document_N,
    )
    sums = sum_over_ranks(torch.stack([partial.loss, partial.num_correct]).double()).tolist()
    result = StepResult(
        loss=sums[0],
        accuracy=sums[1] / num_queries,
        num_queries=num_queries,
        num_tokens=queries.num_tokens + documents.num_tokens,
        scale=float(scale_from_log(log_scale.detach())),
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


def _real_rows(documents: Side, device: torch.device) -> torch.Tensor:
    columns = torch.arange(documents.max_rows, device=device)
    sizes = torch.tensor(documents.num_rows, device=device)
    return (columns[None, :] < sizes[:, None]).reshape(-1)
