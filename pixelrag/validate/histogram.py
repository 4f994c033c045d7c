"""Lengths as a histogram of plain characters, for any terminal and log."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pixelrag.data.lengths import quantile

_BINS = 8
_WIDTH = 40


def histogram(
    what: str, lengths: Sequence[int], limit: int, option: str, num_all: int | None = None
) -> list[str]:
    """The lines that show lengths in tokens.

    Args:
        what: of which these are the lengths, such as `queries`.
        lengths: of all, or of a sample of them; at least one.
        limit: the longest that is trained on whole.
        option: that sets `limit`.
        num_all: of how many they are a sample; None = these are all.
    """
    values = np.asarray(lengths)
    middle, most = (quantile(lengths, share) for share in (0.5, 0.99))
    of = f"{len(values):,}" if num_all in (None, len(values)) else f"{len(values):,} of {num_all:,}"
    over = float((values > limit).mean())
    lines = [
        f"{what} ({of}): half have at most {middle:,} tokens, 99 % at most {most:,}, the longest "
        f"{values.max():,}; {over:.1%} are longer than {option} {limit:,}"
    ]
    first = int(values.min())
    step = max(1, -(-(most - first + 1) // _BINS))
    starts = np.arange(first, most + 1, step)
    counts = np.histogram(values, [*starts, starts[-1] + step])[0].tolist()
    bars = [
        (f"{start:,}" if step == 1 else f"{start:,} - {start + step - 1:,}", number)
        for start, number in zip(starts.tolist(), counts, strict=True)
    ]
    if longer := len(values) - sum(counts):
        bars.append(("more", longer))
    width = max(len(name) for name, _ in bars)
    highest = max(number for _, number in bars)
    for name, number in bars:
        bar = "#" * max(number > 0, round(_WIDTH * number / highest))
        lines.append(f"  {name:>{width}}  {bar:<{_WIDTH}}  {number / len(values):6.1%}".rstrip())
    return lines
