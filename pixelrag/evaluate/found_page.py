"""What pages of questions and what was found for them share: hits, tiles made small, their style.

A tile is put into a page once, however many questions found it; they refer to it.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from PIL import Image

from pixelrag.charts import Markup, Section
from pixelrag.data.archives import image_source
from pixelrag.errors import DataError
from pixelrag.evaluate.answer_rows import Hit

STYLE = """
:root { --good: #17692f; --bad: #b0251d; --gold: #eef6e6; --mark: #fff0a8; }
@media (prefers-color-scheme: dark) { :root { --good: #6fce8b; --bad: #ff8f86; --gold: #1c2b1c;
  --mark: #5a4a00; } }
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


def figures_section(figures: Mapping[str, float]) -> Section:
    """Figures by their names."""
    table = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{value:.4f}</dd></div>\n"
        for name, value in figures.items()
    )
    return Section("Figures", [Markup(f'<dl class="figures">\n{table}</dl>\n')])


class Tiles:
    """The images of a page, each once.

    Args:
        images: of everything that is shown; None is no image.
        largest: width and height in pixels that one is scaled down to.

    Attributes:
        store: what must stand in the page before anything refers to a tile.

    Raises:
        DataError: an image can no longer be read.
    """

    def __init__(self, images: Iterable[Path | None], largest: tuple[int, int]) -> None:
        self._names: dict[Path, tuple[str, str]] = {}
        symbols: list[str] = []
        for image in dict.fromkeys(images):
            if image is not None:
                name = f"tile-{len(symbols)}"
                width, height, data = _small(image, largest)
                box = f"0 0 {width} {height}"
                self._names[image] = (name, box)
                symbols.append(
                    f'<symbol id="{name}" viewBox="{box}"><image width="{width}" '
                    f'height="{height}" href="data:image/webp;base64,{data}"/></symbol>\n'
                )
        drawn = "".join(symbols)
        hidden = f'<svg class="store" width="0" height="0" aria-hidden="true">\n{drawn}</svg>\n'
        self.store = Markup(hidden if drawn else "")

    def shown(self, image: Path, label: str) -> str:
        """The tile's place, HTML."""
        name, box = self._names[image]
        width = box.split()[2]
        return (
            f'<svg class="tile" viewBox="{box}" style="max-width: {width}px" role="img" '
            f'aria-label="{html.escape(label)}"><use href="#{name}"/></svg>'
        )


def hit_item(hit: Hit, tiles: Tiles, words: Sequence[str] = (), note: str = "") -> str:
    """A hit as an item of a list, HTML; ``words`` are marked in its text."""
    title = f"<b>{html.escape(hit.title)}</b> " if hit.title else ""
    meta = html.escape(hit.id) + note
    head = f'{title}<span class="meta">{meta}{", relevant" if hit.gold else ""}</span>'
    shown = _marked(hit.text or "", words) if hit.image is None else tiles.shown(hit.image, hit.id)
    kind = ' class="gold"' if hit.gold else ""
    return f"<li{kind}>{head}{shown}</li>\n"


def _small(image: Path, largest: tuple[int, int]) -> tuple[int, int, str]:
    """Width, height and base64 WebP of an image, in a size to glance at."""
    try:
        with Image.open(image_source(image)) as opened:
            pixels = opened.convert("RGB")
    except OSError as error:
        raise DataError(f"{image}: cannot be read: {error.strerror or error}") from error
    pixels.thumbnail(largest)
    written = io.BytesIO()
    pixels.save(written, "WEBP", quality=70)
    return (*pixels.size, base64.b64encode(written.getvalue()).decode("ascii"))


def _marked(text: str, words: Sequence[str]) -> str:
    """A text with the words in it marked; longer ones first, as one may hold another."""
    either = "|".join(map(re.escape, sorted(filter(None, words), key=len, reverse=True)))
    pieces = re.split(rf"(?<!\w)({either})(?!\w)", text, flags=re.I) if either else [text]
    shown = "".join(
        f"<mark>{html.escape(piece)}</mark>" if place % 2 else html.escape(piece)
        for place, piece in enumerate(pieces)
    )
    return f'<span class="text">{shown}</span>'
