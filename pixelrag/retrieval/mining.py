"""Hard negatives: documents that a model ranks high for a query they do not answer.

The index proposes, exact scores decide: hits are scored anew from the vectors themselves in
float64, so an approximate index changes what is looked at, never an order or a margin.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pixelrag.config.mine import MiningConfig
from pixelrag.data.archives import opened_image
from pixelrag.data.schema import Document
from pixelrag.data.tiles import article_of
from pixelrag.errors import DataError
from pixelrag.retrieval.index import Index


@dataclass(frozen=True, slots=True)
class Mined:
    """Negatives of a query, hardest first.

    Attributes:
        documents: the negatives.
        scores: inner products with the query.
        ranks: places among what was retrieved, from 1, positives counted.
        positive_score: of the row's own positive.
        positive_rank: its place, or None where it was not retrieved.
    """

    documents: list[Document]
    scores: list[float]
    ranks: list[int]
    positive_score: float
    positive_rank: int | None


class Miner:
    """Chooses negatives among the documents of a corpus.

    Never a negative: a document whose content is that of a positive of the same query text, in
    whatever row; or of a negative already chosen; or of another kind than the positive, since a row
    holds texts or images.

    Args:
        documents: corpus, row i of ``vectors_ND`` and of the index.
        vectors_ND: float32, may be a memory map.
        index: over the same vectors.
        positives: documents that answer a query, by its text.
        settings: the `mining` section.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        vectors_ND: np.ndarray,
        index: Index,
        positives: Mapping[str, Collection[Document]],
        settings: MiningConfig,
    ) -> None:
        self._documents = documents
        self._vectors_ND = vectors_ND
        self._index = index
        self._positives = positives
        self._settings = settings

    def __call__(
        self,
        queries: Sequence[str],
        positives: Sequence[Document],
        queries_QD: np.ndarray,
        positives_QD: np.ndarray,
    ) -> list[Mined]:
        """Mine for rows.

        Args:
            queries, positives: of the rows.
            queries_QD, positives_QD: their vectors, float32.
        """
        depth = min(self._settings.depth, len(self._documents))
        hits = self._index.search(queries_QD, depth)
        mined = []
        for row, (query, positive) in enumerate(zip(queries, positives, strict=True)):
            query_D = queries_QD[row].astype(np.float64)
            found = np.unique(hits.rows_Qk[row][hits.found_Qk[row]])
            scores = self._vectors_ND[found].astype(np.float64) @ query_D
            order = np.lexsort((found, -scores))
            ranked = [(self._documents[found[i]], float(scores[i])) for i in order]
            positive_score = float(positives_QD[row].astype(np.float64) @ query_D)
            mined.append(self._choose(query, positive, positive_score, ranked))
        return mined

    def _choose(
        self,
        query: str,
        positive: Document,
        positive_score: float,
        ranked: list[tuple[Document, float]],
    ) -> Mined:
        settings = self._settings
        taken = {content_of(document) for document in (positive, *self._positives[query])}
        own, positive_rank = content_of(positive), None
        candidates = []
        for rank, (document, score) in enumerate(ranked, start=1):
            content = content_of(document)
            if content == own and positive_rank is None:
                positive_rank = rank
            if content not in taken and (document.image is None) == (positive.image is None):
                taken.add(content)
                candidates.append((document, score, rank))
        if settings.filter == "skip_top1":
            candidates = candidates[1:]
        elif settings.filter == "margin":
            # A share of the positive's score, as in NV-Retriever (Moreira et al. 2024, section
            # 3.2, TopK-PercPos), written so that it stays below a negative score too.
            bound = positive_score - (1 - settings.margin) * abs(positive_score)
            candidates = [c for c in candidates if c[1] < bound]
        elif settings.filter == "article" and positive.image is not None:
            article = article_of(positive.image)
            candidates = [c for c in candidates if c[0].image and article_of(c[0].image) != article]
        documents, scores, ranks = (
            (list(column) for column in zip(*candidates[: settings.num_negatives], strict=True))
            if candidates
            else ([], [], [])
        )
        return Mined(documents, scores, ranks, positive_score, positive_rank)


def content_of(document: Document) -> str:
    """What is equal for two documents of one content: the key of a text, a hash of an image file.

    Raises:
        DataError: the image cannot be read.
    """
    return document.key if document.image is None else _hash(document.image)


@functools.lru_cache(maxsize=1 << 20)
def _hash(image: Path) -> str:
    try:
        with opened_image(image) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{image}: cannot be read: {error.strerror or error}") from error
