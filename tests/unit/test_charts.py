"""Charts hold what they were given, and pages stand alone."""

import html.parser
import io
import math
import re
import sys

import pytest
from PIL import Image

from pixelrag.charts import (
    Bars,
    Line,
    Markup,
    Section,
    Table,
    bar_chart,
    histogram,
    line_chart,
    markdown,
    page,
)
from pixelrag.charts.draw import PALETTE
from pixelrag.charts.ticks import tick_texts
from pixelrag.errors import ConfigError, DataError

CHUNKS = [64, 256, 1024]
LINES = [
    Line("fused", CHUNKS, [1.0, 2.0, 1.5], [0.9, 1.8, 1.4], [1.1, 2.2, 1.6], 256, "auto"),
    Line("_logits <&>", CHUNKS, [0.5, math.nan, 0.7]),
    Line("bound", CHUNKS, [3.0, 3.0, 3.0], dashed=True),
]


def _texts(svg: str) -> list[str]:
    return [html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


def test_a_line_chart_says_what_it_shows_and_takes_the_colours_of_the_page():
    chart = line_chart("Costs $5 or $6", LINES, x="chunk", y="tokens/s", log_x=True)
    svg = chart.svg()
    wanted = {"Costs $5 or $6", "chunk", "tokens/s", "64", "256", "1024", "auto", "fused"}
    assert wanted | {"_logits <&>", "bound"} <= set(_texts(svg))
    assert svg.startswith('<svg role="img" aria-label="Costs $5 or $6"')
    assert 'viewBox="0 0 360' in svg
    assert not re.search(r'<svg[^>]* (width|height)="', svg)
    assert "currentColor" in svg
    for number in (1, 2, 3):
        assert f"var(--chart-{number}, {PALETTE[number - 1][0]})" in svg
    assert "var(--chart-4" not in svg
    assert svg.count("fill-opacity: 0.18") == 1  # the one band
    # Equal input gives equal text: a page that is made again differs only where figures do.
    assert line_chart("Costs $5 or $6", LINES, x="chunk", y="tokens/s", log_x=True).svg() == svg
    assert Image.open(io.BytesIO(chart.png(100))).size == (500, 290)
    zero = line_chart("Heights", LINES, x="chunk", y="tokens/s", from_zero=True)
    assert zero._figure.axes[0].get_ylim()[0] == 0 < chart._figure.axes[0].get_ylim()[0]


def test_ticks_tell_their_values_apart():
    assert tick_texts([0.06996, 0.069975, 0.06999]) == ["0.06996", "0.069975", "0.06999"]
    assert tick_texts([1000.0, 20_000.0, 3e6]) == ["1000", "20k", "3M"]
    assert tick_texts([0.5]) == ["0.5"]
    steps = list(range(1, 13))
    chart = line_chart("t", [Line("a", steps, [5.7 + 0.4 * n for n in steps])], x="x", y="y",
                       log_y=True)  # fmt: skip
    (axes,) = chart._figure.axes
    assert axes.get_yscale() == "linear"  # 6.1 to 10.5 is less than a decade
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    low, high = axes.get_ylim()
    assert sum(low <= tick <= high for tick in axes.get_yticks()) >= 3
    decade = line_chart("t", [Line("a", [1, 2], [1.0, 10.0])], x="x", y="y", log_y=True)
    assert decade._figure.axes[0].get_yscale() == "log"


def test_bars_and_histograms_lose_nothing():
    chart = bar_chart(
        "Gain", [Bars("ours", {"a": 2.0, "b": 1.0}, {"a": (1.5, 2.5)}), Bars("peer", {"b": 3.0})],
        x="times",
    )  # fmt: skip
    (axes,) = chart._figure.axes
    assert [round(bar.get_width(), 3) for bar in axes.patches] == [2.0, 1.0, 3.0]
    assert {"a", "b", "ours", "peer", "times"} <= set(_texts(chart.svg()))
    values = [1.0, 1.0, 10.0, 1000.0]
    (axes,) = histogram("Lengths", {"x": values}, x="tokens", bins=3, log_x=True)._figure.axes
    heights = {round(y) for x, y in axes.patches[0].get_xy()}
    assert heights == {0, 1, 2}  # both edges are inside
    same = histogram("Same", {"x": [5.0, 5.0]}, x="tokens", bins=2)._figure.axes[0].patches[0]
    assert max(y for _, y in same.get_xy()) == 2


@pytest.mark.parametrize(
    ("line", "error", "said"),
    [
        (Line("a", [1, 2], [1.0]), ValueError, r"Loss, a: .*\[2, 1\]"),
        (Line("a", [1], [1.0], low=[0.5]), ValueError, "a band has two edges"),
        (Line("a", [1], [1.0], marked=2), ValueError, "2 is to be marked"),
        (Line("a", [1, 2], [1.0, 0.0]), DataError, "a has the value 0, expected .* above 0"),
        (Line("a", [1, 2], [1.0, math.inf]), DataError, "a has the value inf"),
    ],
)
def test_what_cannot_be_shown_is_said(line, error, said):
    with pytest.raises(error, match=said):
        line_chart("Loss", [line], x="step", y="loss", log_y=True)


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'pixelrag-trainer\[plot\]'"):
        line_chart("Loss", LINES, x="step", y="loss")


class _Balanced(html.parser.HTMLParser):
    """Notes the tags that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_stands_alone_and_escapes_texts():
    table = Table(["name", "<i>"], [["a|b & <b>", 1.5]], "A <caption>")
    chart = line_chart("A chart", LINES, x="x", y="y")
    sections = [Section("Speed <now>", ["It is <fast>.", chart, chart, table, Markup("<hr/>")])]
    text = page("Run <1>", sections, style=".own { color: red }")
    parser = _Balanced()
    parser.feed(text.replace("<hr/>", ""))
    assert parser.open == []
    assert "<title>Run &lt;1&gt;</title>" in text
    assert "<td>a|b &amp; &lt;b&gt;</td><td>1.5</td>" in text
    assert text.count("<figure>") == 2
    assert text.count('<div class="charts">') == 1
    assert ".own { color: red }" in text
    assert "<hr/>" in text
    assert "<script" not in text
    # Nothing is loaded from elsewhere: every reference is to a part of the page.
    outside = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert not re.search(r"https?://|url\((?!#)|href=\"(?!#)|src=|@import", outside)
    assert markdown("Run", sections) == (
        "# Run\n\n## Speed <now>\n\nIt is <fast>.\n\nA <caption>\n\n"
        "| name | <i> |\n| --- | ---: |\n| a\\|b & <b> | 1.5 |\n"
    )
