"""All that is measured of a retriever: on held-out rows, on tiles, and in answers to questions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pixelrag.config.tile_questions import TileQuestionOptions
from pixelrag.data.schema import Document
from pixelrag.evaluate.compare import Measured
from pixelrag.evaluate.pairs import PairEvaluator
from pixelrag.evaluate.runs import Qrels, Run
from pixelrag.evaluate.tile_answers import GradedAnswer, TileAnswerer, answer_all, answer_figures
from pixelrag.evaluate.tiles import TileEvaluator
from pixelrag.retrieval.encode import Encoder


@dataclass(frozen=True, slots=True)
class RetrieverEvaluation:
    """What was measured.

    Attributes:
        figures: by name (``eval/...``, ``miniv8/...``).
        measured: every query's figures, by the set of queries: "eval", "miniv8".
        run, qrels: documents found for the rows of "eval", and those that should be.
        documents, texts: of all documents that the two name, and of the queries, by their names.
        answers: graded answers to the questions of "miniv8".
    """

    figures: dict[str, float]
    measured: dict[str, Measured]
    run: Run = field(default_factory=dict)
    qrels: Qrels = field(default_factory=dict)
    documents: dict[str, Document] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    answers: list[GradedAnswer] = field(default_factory=list)


class RetrieverEvaluator:
    """Measures the same sets again and again.

    Args:
        pairs: of held-out rows, if there are any.
        tiles: of questions about tiles, if there are any.
        options: who answers those, if anybody.
    """

    def __init__(
        self,
        pairs: PairEvaluator | None,
        tiles: TileEvaluator | None,
        options: TileQuestionOptions,
    ) -> None:
        self._pairs = pairs
        self._tiles = tiles
        self._depth = options.reader_tiles
        self._answerer = TileAnswerer(options) if options.reader_url is not None else None

    def __call__(
        self,
        engine: Encoder,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        run_depth: int = 0,
    ) -> RetrieverEvaluation:
        """Evaluate the engine's module; a collective. Arguments as of `PairEvaluator`."""
        found = RetrieverEvaluation({}, {})
        if self._pairs is not None:
            pairs = self._pairs(engine, scale, bias, run_depth=run_depth)
            found.figures.update(pairs.figures)
            if pairs.per_query:
                found.measured["eval"] = Measured(pairs.queries, pairs.per_query)
            found.run.update(pairs.run)
            found.qrels.update(pairs.qrels)
            found.documents.update(pairs.documents)
            found.texts.update(pairs.texts)
        if self._tiles is not None:
            self._ask(self._tiles, engine, found)
        return found

    def _ask(self, ask: TileEvaluator, engine: Encoder, found: RetrieverEvaluation) -> None:
        tile_set = ask.tile_set
        tiles = ask(engine, depth=self._depth)
        found.figures.update(tiles.figures)
        names = [question.id for question in tile_set.questions]
        found.measured["miniv8"] = Measured(names, tiles.per_query)
        if self._answerer is None:
            return
        paths = [[tile_set.tiles[i].image for i in row] for row in tiles.tiles_Qk]
        found.answers.extend(
            answer_all(self._answerer, tile_set.questions, paths, engine.rank, engine.world_size)
        )
        found.figures.update(answer_figures(found.answers))
