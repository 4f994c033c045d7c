"""What becomes of samples longer than a row, and of those that teach nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pixelrag.data.token_store import TokenStore

Overlong = Literal["truncate", "split", "drop"]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Samples, or parts of them, as they go into rows; all arrays are [P] int64.

    Attributes:
        samples: the sample of each piece.
        starts: its first token in the sample.
        lengths: its tokens, at most a row.
        supervised: tokens that are learnt from. A piece's first token is none of them, as nothing
            in the piece precedes it.
        opens: 1 where the sample's own first token could be learnt from, if something preceded it
            (so never where the piece starts within a sample), else 0.
    """

    samples: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    supervised: NDArray[np.int64]
    opens: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True, slots=True)
class CutReport:
    """What cutting did.

    Attributes:
        num_samples: samples given.
        num_pieces: pieces made.
        num_tokens: tokens in them.
        num_supervised: tokens that are learnt from in them.
        row_length: tokens of a row.
        overlong: what was done with longer samples.
        num_overlong: samples longer than a row.
        tokens_lost: tokens of the samples that are in no piece.
        supervised_lost: tokens that could have been learnt from and are in no piece.
        num_untaught: pieces left out as nothing is learnt from them.
    """

    num_samples: int
    num_pieces: int
    num_tokens: int
    num_supervised: int
    row_length: int
    overlong: Overlong
    num_overlong: int
    tokens_lost: int
    supervised_lost: int
    num_untaught: int

    def __str__(self) -> str:
        text = (
            f"{self.num_samples:,} samples, {self.num_tokens:,} tokens, "
            f"{self.num_supervised:,} of them learnt from"
        )
        if self.num_overlong:
            done = {"truncate": "truncated", "split": "split", "drop": "dropped"}[self.overlong]
            text += (
                f"; {self.num_overlong:,} samples longer than a row of {self.row_length:,} were "
                f"{done}, which loses {self.tokens_lost:,} tokens ({self.supervised_lost:,} to be "
                "learnt from)"
            )
        if self.num_untaught:
            text += f"; {self.num_untaught:,} pieces with nothing to learn were left out"
        return text


def cut(
    store: TokenStore,
    row_length: int,
    overlong: Overlong = "truncate",
    samples: NDArray[np.int64] | None = None,
) -> tuple[Pieces, CutReport]:
    """Cut samples to what a row can hold.

    "split" makes a sample's pieces overlap by one token, from which the first token of the later
    piece is predicted: every token but the sample's first one is learnt from exactly once.

    Args:
        store: the samples.
        row_length: tokens of a row, at least 2.
        overlong: what to do with longer samples.
        samples: which samples, in this order (None = all).

    Returns:
        The pieces in the order of the samples, and what was lost.
    """
    if row_length < 2:
        raise ValueError(f"row_length: got {row_length}, expected at least 2")
    if samples is None:
        samples = np.arange(len(store), dtype=np.int64)
    lengths = store.lengths[samples]
    is_long = lengths > row_length
    if overlong == "drop":
        kept, counts = samples[~is_long], np.ones(int((~is_long).sum()), np.int64)
    elif overlong == "split":
        # A piece brings row_length - 1 tokens that the one before it did not have.
        counts = np.where(is_long, -(-(lengths - 1) // (row_length - 1)), 1)
        kept = samples
    else:
        kept, counts = samples, np.ones(len(samples), np.int64)
    owners = np.repeat(kept, counts)
    firsts = np.cumsum(counts) - counts
    within = np.arange(len(owners)) - np.repeat(firsts, counts)
    starts = within * (row_length - 1)
    sizes = np.minimum(store.lengths[owners] - starts, row_length)
    positions = store.offsets[owners] + starts
    supervised = _count(store.supervised, positions + 1, positions + sizes)
    opens = (store.supervised[positions] & (starts == 0)).astype(np.int64)
    teaches = supervised > 0
    pieces = Pieces(*(array[teaches] for array in (owners, starts, sizes, supervised, opens)))
    could = _count(
        store.supervised, store.offsets[samples] + 1, store.offsets[samples] + lengths
    ).sum()
    report = CutReport(
        num_samples=len(samples),
        num_pieces=len(pieces),
        num_tokens=int(pieces.lengths.sum()),
        num_supervised=int(pieces.supervised.sum()),
        row_length=row_length,
        overlong=overlong,
        num_overlong=int(is_long.sum()),
        tokens_lost=int(lengths.sum() - sizes.sum() + (starts > 0).sum()),
        supervised_lost=int(could - pieces.supervised.sum()),
        num_untaught=int((~teaches).sum()),
    )
    return pieces, report


def _count(
    flags: NDArray[np.bool_], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Set flags in each stretch, [P] int64."""
    counts = np.zeros(len(starts), np.int64)
    # In ascending order, so that the sums between stretches, which are not needed, stay short.
    some = np.flatnonzero(starts < stops)
    some = some[np.argsort(starts[some], kind="stable")]
    if not len(some):
        return counts
    last = len(flags) - 1
    # No sum may end behind the last flag, so that flag is added by hand.
    edges = np.stack([starts[some], np.minimum(stops[some], last)], axis=1).reshape(-1)
    counts[some] = np.add.reduceat(flags, edges, dtype=np.int64)[::2]
    counts[some] += flags[last] * ((stops[some] > last) & (starts[some] < last))
    return counts
