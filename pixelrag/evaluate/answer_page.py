"""Answers with the passages behind them: as JSON lines, and as one HTML page to look at.

The page needs nothing but itself: no script, no style sheet or font from elsewhere. Tiles are put
in as they are, so it also shows to whom the images are not at hand.
"""

from __future__ import annotations

import base64
import html
import json
import mimetypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pixelrag.errors import DataError
from pixelrag.evaluate.answers import exact_match

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; } td, th { padding: 0.1em 0.8em 0.1em 0; text-align: left; }
details { border-top: 1px solid #ccc; padding: 0.4em 0; } summary { cursor: pointer; }
.right::before { content: "right "; color: #17692f; }
.wrong::before { content: "wrong "; color: #a8201a; }
ol { padding-left: 2em; } li.gold { background: #eef6e8; } .meta { color: #666; font-size: 0.9em; }
img { max-width: 20em; display: block; }
"""


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


def answer_page(rows: Sequence[AnswerRow], figures: Mapping[str, float], *, title: str) -> str:
    """The page, HTML: figures by their names, then every question, wrong ones first.

    Raises:
        DataError: the image of a passage can no longer be read.
    """
    head = html.escape(title)
    table = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{value:.4f}</td></tr>\n"
        for name, value in figures.items()
    )
    # Stable: within right and wrong ones the order of the file stays.
    body = "".join(_block(row) for row in sorted(rows, key=lambda row: row.is_right))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{head}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{head}</h1>\n<table>\n{table}</table>\n"
        f"<h2>{len(rows)} questions, {sum(row.is_right for row in rows)} right</h2>\n{body}"
        "</body></html>\n"
    )


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


def _block(row: AnswerRow) -> str:
    kind = "right" if row.is_right else "wrong"
    hits = "".join(_hit(hit) for hit in row.hits)
    right = html.escape(" | ".join(row.answers))
    return (
        f'<details><summary class="{kind}">{html.escape(row.question)}</summary>\n'
        f"<p>written: <b>{html.escape(row.written)}</b><br>right: {right}</p>\n"
        f"<ol>\n{hits}</ol></details>\n"
    )


def _hit(hit: Hit) -> str:
    kind = ' class="gold"' if hit.gold else ""
    title = f"<b>{html.escape(hit.title)}</b> " if hit.title else ""
    shown = html.escape(hit.text or "") if hit.image is None else _image(hit)
    meta = f'<span class="meta">{html.escape(hit.id)}, {hit.score:.3f}</span>'
    return f"<li{kind}>{title}{shown} {meta}</li>\n"


def _image(hit: Hit) -> str:
    kind = mimetypes.guess_type(hit.image.name)[0] or "image/png"
    try:
        data = base64.b64encode(hit.image.read_bytes()).decode("ascii")
    except OSError as error:
        raise DataError(f"{hit.image}: cannot be read: {error.strerror}") from error
    return f'<img alt="{html.escape(hit.id)}" src="data:{kind};base64,{data}">'
