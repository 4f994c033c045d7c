"""Line charts, bars and histograms, drawn by matplotlib, as SVG and as PNG.

A figure is drawn once, in the colours of a light page. In its SVG those colours become the
variables of `page` (`--chart-1` ... and `currentColor`), so that it follows light and dark; outside
of a page they are what they were. Five inches are 360 points, a phone's width: letters of 9 points
stay readable there.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import cycle
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from pixelrag.charts.ticks import scale, spans_decade
from pixelrag.errors import ConfigError, DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Seven that differ in lightness too; the first of a pair on light paper, the second on dark.
PALETTE = (
    ("#1c63b7", "#6db1ff"), ("#c8501e", "#ff9d66"), ("#1f7a4d", "#62d196"), ("#8a3ea8", "#d79bf0"),
    ("#946200", "#e8bf4a"), ("#b3255f", "#ff8fb8"), ("#4e6472", "#a9bfcc"),
)  # fmt: skip
_INK, _RULE = "#1d2127", "#d9dee5"
_WIDTH, _HEIGHT = 5.0, 2.9  # inches
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names and titles are texts: a $ is a dollar
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.0,
}
_VARIABLES = {_INK: "currentColor", _RULE: f"var(--rule, {_RULE})"} | {
    light: f"var(--chart-{number}, {light})" for number, (light, _) in enumerate(PALETTE, start=1)
}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart.

    Attributes:
        name: in the legend.
        x, y: the points, in their order; a y that is NaN leaves a gap.
        low, high: edges of a band around y, of the same length; both or none.
        marked: the x of a point to mark, or None; `mark` is what stands beside it.
        dashed: for a bound or a comparison.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    marked: float | None = None
    mark: str = ""
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """One colour of a bar chart.

    Attributes:
        name: in the legend.
        values: by category; a category may lack one.
        spans: lower and upper end of a value's error bar, by category.
    """

    name: str
    values: Mapping[str, float]
    spans: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawn figure.

    Attributes:
        title: above it, and what a screen reader says.
    """

    title: str
    _figure: Figure

    def svg(self) -> str:
        """An `<svg>` element for a page; equal charts give equal text."""
        written = io.StringIO()
        self._save(written, format="svg", transparent=True, metadata={"Date": None})
        text = written.getvalue()
        text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
        # Ids of groups say nothing, and would stand once a figure on a page.
        text = re.sub(r'<g id="[^"]*"', "<g", text)
        text = re.sub(r'style="[^"]*"', lambda style: _by_variables(style[0]), text)
        label = f'<svg role="img" aria-label="{html.escape(self.title)}" '
        root, rest = text.removeprefix("<svg ").split(">", 1)
        return label + re.sub(r'\b(width|height)="[^"]*" ', "", root) + ">" + rest.strip()

    def png(self, dots_per_inch: int = 160) -> bytes:
        """A PNG file on white."""
        written = io.BytesIO()
        self._save(written, format="png", dpi=dots_per_inch, facecolor="white")
        return written.getvalue()

    def _save(self, target: Any, **options: Any) -> None:
        import matplotlib

        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": self.title}):
            self._figure.savefig(target, **options)


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    from_zero: bool = False,
) -> Chart:
    """Draw lines over numbers.

    Args:
        title: above the chart.
        lines: at least one.
        x, y: what the axes show, with the unit.
        log_x, log_y: logarithmic axes, where the values span a decade. Up to eight different x
            are the ticks.
        from_zero: let y begin at 0, so that heights compare.

    Raises:
        ValueError: no lines, or a line's parts differ in length.
        DataError: a value that a logarithmic axis cannot show, or that is infinite.
        ConfigError: matplotlib is not installed.
    """
    if not lines:
        raise ValueError(f"{title}: a chart needs a line")
    for line in lines:
        _check_line(title, line, log_x, log_y)

    def draw(axes: Axes) -> None:
        for line, colour in zip(lines, _colours(), strict=False):
            style = "--" if line.dashed else "-"
            # A lone point has no line: it needs a mark of its own, as few points do.
            dot = "o" if len(line.x) <= 16 and not line.dashed else None
            axes.plot(line.x, line.y, style, color=colour, marker=dot)
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, lw=0)
            if line.marked is not None:
                height = line.y[list(line.x).index(line.marked)]
                axes.plot(
                    [line.marked], [height], "o", color=colour, markersize=9, fillstyle="none"
                )
                axes.annotate(
                    line.mark, (line.marked, height), (0, 9), textcoords="offset points",
                    ha="center", color=colour,
                )  # fmt: skip
        xs, ys = ([v for line in lines for v in getattr(line, part)] for part in "xy")
        scale(axes, xs, log_x and spans_decade(xs), log_y and spans_decade(ys))
        axes.margins(y=0.12)
        if from_zero:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(x)
        axes.set_ylabel(y)

    return _chart(title, draw, [line.name for line in lines], [line.dashed for line in lines])


