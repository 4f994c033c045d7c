"""Evaluates a bi-encoder on held-out (query, document) rows: loss, accuracy, retrieval.

All ranks encode, every rank computes the figures from all embeddings, so each has the same ones
whatever the world size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pixelrag.data.pairs import corpus_of
from pixelrag.data.schema import Document, PairRow
from pixelrag.distributed.together import together
from pixelrag.engine.base import Engine
from pixelrag.errors import DataError
from pixelrag.evaluate.ranking import (
    best_documents,
    per_query_metrics,
    rank_relevant,
    summarize,
)
from pixelrag.evaluate.runs import Qrels, Run
from pixelrag.losses.infonce import info_nce
from pixelrag.models.preprocess import Preprocessor
from pixelrag.retrieval.encode import encode

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
    """

    figures: dict[str, float]
    per_query: dict[str, np.ndarray]
    queries: list[str]
    run: Run = field(default_factory=dict)
    qrels: Qrels = field(default_factory=dict)


class PairEvaluator:
    """Encodes and scores the same held-out rows again and again.

    Args:
        rows: held-out rows, at least one.
        preprocessor: makes model inputs.
        corpus: documents to search, by id; None = every distinct document of ``rows``.
        batch_size: rows a rank encodes at once.
        retrieval: also rank the corpus.

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
    ) -> None:
        if not rows:
            raise DataError("data.eval: no rows to evaluate on")
        self._rows = rows
        self._preprocessor = preprocessor
        self._batch_size = batch_size
        self._retrieval = retrieval
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

    def __call__(self, engine: Engine, scale: float, *, run_depth: int = 0) -> PairEvaluation:
        """Evaluate the engine's module; a collective.

        Args:
            engine: holds a ``BiEncoder``.
            scale: 1 / temperature, for the loss.
            run_depth: documents to name of each query's ranking; needs ``retrieval``.
        """
        query_QD = encode(
            engine,
            "query",
            [row.query for row in self._rows],
            self._preprocessor.queries,
            batch_size=self._batch_size,
            length=len,
        )
        document_ND = encode(
            engine,
            "document",
            self._documents,
            self._preprocessor.documents,
            batch_size=self._batch_size,
            length=document_length,
        )
        figures = self._in_batch(query_QD, document_ND, scale)
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

    def _name_documents(
        self, found: PairEvaluation, rows_Qk: np.ndarray, scores_Qk: np.ndarray
    ) -> None:
        for row, documents, scores in zip(self._rows, rows_Qk, scores_Qk, strict=True):
            names = [self._names[document] for document in documents]
            found.run[row.sample_id] = list(zip(names, scores.tolist(), strict=True))
            found.qrels[row.sample_id] = {self._names[self._index[d.key]] for d in row.positives}

    def _in_batch(
        self, query_QD: torch.Tensor, document_ND: torch.Tensor, scale: float
    ) -> dict[str, float]:
        """Mean InfoNCE and accuracy over groups of ``GROUP`` rows with their own documents."""
        loss = correct = 0.0
        for start in range(0, len(self._rows), GROUP):
            rows = self._rows[start : start + GROUP]
            keys = [document.key for document in corpus_of(rows)]
            local = {key: i for i, key in enumerate(keys)}
            part = info_nce(
                query_QD[start : start + GROUP],
                document_ND[[self._index[key] for key in keys]],
                torch.tensor([local[row.positive.key] for row in rows]),
                torch.tensor([scale]),
                num_queries=len(self._rows),
            )
            loss += float(part.loss)
            correct += float(part.num_correct)
        return {"eval/loss": loss, "eval/accuracy": correct / len(self._rows)}


def _name(document: Document) -> str:
    """What a document without an id is called in TREC files: its path, or a hash of its text."""
    return document.key if document.image is None else str(document.image)


def document_length(document: Document) -> int:
    """A cheap length to sort by: characters; images count as longer than any text."""
    return 1 << 40 if document.text is None else len(document.text)
