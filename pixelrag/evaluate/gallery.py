"""Queries with the documents that were found for them, the worst first, as one HTML page."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pixelrag.charts import Markup, Section, page
from pixelrag.data.schema import Document
from pixelrag.evaluate.answer_rows import Hit
from pixelrag.evaluate.found_page import STYLE, Tiles, figures_section, hit_item
from pixelrag.evaluate.runs import Qrels, Run

SHOWN_HITS = 5
_MAX_QUERIES = 300
_MAX_TILE = (300, 450)
_STYLE = """
ol.hits { list-style: none; padding: 0; display: grid; gap: 0.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 10rem), 1fr)); }
ol.hits li { border: 1px solid var(--rule); border-radius: 4px; min-width: 0; }
ol.hits li.gold { border: 2px solid var(--good); }
ol.hits .text { font-size: 0.87rem; max-height: 11em; }
"""


@dataclass(frozen=True, slots=True)
class GalleryRow:
    """A query and what a search found for it.

    Attributes:
        query, sample_id: the query, and the row that it is of.
        rank: place of its first relevant document, from 1; None = not among those looked at.
        depth: documents looked at.
        hits: the best ones.
        missed: relevant documents that are not among the hits.
    """

    query: str
    sample_id: str
    rank: int | None
    depth: int
    hits: tuple[Hit, ...]
    missed: tuple[Hit, ...]


def gallery_rows(
    run: Run, qrels: Qrels, documents: Mapping[str, Document], queries: Mapping[str, str]
) -> list[GalleryRow]:
    """The rows, those with the lowest first relevant document first.

    Args:
        run: documents found, best first, by query id.
        qrels: those that should be.
        documents: all that the two name, by name.
        queries: texts of the queries, by id.
    """
    rows = []
    for sample_id, found in run.items():
        relevant = qrels[sample_id]
        places = {name: place for place, (name, _) in enumerate(found, start=1)}
        best = min((places[name] for name in relevant if name in places), default=None)
        hits = [_hit(name, documents, score, name in relevant) for name, score in found]
        shown = {name for name, _ in found[:SHOWN_HITS]}
        scores = dict(found)
        missed = [
            _hit(name, documents, scores.get(name, float("nan")), True)
            for name in sorted(relevant - shown, key=lambda name: places.get(name, len(found) + 1))
        ]
        rows.append(
            GalleryRow(
                queries[sample_id], sample_id, best, len(found), tuple(hits[:SHOWN_HITS]),
                tuple(missed),
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: -(row.rank or row.depth + 1))


def _hit(name: str, documents: Mapping[str, Document], score: float, gold: bool) -> Hit:
    document = documents[name]
    label = name if document.image is None else document.image.name
    return Hit(label, "", document.text, document.image, float(score), gold)


def gallery_page(rows: Sequence[GalleryRow], figures: Mapping[str, float], *, title: str) -> str:
    """The page, HTML, of the 300 worst queries at most; it says how many there are.

    Raises:
        DataError: an image can no longer be read.
    """
    shown = rows[:_MAX_QUERIES]
    images = (hit.image for row in shown for hit in (*row.hits, *row.missed))
    tiles = Tiles(images, _MAX_TILE)
    first = figures_section(figures)
    of = "" if len(shown) == len(rows) else f" of {len(rows)}"
    return page(
        title,
        [
            Section(first.title, [tiles.store, *first.parts]),
            Section(
                f"{len(shown)}{of} queries, the worst first",
                [Markup("".join(_block(row, tiles) for row in shown))],
            ),
        ],
        style=STYLE + _STYLE,
    )


def _block(row: GalleryRow, tiles: Tiles) -> str:
    rank = f"first relevant document at {row.rank}"
    if row.rank is None:
        rank = f"no relevant document among the first {row.depth}"
    kind = "right" if row.rank == 1 else "wrong"
    found = "".join(
        hit_item(hit, tiles, (), f", #{place}, {hit.score:.3f}")
        for place, hit in enumerate(row.hits, start=1)
    )
    missed = "".join(hit_item(hit, tiles, (), ", not among these") for hit in row.missed)
    opened = "" if row.rank == 1 else " open"
    return (
        f"<details{opened}><summary>{html.escape(row.query)}\n"
        f'<div class="written"><b class="{kind}">{rank}</b> '
        f'<span class="meta">{html.escape(row.sample_id)}</span></div></summary>\n'
        f'<ol class="hits">\n{found}{missed}</ol></details>\n'
    )
