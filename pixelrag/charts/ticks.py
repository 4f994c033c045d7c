"""The axes of a chart: their scale, and ticks whose numbers tell them apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def spans_decade(values: Sequence[float]) -> bool:
    """Whether the largest is ten times the smallest: less has too few logarithmic ticks."""
    known = [value for value in values if not math.isnan(value)]
    return bool(known) and max(known) >= 10 * min(known)


def scale(axes: Axes, xs: Sequence[float], log_x: bool, log_y: bool) -> None:
    """Set the scale of both axes and their ticks; up to eight different x are the ticks of x."""
    from matplotlib.ticker import (
        FixedLocator,
        Formatter,
        LogLocator,
        MaxNLocator,
        NullLocator,
    )

    class Numbers(Formatter):
        def __call__(self, value: float, pos: int | None = None) -> str:
            return _short(value)

        def format_ticks(self, values: Sequence[float]) -> list[str]:
            return tick_texts([float(value) for value in values])

    axis_scales = ((axes.xaxis, axes.set_xscale, log_x), (axes.yaxis, axes.set_yscale, log_y))
    for axis, set_scale, is_log in axis_scales:
        if is_log:
            set_scale("log")
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
            axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(Numbers())
    if len(set(xs)) <= 8:
        axes.xaxis.set_major_locator(FixedLocator(sorted(set(xs))))
    elif not log_x and all(float(x).is_integer() for x in xs):
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))


def tick_texts(values: Sequence[float]) -> list[str]:
    """The numbers of an axis, with as many digits (4 or more) as their distances need."""
    gaps = [high - low for low, high in pairwise(sorted(set(values)))]
    allowed = min(gaps, default=math.inf) / 50
    digits = 4
    while digits < 12 and any(abs(float(f"{v:.{digits}g}") - v) > allowed for v in values):
        digits += 1
    return [_short(value, digits) for value in values]


def _short(value: float, digits: int = 4) -> str:
    """A tick's number: 12k, 3.5M, 0.002."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.{digits}g}{letter}"
    return f"{value:.{digits}g}"
