"""Answers with the passages behind them, as rows to look at and as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pixelrag.evaluate.answers import exact_match


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that was found.

    Attributes:
        id: of the passage.
        title: "" where there is none.
        text: None for an image.
        image: its file, or None.
        score: inner product with the question.
        gold: whether the question names it as relevant.
    """

    id: str
    title: str
    text: str | None
    image: Path | None
    score: float
    gold: bool


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """A question with what was written, the right answers, and what was found, best first."""

    question: str
    written: str
    answers: tuple[str, ...]
    hits: tuple[Hit, ...]

    @property
    def is_right(self) -> bool:
        """Whether it is one of the answers, normalised as SQuAD does."""
        return exact_match(self.written, self.answers) == 1.0


def answer_rows(answered: Iterable[Any], passages: Any) -> Iterator[AnswerRow]:
    """Look up what was found.

    Args:
        answered: `pixelrag.train.rag_eval.Answered`.
        passages: the `PassageStore` that their rows are of.

    Raises:
        DataError: a passage that can no longer be read.
    """
    for one in answered:
        gold = {row for name in one.question.passage_ids for row in passages.rows_of(name)}
        hits = []
        for row, score in zip(one.rows, one.scores, strict=True):
            found = passages[row]
            values = (found.id, found.title, found.text, found.image)
            hits.append(Hit(*values, score=float(score), gold=row in gold))
        yield AnswerRow(one.question.text, one.answer, tuple(one.question.answers), tuple(hits))


def answers_jsonl(rows: Iterable[AnswerRow]) -> str:
    """One JSON object a line: question, written, answers, right, and the passages found."""
    return "".join(json.dumps(_plain(row), ensure_ascii=False) + "\n" for row in rows)


def _plain(row: AnswerRow) -> dict[str, object]:
    found = [
        {
            "id": hit.id, "title": hit.title, "text": hit.text,
            "image": None if hit.image is None else str(hit.image),
            "score": hit.score, "gold": hit.gold,
        }
        for hit in row.hits
    ]  # fmt: skip
    return {
        "question": row.question, "written": row.written, "answers": list(row.answers),
        "right": row.is_right, "passages": found,
    }  # fmt: skip
