"""Answers with the passages behind them as one HTML page to look at.

The page needs nothing but itself: no script, no style sheet, font or image from elsewhere.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from pixelrag.charts import Markup, Section, page
from pixelrag.errors import CheckpointError
from pixelrag.evaluate.answer_rows import AnswerRow, answers_jsonl
from pixelrag.evaluate.found_page import STYLE, Tiles, figures_section, hit_item
from pixelrag.retrieval.durable import put_text

_MAX_ROWS = 1000
_MAX_TILE = (560, 840)


def write_answers(
    folder: Path, rows: Sequence[AnswerRow], figures: Mapping[str, float], *, title: str
) -> None:
    """Write `answers.jsonl` and `answers.html` to `folder`, each whole or not at all.

    Raises:
        DataError: the image of a passage can no longer be read.
        CheckpointError: they cannot be written.
    """
    page = answer_page(rows, figures, title=title)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        put_text(folder / "answers.jsonl", answers_jsonl(rows))
        put_text(folder / "answers.html", page)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the answers cannot be written: {error.strerror or error}"
        ) from error


def answer_page(rows: Sequence[AnswerRow], figures: Mapping[str, float], *, title: str) -> str:
    """The page, HTML: figures by their names, then the questions, wrong ones before right ones.

    Of more than 1000 questions it shows as many, and says so.

    Raises:
        DataError: the image of a passage can no longer be read.
    """
    wrong = [row for row in rows if not row.is_right]
    right = [row for row in rows if row.is_right]
    kept = len(right) * _MAX_ROWS // max(_MAX_ROWS, len(rows))
    parts = (("wrong", wrong, _MAX_ROWS - kept), ("right", right, kept))
    shown = [(kind, of_kind, of_kind[:most]) for kind, of_kind, most in parts]
    images = (hit.image for _, _, some in shown for row in some for hit in row.hits)
    tiles = Tiles(images, _MAX_TILE)
    sections = [
        Section(
            f"{len(of_kind)} {kind} of {len(rows)}{_cut(some, of_kind)}",
            [Markup("".join(_block(row, kind, tiles) for row in some))],
        )
        for kind, of_kind, some in shown
    ]
    first = figures_section(figures)
    head = Section(first.title, [tiles.store, *first.parts])
    return page(title, [head, *sections], style=STYLE)


def _cut(some: Sequence[AnswerRow], all_of_them: Sequence[AnswerRow]) -> str:
    return "" if len(some) == len(all_of_them) else f", the first {len(some)} here"


def _block(row: AnswerRow, kind: str, tiles: Tiles) -> str:
    hits = "".join(hit_item(hit, tiles, row.answers, f", {hit.score:.3f}") for hit in row.hits)
    answers = " | ".join(map(html.escape, row.answers))
    written = html.escape(row.written) or "nothing"
    instead = f' <span class="meta">right: {answers}</span>' if kind == "wrong" else ""
    return (
        f"<details><summary>{html.escape(row.question)}\n"
        f'<div class="written"><b class="{kind}">{kind}: {written}</b>{instead}</div></summary>\n'
        f"<ol>\n{hits}</ol></details>\n"
    )
