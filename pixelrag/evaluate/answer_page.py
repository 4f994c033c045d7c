"""Answers with the passages behind them as one HTML page to look at.

The page needs nothing but itself: no script, no style sheet, font or image from elsewhere. A tile
is put in once, made small, however many questions found it.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from PIL import Image

from pixelrag.data.archives import image_source
from pixelrag.errors import CheckpointError, DataError
from pixelrag.evaluate.answer_rows import AnswerRow, Hit, answers_jsonl
from pixelrag.retrieval.durable import put_text

_MAX_ROWS = 1000
_MAX_TILE = (560, 840)
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2126; --paper: #fff; --soft: #626b76; --rule: #d9dee4;
  --good: #17692f; --bad: #b0251d; --gold: #eef6e6; --mark: #fff0a8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --paper: #15181c; --soft: #9aa5b1;
  --rule: #343b43; --good: #6fce8b; --bad: #ff8f86; --gold: #1c2b1c; --mark: #5a4a00; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto;
  padding: 1.5rem 1rem 3rem; color: var(--ink); background: var(--paper);
  overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin: 2rem 0 0.4rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr));
  gap: 0.6rem 1.2rem; margin: 0; }
.figures dt, .meta { color: var(--soft); font-size: 0.85rem; }
.figures dd { margin: 0; font-size: 1.2rem; font-variant-numeric: tabular-nums; }
details { border-top: 1px solid var(--rule); padding: 0.45rem 0; }
summary { cursor: pointer; padding-left: 1.1rem; text-indent: -1.1rem; }
.written { text-indent: 0; } .right { color: var(--good); } .wrong { color: var(--bad); }
ol { padding-left: 1.8rem; margin: 0.6rem 0; } li { padding: 0.35rem 0.5rem; }
li.gold { background: var(--gold); border-radius: 4px; } mark { background: var(--mark);
  color: inherit; } .text { white-space: pre-wrap; display: block;
  max-height: 18em; overflow: auto; }
.tile { display: block; width: 100%; height: auto; margin: 0.3rem 0;
  border: 1px solid var(--rule); } .store { position: absolute; }
"""


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
    tiles = _Tiles(hit.image for _, _, some in shown for row in some for hit in row.hits)
    head = html.escape(title)
    table = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{value:.4f}</dd></div>\n"
        for name, value in figures.items()
    )
    body = "".join(
        f"<h2>{len(of_kind)} {kind} of {len(rows)}{_cut(some, of_kind)}</h2>\n"
        + "".join(_block(row, kind, tiles) for row in some)
        for kind, of_kind, some in shown
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{head}</title>\n<style>{_STYLE}</style></head>\n<body><h1>{head}</h1>\n"
        f'<dl class="figures">\n{table}</dl>\n{tiles.store}{body}</body></html>\n'
    )


class _Tiles:
    """The images of a page, each once; questions refer to them."""

    def __init__(self, images: Iterable[Path | None]) -> None:
        self._names: dict[Path, tuple[str, str]] = {}
        symbols = []
        for image in dict.fromkeys(images):
            if image is not None:
                name = f"tile-{len(symbols)}"
                width, height, data = _small(image)
                box = f"0 0 {width} {height}"
                self._names[image] = (name, box)
                symbols.append(
                    f'<symbol id="{name}" viewBox="{box}"><image width="{width}" '
                    f'height="{height}" href="data:image/webp;base64,{data}"/></symbol>\n'
                )
        drawn = "".join(symbols)
        hidden = f'<svg class="store" width="0" height="0" aria-hidden="true">\n{drawn}</svg>\n'
        self.store = hidden if drawn else ""

    def shown(self, hit: Hit) -> str:
        name, box = self._names[hit.image]
        width = box.split()[2]
        return (
            f'<svg class="tile" viewBox="{box}" style="max-width: {width}px" role="img" '
            f'aria-label="{html.escape(hit.id)}"><use href="#{name}"/></svg>'
        )


def _small(image: Path) -> tuple[int, int, str]:
    """Width, height and base64 WebP of an image, in a size to glance at."""
    try:
        with Image.open(image_source(image)) as opened:
            pixels = opened.convert("RGB")
    except OSError as error:
        raise DataError(f"{image}: cannot be read: {error.strerror or error}") from error
    pixels.thumbnail(_MAX_TILE)
    written = io.BytesIO()
    pixels.save(written, "WEBP", quality=70)
    return (*pixels.size, base64.b64encode(written.getvalue()).decode("ascii"))


def _cut(some: Sequence[AnswerRow], all_of_them: Sequence[AnswerRow]) -> str:
    return "" if len(some) == len(all_of_them) else f", the first {len(some)} here"


def _block(row: AnswerRow, kind: str, tiles: _Tiles) -> str:
    hits = "".join(_hit(hit, row.answers, tiles) for hit in row.hits)
    answers = " | ".join(map(html.escape, row.answers))
    written = html.escape(row.written) or "nothing"
    instead = f' <span class="meta">right: {answers}</span>' if kind == "wrong" else ""
    return (
        f"<details><summary>{html.escape(row.question)}\n"
        f'<div class="written"><b class="{kind}">{kind}: {written}</b>{instead}</div></summary>\n'
        f"<ol>\n{hits}</ol></details>\n"
    )


def _hit(hit: Hit, answers: Sequence[str], tiles: _Tiles) -> str:
    title = f"<b>{html.escape(hit.title)}</b> " if hit.title else ""
    relevant = ", relevant" if hit.gold else ""
    meta = f'<span class="meta">{html.escape(hit.id)}, {hit.score:.3f}{relevant}</span>'
    shown = tiles.shown(hit) if hit.image is not None else _marked(hit.text or "", answers)
    kind = ' class="gold"' if hit.gold else ""
    return f"<li{kind}>{title}{meta}{shown}</li>\n"


def _marked(text: str, answers: Sequence[str]) -> str:
    """A text with the answers in it marked; longer ones first, as one may hold another."""
    either = "|".join(map(re.escape, sorted(filter(None, answers), key=len, reverse=True)))
    pieces = re.split(rf"(?<!\w)({either})(?!\w)", text, flags=re.I) if either else [text]
    shown = "".join(
        f"<mark>{html.escape(piece)}</mark>" if place % 2 else html.escape(piece)
        for place, piece in enumerate(pieces)
    )
    return f'<span class="text">{shown}</span>'