def bar_chart(title: str, series: Sequence[Bars], *, x: str, log_x: bool = False) -> Chart:
    """Draw bars from left to right, a row for each category, so that names have room.

    Args:
        title: above the chart.
        series: at least one; categories stand in the order of their first mention.
        x: what the length of a bar is, with the unit.
        log_x: logarithmic lengths.

    Raises:
        ValueError: there is no bar.
        DataError: a value that a logarithmic axis cannot show, or that is not finite.
        ConfigError: matplotlib is not installed.
    """
    names = list(dict.fromkeys(name for bars in series for name in bars.values))
    if not names:
        raise ValueError(f"{title}: a chart needs a bar")
    for bars in series:
        _check_values(title, bars.name, [*bars.values.values()], log=log_x, gaps=False)
    thick = 0.8 / len(series)

    def draw(axes: Axes) -> None:
        for place, (bars, colour) in enumerate(zip(series, _colours(), strict=False)):
            rows = [names.index(name) + (place + 0.5) * thick - 0.4 for name in bars.values]
            lengths = [*bars.values.values()]
            spans = [bars.spans.get(n, (v, v)) for n, v in bars.values.items()]
            sides = [
                [max(0.0, value - low) for value, (low, _) in zip(lengths, spans, strict=True)],
                [max(0.0, high - value) for value, (_, high) in zip(lengths, spans, strict=True)],
            ]
            axes.barh(
                rows, lengths, thick, color=colour, xerr=sides if bars.spans else None,
                ecolor=_INK, log=log_x,
            )  # fmt: skip
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel(x)

    rows = len(names) * max(1, len(series))
    return _chart(title, draw, [bars.name for bars in series], height=1.0 + 0.22 * max(4, rows))


def histogram(
    title: str,
    values: Mapping[str, Sequence[float]],
    *,
    x: str,
    y: str = "count",
    bins: int = 30,
    log_x: bool = False,
) -> Chart:
    """Draw how often values occur, one outline for each name, over the same bins.

    Args:
        title: above the chart.
        values: finite numbers by name, at least one.
        x, y: what the axes show, with the unit.
        bins: of equal width, on the logarithmic axis if that is asked for.

    Raises:
        ValueError: there is no value, or no bin.
        DataError: a value that a logarithmic axis cannot show, or that is not finite.
        ConfigError: matplotlib is not installed.
    """
    every = [value for numbers in values.values() for value in numbers]
    if not every or bins < 1:
        raise ValueError(f"{title}: a histogram needs a value and a bin")
    for name, numbers in values.items():
        _check_values(title, name, numbers, log=log_x, gaps=False)
    low, high = min(every), max(every)
    if low == high:  # bins need a width
        low, high = (low / 2, high * 2) if log_x else (low - 0.5, high + 0.5)
    steps = [step / bins for step in range(bins + 1)]
    if log_x:
        edges = [low * (high / low) ** step for step in steps]
    else:
        edges = [low + (high - low) * step for step in steps]
    edges[-1] = high  # rounding shall not leave the largest value out

    def draw(axes: Axes) -> None:
        for numbers, colour in zip(values.values(), _colours(), strict=False):
            axes.hist(numbers, edges, histtype="stepfilled", color=colour, alpha=0.25)
            axes.hist(numbers, edges, histtype="step", color=colour)
        scale(axes, edges, log_x, False)
        axes.set_xlabel(x)
        axes.set_ylabel(y)

    return _chart(title, draw, list(values))


def _chart(
    title: str,
    draw: Callable[[Axes], None],
    names: Sequence[str],
    dashed: Sequence[bool] = (),
    height: float = _HEIGHT,
) -> Chart:
    """A figure with what ``draw`` puts on its axes, and a legend of more than one name."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "drawing needs matplotlib, which is not installed: pip install 'pixelrag-trainer[plot]'"
        )
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(visible=True)
        draw(axes)
        figure.suptitle("\n".join(wrap(title, 48)), fontsize=10)
        if len(names) > 1:
            handles = [
                Line2D([], [], color=colour, lw=2.4, linestyle="--" if is_dashed else "-")
                for colour, is_dashed, _ in zip(
                    _colours(), [*dashed, *[False] * len(names)], names, strict=False
                )
            ]
            columns = 2 if max(map(len, names)) < 26 else 1
            figure.legend(
                handles, names, loc="outside lower center", ncols=columns, handlelength=2.8
            )
    return Chart(title, figure)


def _colours() -> Iterator[str]:
    return cycle(light for light, _ in PALETTE)


def _by_variables(style: str) -> str:
    """A style attribute whose colours and fonts are those of the page."""
    style = re.sub(r"#[0-9a-f]{6}\b", lambda m: _VARIABLES.get(m[0], m[0]), style)
    return style.replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans'")


def _check_line(title: str, line: Line, log_x: bool, log_y: bool) -> None:
    if (line.low is None) != (line.high is None):
        raise ValueError(f"{title}, {line.name}: a band has two edges")
    edges = [line.low, line.high] if line.low is not None and line.high is not None else []
    lengths = [len(part) for part in (line.x, line.y, *edges)]
    if len(set(lengths)) != 1:
        raise ValueError(f"{title}, {line.name}: x, y and the band have {lengths} points")
    if line.marked is not None and line.marked not in line.x:
        raise ValueError(f"{title}, {line.name}: {line.marked} is to be marked and no x of it")
    _check_values(title, line.name, line.x, log=log_x, gaps=False)
    for part in (line.y, *edges):
        _check_values(title, line.name, part, log=log_y, gaps=True)


def _check_values(title: str, name: str, values: Sequence[float], *, log: bool, gaps: bool) -> None:
    """matplotlib leaves out what it cannot show, without a word."""
    for value in values:
        if gaps and math.isnan(value):
            continue
        if not math.isfinite(value) or (log and value <= 0):
            expected = "a number above 0 (logarithmic axis)" if log else "a finite number"
            raise DataError(f"{title}: {name} has the value {value:g}, expected {expected}")
