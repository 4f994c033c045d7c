"""Evaluates a retriever on questions about tiles: is a tile of a right article among the first k?

hit@k is 1 where it is, MRR one over the rank of the first one: several tiles of one article are
several places of the ranking, as in PixelRAG's own evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pixelrag.data.tile_questions import TileSet
from pixelrag.distributed.together import together
from pixelrag.errors import DataError
from pixelrag.evaluate.pairs import document_length
from pixelrag.evaluate.ranking import best_documents, rank_relevant, reciprocal_rank, summarize
from pixelrag.models.preprocess import Preprocessor
from pixelrag.retrieval.encode import Encoder, encode

KS = (1, 5, 10)


@dataclass(frozen=True, slots=True)
class TileEvaluation:
    """Figures of each question by name, [Q] float64, and the first tiles, [Q, k] int64."""

    per_query: dict[str, np.ndarray]
    tiles_Qk: np.ndarray

    @property
    def figures(self) -> dict[str, float]:
        """Means by name (``miniv8/...``)."""
        return {f"miniv8/{name}": value for name, value in summarize(self.per_query).items()}


class TileEvaluator:
    """Searches the same tiles again and again.

    Args:
        tile_set: tiles and questions.
        preprocessor: makes model inputs.
        batch_size: rows a rank encodes at once.

    Raises:
        DataError: the model reads no images.
    """

    def __init__(
        self, tile_set: TileSet, preprocessor: Preprocessor, *, batch_size: int = 32
    ) -> None:
        if not preprocessor.has_vision:
            raise DataError(
                "eval.miniv8 names tiles, but the model reads text only; name a vision model such "
                "as Qwen/Qwen3-VL-Embedding-2B in model.name_or_path"
            )
        self.tile_set = tile_set
        self._preprocessor = preprocessor
        self._batch_size = batch_size

    def __call__(self, engine: Encoder, *, depth: int = 1) -> TileEvaluation:
        """Evaluate the engine's module; a collective.

        Args:
            engine: holds a ``BiEncoder``.
            depth: tiles to name of each question.

        Raises:
            NonFiniteError: an embedding holds NaN or infinity; on all ranks.
        """
        questions = [question.text for question in self.tile_set.questions]
        query_QD = encode(
            engine, "query", questions, self._preprocessor.queries,
            batch_size=self._batch_size, length=len,
        )  # fmt: skip
        tile_ND = encode(
            engine, "document", self.tile_set.tiles, self._preprocessor.documents,
            batch_size=self._batch_size, length=document_length,
        )  # fmt: skip
        with together():  # embeddings that are not finite raise here
            ranks = rank_relevant(query_QD, tile_ND, [q.tiles for q in self.tile_set.questions])
        best_Q = ranks.best()
        per_query = {f"hit@{k}": (best_Q <= k).astype(np.float64) for k in KS}
        per_query["mrr"] = reciprocal_rank(ranks)
        return TileEvaluation(per_query, best_documents(query_QD, tile_ND, depth)[0])
