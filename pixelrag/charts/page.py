"""Sections of text, tables and charts as one HTML page, or as Markdown.

The page needs nothing but itself, follows light and dark, and fits a phone: charts shrink with the
screen, and a table that is wider scrolls by itself.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from pixelrag.charts.draw import PALETTE, Chart


@dataclass(frozen=True, slots=True)
class Table:
    """A table; its first column stands to the left, the others to the right.

    Attributes:
        head: names of the columns.
        rows: a cell for each column; `str` of each is shown.
        caption: what it shows, above it.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Markup:
    """HTML of the caller's own, who has escaped what is foreign in it. Markdown leaves it out."""

    html: str


Part = str | Chart | Table | Markup


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands below it; a str is a paragraph."""

    title: str
    parts: Sequence[Part]


def _variables(place: int) -> str:
    return " ".join(f"--chart-{n}: {pair[place]};" for n, pair in enumerate(PALETTE, start=1))


_STYLE = f"""
:root {{ color-scheme: light dark; --ink: #1d2127; --paper: #fff; --soft: #5f6873; --rule: #d9dee5;
  {_variables(0)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e4e7eb; --paper: #15181c; --soft: #9aa5b1;
  --rule: #343b43; {_variables(1)} }} }}
* {{ box-sizing: border-box; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 0 auto;
  padding: 1.25rem 1rem 3rem; color: var(--ink); background: var(--paper);
  overflow-wrap: anywhere; }}
h1 {{ font-size: 1.5rem; line-height: 1.25; margin: 0 0 0.6rem; }}
h2 {{ font-size: 1.15rem; margin: 2.2rem 0 0.4rem; border-top: 1px solid var(--rule);
  padding-top: 1rem; }}
p {{ max-width: 44rem; margin: 0.5rem 0; white-space: pre-line; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1rem; margin: 0.8rem 0; }}
figure {{ margin: 0; max-width: 34rem; }}
figure svg {{ display: block; width: 100%; height: auto; }}
.table {{ overflow-x: auto; margin: 0.8rem 0; overflow-wrap: normal; }}
table {{ border-collapse: collapse; font-size: 0.87rem; font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; color: var(--soft); padding-bottom: 0.2rem; }}
th, td {{ text-align: right; padding: 0.25rem 0.6rem; border-bottom: 1px solid var(--rule);
  white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
th {{ color: var(--soft); font-weight: 600; vertical-align: bottom; }}
"""


def page(title: str, sections: Sequence[Section], *, style: str = "") -> str:
    """One whole HTML page; texts are escaped, and ``style`` is CSS for a caller's `Markup`."""
    head = html.escape(title)
    body = "".join(
        f"<section><h2>{html.escape(section.title)}</h2>\n{''.join(_html_of(section.parts))}"
        "</section>\n"
        for section in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{head}</title>\n<style>{_STYLE}{style}</style></head>\n"
        f"<body><h1>{head}</h1>\n{body}</body></html>\n"
    )


def _html_of(parts: Sequence[Part]) -> Iterator[str]:
    """Elements; neighbouring charts stand beside each other where there is room."""
    for _, run in groupby(parts, key=lambda part: isinstance(part, Chart)):
        some = list(run)
        drawn = "".join(f"<figure>{x.svg()}</figure>\n" for x in some if isinstance(x, Chart))
        if drawn:
            yield f'<div class="charts">\n{drawn}</div>\n'
        for part in some:
            if isinstance(part, Markup):
                yield part.html
            elif isinstance(part, Table):
                yield _html_table(part)
            elif isinstance(part, str):
                yield f"<p>{html.escape(part)}</p>\n"


def _html_table(table: Table) -> str:
    caption = f"<caption>{html.escape(table.caption)}</caption>\n" if table.caption else ""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in table.head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>\n"
        for row in table.rows
    )
    # A region that scrolls must be reachable without a mouse.
    return (
        f'<div class="table" tabindex="0"><table>{caption}<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody></table></div>\n"
    )


def markdown(title: str, sections: Sequence[Section]) -> str:
    """The same as Markdown: texts and tables; charts and `Markup` are left out."""
    blocks = [f"# {title}"]
    for section in sections:
        blocks.append(f"## {section.title}")
        for part in section.parts:
            if isinstance(part, Table):
                blocks += [part.caption] if part.caption else []
                blocks.append(_markdown_table(part))
            elif isinstance(part, str):
                blocks.append(part)
    return "\n\n".join(blocks) + "\n"


def _markdown_table(table: Table) -> str:
    rule = ["---"] + ["---:"] * (len(table.head) - 1)
    lines = [table.head, rule, *table.rows]
    return "\n".join("| " + " | ".join(map(_markdown_cell, line)) + " |" for line in lines)


def _markdown_cell(cell: object) -> str:
    return str(cell).replace("|", "\\|").replace("\n", " ")
