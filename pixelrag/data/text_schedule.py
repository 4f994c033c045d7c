"""When text rows are trained on beside the main data: a warm-up, a fixed share, a curriculum.

The share of text is a step function of the batch's number, so that a resumed run needs no state to
be where it was. Counts are exact: among the first `n` batches of a phase with share `r` are
`floor(n r)` text batches, or `floor(n B r)` text rows.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pixelrag.data.orders import BatchOrder, PooledOrder
from pixelrag.errors import DataError

TextMix = Literal["batches", "rows"]
CURRICULUM = (Fraction(1, 2), Fraction(1, 3), Fraction(1, 5), Fraction(0))
"""Shares of text in four equal phases, as PixelRAG's trainer has them."""


@dataclass(frozen=True, slots=True)
class Phase:
    """So many batches of a run and the share of text in them.

    Attributes:
        name: for logs and checkpoints.
        first: number of its first batch.
        share: of text, 0 to 1.
    """

    name: str
    first: int
    share: Fraction


def phases(
    num_steps: int,
    batches_per_step: int = 1,
    *,
    warmup_steps: int = 0,
    mix_ratio: float = 0.0,
    curriculum: bool = False,
) -> list[Phase]:
    """The phases of a run; the last one has no end.

    Args:
        num_steps: optimizer steps of the whole run; only a curriculum asks for it.
        batches_per_step: global batches of a step.
        warmup_steps: steps on text alone.
        mix_ratio: share of text after them.
        curriculum: instead of `mix_ratio`, the shares of `CURRICULUM` over four equal parts of the
            steps that are left.
    """
    found = [Phase("text warm-up", 0, Fraction(1))] if warmup_steps else []
    if curriculum:
        left = num_steps - warmup_steps
        for number, share in enumerate(CURRICULUM):
            first = warmup_steps + -(-left * number // len(CURRICULUM))
            name = f"text curriculum {number + 1} of {len(CURRICULUM)}"
            found.append(Phase(name, first * batches_per_step, share))
    else:
        # As written: 0.2 is a fifth, not the nearest binary fraction.
        name = "text mix" if mix_ratio else "main data"
        found.append(Phase(name, warmup_steps * batches_per_step, Fraction(str(mix_ratio))))
    return found


def steps_with_text(
    main_steps: int, *, warmup_steps: int, mix_ratio: float, curriculum: bool
) -> int:
    """Steps of a run that passes through its main data in `main_steps` steps without text."""
    whole = Fraction(sum(CURRICULUM)) / len(CURRICULUM)
    share = whole if curriculum else Fraction(str(mix_ratio))
    return warmup_steps + -(-main_steps // (1 - share))


class TextOrder:
    """Main batches and text batches in turn, or text rows in main batches.

    Rows of text are numbered behind those of the main data.

    Args:
        main: order of the main data's batches; a `PooledOrder` for `mix` "rows".
        num_main_rows, num_text_rows: rows of each.
        batch_size: rows of a batch.
        seed: of the text's permutations, and for "rows" of the main data's.
        phases: see `phases`.
        mix: "batches": the share is one of batches, each of one kind; "rows": of the rows of every
            batch. Then a pass over either kind ends where it has fewer rows left than the next
            batch takes.
        drop_last: leave out the text's smaller batches.

    Raises:
        DataError: there are fewer rows of a kind than a batch takes.
    """

    def __init__(
        self,
        main: BatchOrder | PooledOrder,
        num_main_rows: int,
        num_text_rows: int,
        batch_size: int,
        seed: int,
        phases: list[Phase],
        *,
        mix: TextMix = "batches",
        drop_last: bool = False,
    ) -> None:
        self.batches_per_epoch = main.batches_per_epoch
        self._main, self._num_main_rows = main, num_main_rows
        self._batch_size, self._mix = batch_size, mix
        self._phases, self._num_text_rows = phases, num_text_rows
        text = PooledOrder(num_text_rows, batch_size, seed, drop_last=drop_last, key=(0,))
        self._text = text
        if mix == "batches" and text.batches_per_epoch == 0:
            raise DataError(
                f"data.text has {num_text_rows} usable rows, expected at least {batch_size}, one "
                "global batch; lower batch.per_device_batch_size, or set data.drop_last: false"
            )
        if mix == "rows":
            if not isinstance(main, PooledOrder):
                raise TypeError(f"mix rows: got {type(main).__name__}, expected a PooledOrder")
            most = max(-(-batch_size * phase.share // 1) for phase in phases)
            least = min(batch_size * phase.share // 1 for phase in phases)
            self._streams = (
                _Stream(main, self._main_before, batch_size - least, "data.train"),
                _Stream(text, self._text_before, most, "data.text"),
            )

    def batch(self, position: int) -> NDArray[np.int64]:
        if self._mix == "rows":
            main, text = (stream.batch(position) for stream in self._streams)
            # Interleaved, so that every rank has its part of both.
            keys = [(np.arange(len(rows)) + 0.5) / max(1, len(rows)) for rows in (main, text)]
            rows = np.concatenate([main, self._num_main_rows + text])
            return rows[np.argsort(np.concatenate(keys), kind="stable")]
        before = self._text_before(position)
        if self.text_share(position):
            return self._num_main_rows + self._text.batch(before)
        return self._main.batch(position - before)

    def phase(self, position: int) -> Phase:
        """The phase that a batch is in."""
        return self._phases[bisect.bisect_right([p.first for p in self._phases], position) - 1]

    def text_share(self, position: int) -> float:
        """Share of text in a batch, 0 to 1."""
        text = self._text_before(position + 1) - self._text_before(position)
        return text / (self._batch_size if self._mix == "rows" else 1)

    def identity(self) -> dict[str, object]:
        shares = [[phase.first, str(phase.share)] for phase in self._phases]
        text = {"rows": self._num_text_rows, "mix": self._mix, "shares": shares}
        return self._main.identity() | {"text": text}

    def place(self, position: int) -> dict[str, object]:
        return self._main.place(position) | {"phase": self.phase(position).name}

    def _text_before(self, position: int) -> int:
        """Text batches, or rows, of all batches before this one."""
        unit = self._batch_size if self._mix == "rows" else 1
        total = 0
        ends = [phase.first for phase in self._phases[1:]] + [position]
        for phase, end in zip(self._phases, ends, strict=True):
            total += int(max(0, min(end, position) - phase.first) * unit * phase.share)
        return total

    def _main_before(self, position: int) -> int:
        return position * self._batch_size - self._text_before(position)


class _Stream:
    """Rows of one kind in passes, each a permutation; a batch never stands across two of them.

    Args:
        order: of the rows.
        before: how many rows of this kind stand in all batches before one.
        most: rows that a batch may take.
        name: for messages.
    """

    def __init__(
        self, order: PooledOrder, before: Callable[[int], int], most: int, name: str
    ) -> None:
        if order.num_rows < most:
            raise DataError(
                f"{name} has {order.num_rows} usable rows, fewer than the {most} that a batch "
                "takes; lower batch.per_device_batch_size, or set data.text_mix: batches"
            )
        self._order, self._before = order, before
        self._starts = [0]

    def batch(self, position: int) -> NDArray[np.int64]:
        number = self._pass_of(position)
        base = self._before(self._starts[number])
        start, end = self._before(position) - base, self._before(position + 1) - base
        return self._order.epoch_rows(number)[start:end]

    def _pass_of(self, position: int) -> int:
        """The pass that a batch is in; finds where passes start as far as there."""

        def fits(end: int) -> bool:
            return self._before(end) - self._before(self._starts[-1]) <= self._order.num_rows

        while not fits(position + 1):
            # Batches that end at `low` fit into this pass, those that end at `high` do not.
            low, high = self._starts[-1], position + 1
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if fits(middle) else (low, middle)
            self._starts.append(low)
        return bisect.bisect_right(self._starts, position) - 1
