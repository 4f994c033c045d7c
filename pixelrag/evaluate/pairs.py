"""Evaluates a bi-encoder on held-out (query, document) rows: loss, accuracy, retrieval.

All ranks encode, every rank computes the figures from all embeddings, so each has the same ones
whatever the world size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pixelrag.data.content import content_of
from pixelrag.data.pairs import corpus_of
from pixelrag.data.schema import Document, PairRow
from pixelrag.distributed.together import together
from pixelrag.errors import DataError
from pixelrag.evaluate.ranking import (
    best_documents,
    per_query_metrics,
    rank_relevant,
    summarize,
)
from pixelrag.evaluate.runs import Qrels, Run
from pixelrag.losses.contrastive import Objective, contrastive_loss, whole_batch
from pixelrag.models.preprocess import Preprocessor
from pixelrag.retrieval.encode import Encoder, encode

# In-batch figures depend on how many documents compete; a fixed group makes runs comparable.
GROUP = 64


@dataclass(frozen=True, slots=True)
class PairEvaluation:
    """What was measured.

    Attributes:
        figures: by name (``eval/...``).
        per_query: each query's retrieval metrics by name, [Q] float64.
        queries: ids of the queries, in that order.
        run: the documents found, as deep as asked for.
        qrels: those that should be.
        documents: all that the two name, by name.
        texts: of the queries, by id.
    """

    figures: dict[str, float]
    per_query: dict[str, np.ndarray]
    queries: list[str]
    run: Run = field(default_factory=dict)
    qrels: Qrels = field(default_factory=dict)
    documents: dict[str, Document] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


class PairEvaluator:
    """Encodes and scores the same held-out rows again and again.

    Args:
        rows: held-out rows, at least one.
        preprocessor: makes model inputs.
        corpus: documents to search, by id; None = every distinct document of ``rows``.
        batch_size: rows a rank encodes at once.
        retrieval: also rank the corpus.
        objective: the loss, as it is trained; None = plain InfoNCE.
        mask_same_content: a document equal to a query's positive is no negative of it.
        guide: a frozen encoder that tells further false negatives, and its preprocessor.

    Raises:
        DataError: no rows, or a row's positive is not in the corpus.
    """

    def __init__(
        self,
        rows: Sequence[PairRow],
        preprocessor: Preprocessor,
        *,
        corpus: Mapping[str, Document] | None = None,
        batch_size: int = 32,
        retrieval: bool = True,
        objective: Objective | None = None,
        mask_same_content: bool = True,
        guide: tuple[Encoder, Preprocessor] | None = None,
    ) -> None:
        if not rows:
            raise DataError("data.eval: no rows to evaluate on")
        self._rows = rows
        self._preprocessor = preprocessor
        self._batch_size = batch_size
        self._retrieval = retrieval
        self._objective = objective or Objective()
        self._mask_same_content = mask_same_content
        self._guide = guide
        self._by_guide: tuple[torch.Tensor, torch.Tensor] | None = None  # it never changes
        self._documents = corpus_of(rows)
        self._names = [_name(document) for document in self._documents]
        if corpus is not None:
            known = {document.key for document in corpus.values()}
            lost = [r.sample_id for r in rows if any(d.key not in known for d in r.positives)]
            if lost:
                raise DataError(
                    f"eval.corpus: the positives of {len(lost)} rows of data.eval are not in it, "
                    f"first {lost[0]}; expected every positive among the corpus' documents"
                )
            # The corpus first: its own order decides ties.
            extra = [d for d in self._documents if d.key not in known]
            self._names = list(corpus)
            self._documents = [*corpus.values(), *extra]
        self._index = {document.key: i for i, document in enumerate(self._documents)}

    def __call__(
        self,
        engine: Encoder,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        run_depth: int = 0,
    ) -> PairEvaluation:
        """Evaluate what the engine holds; a collective.

        Args:
            engine: holds a ``BiEncoder``, or stands for two towers.
            scale: [1], 1 / temperature, for the loss.
            bias: [1], of siglip.
            run_depth: documents to name of each query's ranking; needs ``retrieval``.
        """
        if self._guide is not None and self._by_guide is None:
            self._by_guide = self._encode(*self._guide)
        query_QD, document_ND = self._encode(engine, self._preprocessor)
        figures = self._in_batch(query_QD, document_ND, scale, bias)
        found = PairEvaluation(figures, {}, [row.sample_id for row in self._rows])
        if self._retrieval:
            corpus_CD = document_ND[: len(self._names)]
            relevant = [[self._index[d.key] for d in row.positives] for row in self._rows]
            with together():  # embeddings that are not finite raise here
                ranks = rank_relevant(query_QD, corpus_CD, relevant)
            found.per_query.update(per_query_metrics(ranks))
            means = summarize(found.per_query)
            found.figures.update({f"eval/{name}": value for name, value in means.items()})
            if run_depth:
                self._name_documents(found, *best_documents(query_QD, corpus_CD, run_depth))
        return found

    def _encode(
        self, engine: Encoder, preprocessor: Preprocessor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All queries and all documents; a collective."""
        queries, size = [row.query for row in self._rows], self._batch_size
        return (
            encode(engine, "query", queries, preprocessor.queries, batch_size=size, length=len),
            encode(
                engine, "document", self._documents, preprocessor.documents,
                batch_size=size, length=document_length,
            ),
        )  # fmt: skip

    def _name_documents(
        self, found: PairEvaluation, rows_Qk: np.ndarray, scores_Qk: np.ndarray
    ) -> None:
        for row, documents, scores in zip(self._rows, rows_Qk, scores_Qk, strict=True):
            relevant = [self._index[document.key] for document in row.positives]
            names = [self._names[document] for document in documents]
            found.run[row.sample_id] = list(zip(names, scores.tolist(), strict=True))
            found.qrels[row.sample_id] = {self._names[document] for document in relevant}
            found.texts[row.sample_id] = row.query
            for document in (*documents, *relevant):
                found.documents[self._names[document]] = self._documents[document]

    def _in_batch(
        self,
        query_QD: torch.Tensor,
        document_ND: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> dict[str, float]:
        """Mean loss and accuracy over groups of ``GROUP`` rows, each a batch as in training."""
        loss = correct = 0.0
        for start in range(0, len(self._rows), GROUP):
            rows = self._rows[start : start + GROUP]
            documents = [document for row in rows for document in row.documents]
            places = [self._index[document.key] for document in documents]
            content_N = guide = None
            if self._mask_same_content:
                content_N = torch.tensor([content_of(document) for document in documents])
            if self._by_guide is not None:
                guide = self._by_guide[0][start : start + GROUP], self._by_guide[1][places]
            batch = whole_batch(
                query_QD[start : start + GROUP],
                document_ND[places],
                _positives(rows),
                content_N,
                guide,
            )
            part = contrastive_loss(
                self._objective, batch, scale, bias, num_queries=len(self._rows)
            )
            loss += float(part.loss)
            correct += float(part.num_correct)
        return {"eval/loss": loss, "eval/accuracy": correct / len(self._rows)}


def _name(document: Document) -> str:
    """What a document without an id is called in TREC files: its path, or a hash of its text."""
    return document.key if document.image is None else str(document.image)


def _positives(rows: Sequence[PairRow]) -> torch.Tensor:
    """Where each row's positives stand among the documents of all rows: [B, K], filled with -1."""
    counts_B = torch.tensor([len(row.documents) for row in rows])
    found_B = torch.tensor([len(row.positives) for row in rows])
    place_K = torch.arange(int(found_B.max()))
    places_BK = (counts_B.cumsum(0) - counts_B)[:, None] + place_K
    return places_BK.where(place_K < found_B[:, None], -1)


def document_length(document: Document) -> int:
    """A cheap length to sort by: characters; images count as longer than any text."""
    return 1 << 40 if document.text is None else len(document.text)
