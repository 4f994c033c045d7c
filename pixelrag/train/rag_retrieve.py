"""From questions to the passages that the generator reads, and to a rank's model inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pixelrag.config.rag import RagConfig
from pixelrag.data.passages import PassageStore
from pixelrag.data.questions import Question
from pixelrag.distributed.collectives import exchange, gather_objects
from pixelrag.distributed.together import together
from pixelrag.engine.base import Engine
from pixelrag.evaluate.pairs import document_length
from pixelrag.gradcache.rag_batch import RagBatch
from pixelrag.retrieval.document_encoder import passage_document
from pixelrag.retrieval.encode import encode
from pixelrag.retrieval.generation import Generation
from pixelrag.retrieval.hits import Hits
from pixelrag.retrieval.sharded import sharded_search
from pixelrag.retrieval.staleness import distinct_share, has_collapsed, score_error
from pixelrag.train.rag_data import RagParts


@dataclass(frozen=True, slots=True)
class Retrieved:
    """What a rank's questions found.

    Attributes:
        rows: passages of each question, best first.
        scores: inner products by which they are ordered, [Q] lists.
        distinct_share: distinct passages among all that all ranks' questions found, over as many
            as there could be.
        collapsed: whether these are so few that the encoders tell questions apart no longer.
        score_error: relative difference of stored and fresh scores; None without re-ranking.
    """

    rows: list[list[int]]
    scores: list[list[float]]
    distinct_share: float
    collapsed: bool
    score_error: float | None


class Retriever:
    """Searches the generation in use, and re-ranks with the document encoder as it is now.

    Args:
        config: the job's configuration.
        passages: the knowledge base.
        parts: models and what makes their inputs.
    """

    def __init__(self, config: RagConfig, passages: PassageStore, parts: RagParts) -> None:
        self._passages = passages
        self._parts = parts
        self._template = config.knowledge_base.template
        self._is_shared_out = config.index.num_shards > 1 or config.index.holders == "ray"
        self._over_retrieve = config.retrieval.over_retrieve
        self._batch_size = config.retrieval.batch_size

    def __call__(
        self,
        engine: Engine,
        generation: Generation,
        questions: Sequence[str],
        own: slice,
        k: int,
    ) -> Retrieved:
        """Find passages for this rank's questions; a collective.

        Args:
            engine: holds the encoders.
            generation: what to search.
            questions: of all ranks, the same on each.
            own: this rank's part of them, maybe empty.
            k: passages a question.
        """
        vectors_QD = self.queries(engine, questions)
        num_hits = max(k, self._over_retrieve or k)
        hits = self._search(engine, generation, vectors_QD[own], num_hits)
        error = None
        if self._over_retrieve is not None:
            hits, error = self._reranked(engine, generation, hits, vectors_QD[own])
        rows, scores = _listed(hits, k)
        everyone_Qk = _of_all_ranks(rows, -(-len(questions) // engine.world_size), k)
        share = distinct_share(everyone_Qk, len(self._passages))
        collapsed = has_collapsed(everyone_Qk, len(self._passages))
        return Retrieved(rows, scores, share, collapsed, error)

    def queries(self, engine: Engine, questions: Sequence[str]) -> np.ndarray:
        """Questions encoded as the training does it now, float32 [n, D]; a collective."""
        return encode(
            engine, "query", questions, self._parts.queries.queries,
            batch_size=self._batch_size, length=len,
        ).numpy()  # fmt: skip

    def vectors(self, engine: Engine, rows: Sequence[int]) -> np.ndarray:
        """Passages encoded as the training does it now, float32 [n, D]; a collective."""
        with together():
            documents = [passage_document(self._passages[row], self._template) for row in rows]
        return encode(
            engine, "document", documents, self._parts.documents.documents,
            batch_size=self._batch_size, length=document_length,
        ).numpy()  # fmt: skip

    def _search(
        self, engine: Engine, generation: Generation, queries_QD: np.ndarray, k: int
    ) -> Hits:
        if self._is_shared_out:
            return sharded_search(generation, queries_QD, k, device=engine.device)
        with together():
            return generation.search(queries_QD, k)

    def _reranked(
        self, engine: Engine, generation: Generation, hits: Hits, queries_QD: np.ndarray
    ) -> tuple[Hits, float]:
        own = np.unique(hits.rows_Qk[hits.found_Qk]).tolist()
        everyone = sorted({row for rows in gather_objects(own) for row in rows})
        vectors_ND = self.vectors(engine, everyone)
        places_Qk = np.searchsorted(everyone, hits.rows_Qk)
        fresh_QkD = vectors_ND[np.minimum(places_Qk, len(everyone) - 1)]
        scores_Qk = np.einsum("qd,qkd->qk", queries_QD, fresh_QkD)
        scores_Qk = np.where(hits.found_Qk, scores_Qk, np.float32(-np.inf))
        # Stable: equal scores keep the order of the index.
        order = np.argsort(-scores_Qk, axis=1, kind="stable")
        error = score_error(generation.vectors_ND, hits, queries_QD, fresh_QkD)
        return (
            Hits(*(np.take_along_axis(a, order, axis=1) for a in (scores_Qk, hits.rows_Qk))),
            error,
        )


def _of_all_ranks(rows: list[list[int]], most: int, k: int) -> np.ndarray:
    """What all questions found, [up to ranks * most, k], -1 where nothing was; a collective."""
    own = np.full((most, k), -1)
    for place, found in enumerate(rows):
        own[place, : len(found)] = found
    return np.array(exchange(own.ravel().tolist())).reshape(-1, k)


def _listed(hits: Hits, k: int) -> tuple[list[list[int]], list[list[float]]]:
    found = hits.found_Qk
    rows = [r[f][:k].tolist() for r, f in zip(hits.rows_Qk, found, strict=True)]
    scores = [s[f][:k].tolist() for s, f in zip(hits.scores_Qk, found, strict=True)]
    return rows, scores


class RagCollator:
    """Turns questions and their passages into a `RagBatch`.

    Documents and pairs are sorted by length, so that the chunks cut from them pad little; a passage
    that several questions found is encoded once.

    Args:
        config: the job's configuration.
        passages: the knowledge base.
        parts: what makes inputs, and the loss, which decides what is read.
    """

    def __init__(self, config: RagConfig, passages: PassageStore, parts: RagParts) -> None:
        self._k = config.retrieval.k
        self._template = config.knowledge_base.template
        self._passages = passages
        self._parts = parts
        self._objective = parts.objective

    def __call__(
        self, questions: Sequence[Question], rows: Sequence[Sequence[int]], num_real: int
    ) -> RagBatch:
        """Build the inputs of a rank.

        Args:
            questions: this rank's, at least one (a filler where ``num_real`` is 0).
            rows: the passages of each.
            num_real: how many of the questions count: all or none.

        Raises:
            DataError: a passage that cannot be read.
        """
        lengths = self._passages.lengths
        gold = [self._gold(question) for question in questions]
        wanted = {row for found in rows for row in found}
        if self._objective.contrastive_weight:
            wanted |= {g[0] for g in gold if g and not wanted.intersection(g)}
        # Nothing was found at all: some document must still go through the models.
        distinct = sorted(wanted or {0}, key=lambda row: (int(lengths[row]), row))
        place = {row: index for index, row in enumerate(distinct)}
        document_BK = torch.full((len(questions), self._k), -1)
        pair_BK = torch.full((len(questions), self._k), -1)
        pairs = sorted(
            ((b, k) for b, found in enumerate(rows) for k in range(len(found))),
            key=lambda pair: (int(lengths[rows[pair[0]][pair[1]]]), pair),
        )
        for number, (b, k) in enumerate(pairs):
            document_BK[b, k] = place[rows[b][k]]
            pair_BK[b, k] = number
        read = {row: self._passages[row] for row in distinct}
        documents = [passage_document(read[row], self._template) for row in distinct]
        names = [question.sample_id for question in questions]
        targets = self._parts.generator.targets([q.answers[0] for q in questions], names)
        generator, readings = self._generator_inputs(questions, rows, pairs, read, targets)
        return RagBatch(
            queries=self._parts.queries.queries([question.text for question in questions]),
            documents=self._parts.documents.documents(documents),
            generator=generator,
            readings=readings,
            document_BK=document_BK,
            pair_BK=pair_BK,
            target_mask_BT=targets["target_mask"].bool(),
            num_real=num_real,
            document_keys=tuple(distinct),
            gold=tuple(map(tuple, gold)),
        )

    def _generator_inputs(self, questions, rows, pairs, read, targets):
        """Inputs that the generator learns from, and those that it only reads."""
        asked = pairs or [(0, 0)]
        passages = [read[rows[b][k]] if pairs else next(iter(read.values())) for b, k in asked]
        texts = [questions[b].text for b, _ in asked]
        names = [questions[b].sample_id for b, _ in asked]
        of_pair = torch.tensor([b for b, _ in asked])
        pair_targets = {key: value[of_pair] for key, value in targets.items()}
        prompt, objective = self._parts.generator, self._objective

        def apart(*, mark: bool = False) -> dict[str, torch.Tensor]:
            return prompt.prompts(texts, passages, names, mark=mark) | pair_targets

        def joint() -> dict[str, torch.Tensor]:
            all_found = [self._padded([read[row] for row in found]) for found in rows]
            everyone = [q.text for q in questions], all_found, [q.sample_id for q in questions]
            return prompt.joint(*everyone) | targets

        fused = objective.answer == "fid"
        learned = joint() if fused else apart()
        if objective.leaves_out:
            left = [
                self._padded([read[row] for j, row in enumerate(rows[b]) if j != k])
                for b, k in asked
            ]
            return learned, prompt.joint(texts, left, names) | pair_targets
        if objective.watches and prompt.text.is_seq2seq:
            # The passages share one soft-max of the decoder's attention.
            return learned, learned if fused else joint()
        if objective.watches:
            return learned, apart(mark=True)
        return learned, apart() if objective.reads_apart else None

    def _padded(self, passages: list) -> list:
        return passages + [None] * (self._k - len(passages))

    def _gold(self, question: Question) -> list[int]:
        rows = [row for name in question.passage_ids for row in self._passages.rows_of(name)]
        return list(dict.fromkeys(rows))
