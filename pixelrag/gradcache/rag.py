"""The exact gradient of one global batch of end-to-end RAG, in the memory of one chunk.

The loss of a question is a function of few numbers: its vector, those of its K documents, and the
log-probabilities of its answer's tokens given each document. So the two passes of GradCache (Gao
et al. 2021, arXiv:2101.06983, section 3) carry over to three models at once: neither the number of
documents nor the batch sets the memory, and the engine reduces once.

    s_bk = <q_b, d_bk> / temperature,   p(z_k | x_b) = softmax_k s_bk   (recomputed, never stale)

The order of the calls is the same on all ranks; see `schedule`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pixelrag.distributed.collectives import exchange, sum_over_ranks
from pixelrag.engine.base import Engine
from pixelrag.gradcache.minibatch import split_batch
from pixelrag.gradcache.rag_batch import RagBatch, split_targets
from pixelrag.gradcache.replay import Pass, collect, first_pass, hand_back, second_pass
from pixelrag.gradcache.schedule import Side, agree_on_schedule, rows_of
from pixelrag.losses.contrastive import EmbeddedBatch, Objective, contrastive_loss
from pixelrag.losses.rag_objective import RagObjective, RagTerms
from pixelrag.losses.temperature import scale_from_log
from pixelrag.losses.tiles import Columns


@dataclass(frozen=True, slots=True)
class RagResult:
    """Figures of one global batch, equal on all ranks but for the rows.

    Attributes:
        loss: what is minimised, a mean over questions.
        answer_loss, retriever_loss, contrastive_loss: its terms, before their weights; the last
            two are 0 where there is no such term.
        num_questions, num_tokens: of all ranks.
        scale: 1 / temperature.
        prior_entropy, posterior_entropy: of p(z|x) and p(z|x,y) over the documents, in nats.
        bad_queries, bad_documents, bad_pairs: rows of this rank that hold NaN or infinity; looked
            for when the loss does.
    """

    loss: float
    answer_loss: float
    retriever_loss: float
    contrastive_loss: float
    num_questions: int
    num_tokens: int
    scale: float
    prior_entropy: float
    posterior_entropy: float
    bad_queries: tuple[int, ...] = ()
    bad_documents: tuple[int, ...] = ()
    bad_pairs: tuple[int, ...] = ()

    @property
    def is_finite(self) -> bool:
        """Whether the loss is a number; if not, no gradient was computed."""
        return math.isfinite(self.loss)


def rag_step(
    engine: Engine,
    batch: RagBatch,
    objective: RagObjective,
    chunk_sizes: Mapping[str, int],
    *,
    trained: Sequence[str],
    weight: float = 1.0,
    last: bool = True,
) -> RagResult:
    """Accumulate the exact gradient of one global batch.

    Args:
        engine: its module answers ``engine(role, touch_vision=..., **chunk)`` with
            ``(output, log_scale_1)``: [rows, D] for ``query`` and ``document``, what the loss takes
            of an answer's tokens [rows, X] for ``generator``, their log-probabilities [rows, T] for
            ``reading``, one number a document that is read for ``attention``.
        batch: this rank's part.
        objective: the loss.
        chunk_sizes: rows of ``query``, ``document`` and ``generator`` that go through at once; sets
            the memory, never the gradient.
        trained: roles with something to train; the others run once, without a graph.
        weight: factor on the loss, 1 / accumulation steps.
        last: whether this is the last batch before ``engine.step``.

    Returns:
        A loss that is not finite is returned, not raised; no gradient is computed then, and the
        engine is left as it was.
    """
    chunks = {
        "query": split_batch(batch.queries, chunk_sizes["query"]),
        "document": split_batch(batch.documents, chunk_sizes["document"]),
        "generator": split_targets(batch.generator, chunk_sizes["generator"]),
    }
    if batch.readings is not None:
        role = "attention" if objective.watches else "reading"
        chunks[role] = split_targets(batch.readings, chunk_sizes["generator"])
    real = [sum(map(rows_of, c)) if batch.num_real else 0 for c in chunks.values()]
    sides = agree_on_schedule(
        chunks, real, rank=engine.rank, touches_every_chunk=engine.touches_every_chunk
    )
    passes, log_scale = first_pass(engine, sides)
    result, scale_gradient = _loss_on_outputs(
        engine, passes, sides, batch, objective, log_scale, weight
    )
    if result.is_finite:
        again = [kept for kept in passes if kept.side.role in trained]
        second_pass(engine, again, scale_gradient, last=last)
    return result


def _loss_on_outputs(
    engine: Engine,
    passes: Sequence[Pass],
    sides: Sequence[Side],
    batch: RagBatch,
    objective: RagObjective,
    log_scale: torch.Tensor,
    weight: float,
) -> tuple[RagResult, torch.Tensor]:
    outputs = {side.role: collect(passes, side) for side in sides}
    log_scale.requires_grad_()
    scale = scale_from_log(log_scale)
    counts = sides[0].num_rows
    real, num_questions = counts[engine.rank], sum(counts)
    pair_BK = batch.pair_BK[:real].to(engine.device)
    terms = objective(
        _scores(outputs, batch, scale)[:real],
        outputs["generator"],
        pair_BK,
        batch.target_mask_BT[:real].to(engine.device),
        readings_NT=outputs.get("reading"),
        attention_BK=_attention(outputs.get("attention"), batch, pair_BK),
    )
    contrastive = _contrastive(engine, outputs, sides[1], batch, real, scale, objective)
    partial = terms.loss_B.sum() / num_questions + objective.contrastive_weight * contrastive
    result = _result(partial, contrastive, terms, sides, num_questions, log_scale)
    if not result.is_finite:
        bad = [_bad_rows(outputs[role]) for role in ("query", "document", "generator")]
        result = dataclasses.replace(
            result, bad_queries=bad[0], bad_documents=bad[1], bad_pairs=bad[2]
        )
    elif partial.requires_grad:
        (partial * weight).backward()
        for side in sides:
            hand_back(passes, side, outputs[side.role].grad)
    gradient = log_scale.grad if log_scale.grad is not None else torch.zeros_like(log_scale)
    return result, gradient


def _scores(
    outputs: Mapping[str, torch.Tensor], batch: RagBatch, scale: torch.Tensor
) -> torch.Tensor:
    """[B, K], -inf where there is no document; at least fp32."""
    query_BD, document_MD = outputs["query"], outputs["document"]
    wide = torch.promote_types(query_BD.dtype, torch.float32)
    document_BK = batch.document_BK.to(query_BD.device)
    # Under autocast a product would be rounded to bf16.
    with torch.autocast(query_BD.device.type, enabled=False):
        chosen_BKD = document_MD.to(wide)[document_BK.clamp_min(0)]
        scores_BK = (query_BD.to(wide)[:, None] * chosen_BKD).sum(-1) * scale.to(wide)
    return scores_BK.masked_fill(document_BK < 0, float("-inf"))


def _attention(
    looked_NK: torch.Tensor | None, batch: RagBatch, pair_BK: torch.Tensor
) -> torch.Tensor | None:
    """[B, K]; a missing document may hold anything."""
    if looked_NK is None or batch.readings is None:
        return None
    if batch.readings["input_ids"].dim() == 3:  # all documents at once
        return looked_NK[: len(pair_BK)]
    return looked_NK[pair_BK.clamp_min(0), 0]


def _contrastive(
    engine: Engine,
    outputs: Mapping[str, torch.Tensor],
    documents: Side,
    batch: RagBatch,
    real: int,
    scale: torch.Tensor,
    objective: RagObjective,
) -> torch.Tensor:
    """This rank's share of the contrastive job's InfoNCE over the documents of all ranks; a scalar.

    Of a passage that several ranks brought, one stands for all. Questions without a relevant
    document in the batch do not count.
    """
    query_BD, document_MD = outputs["query"], outputs["document"]
    if not objective.contrastive_weight:
        return query_BD.new_zeros(())
    width = documents.max_rows
    padded = torch.nn.functional.pad(document_MD, (0, 0, 0, width - len(document_MD)))
    gathered_ND = engine.gather(padded[:width])
    keys = list(batch.document_keys)[:width] if documents.num_rows[engine.rank] else []
    rows = exchange([*keys, *[-1] * (width - len(keys))])
    place_of: dict[int, int] = {}
    for place, key in enumerate(key for row in rows for key in row):
        if key >= 0:
            place_of.setdefault(key, place)
    gold = [[place_of[key] for key in keys if key in place_of] for keys in batch.gold[:real]]
    asked = [row for row, places in enumerate(gold) if places]
    num_asked = sum(row[0] for row in exchange([len(asked)]))
    if not num_asked:
        return query_BD.new_zeros(())
    device = query_BD.device
    most = max((len(gold[row]) for row in asked), default=1)
    positive_BK = torch.tensor(
        [gold[row] + [-1] * (most - len(gold[row])) for row in asked],
        dtype=torch.int64, device=device,
    ).reshape(len(asked), most)  # fmt: skip
    place_N = torch.arange(len(gathered_ND), device=device)
    stands = torch.tensor(sorted(place_of.values()), device=device)
    columns = Columns(gathered_ND, place_N[None, :, None], torch.isin(place_N, stands)[None])
    asked_BD = query_BD[torch.tensor(asked, dtype=torch.int64, device=device)]
    embedded = EmbeddedBatch(asked_BD, positive_BK, columns)
    return contrastive_loss(Objective(), embedded, scale, num_queries=num_asked).loss


def _result(
    partial: torch.Tensor,
    contrastive: torch.Tensor,
    terms: RagTerms,
    sides: Sequence[Side],
    num_questions: int,
    log_scale: torch.Tensor,
) -> RagResult:
    means = [terms.answer_B, terms.retriever_B, terms.prior_entropy_B, terms.posterior_entropy_B]
    parts = [partial, contrastive, *(x.sum() / num_questions for x in means)]
    sums = sum_over_ranks(torch.stack([x.detach().double() for x in parts])).tolist()
    return RagResult(
        loss=sums[0],
        answer_loss=sums[2],
        retriever_loss=sums[3],
        contrastive_loss=sums[1],
        num_questions=num_questions,
        num_tokens=sum(side.num_tokens for side in sides),
        scale=float(scale_from_log(log_scale.detach())),
        prior_entropy=sums[4],
        posterior_entropy=sums[5],
    )


def _bad_rows(rows_MD: torch.Tensor) -> tuple[int, ...]:
    return tuple((~torch.isfinite(rows_MD).all(dim=1)).nonzero().flatten().tolist())
