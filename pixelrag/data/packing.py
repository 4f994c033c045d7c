"""First-fit decreasing: which samples share a row, for a million of them in a fraction of a second.

The rule is the textbook's (Johnson 1973): take the samples from the longest to the shortest, equal
ones by index, and put each into the first row that has room for it, or else into a new one. Two
things make it fast without a search tree:

- Samples longer than half a row never share one with each other, so each simply opens a row.
- The others are placed a length at a time, from a histogram. Equal samples fill the rows from left
  to right, each row to the brim, so all of a length go with a few array operations over the rows
  that have room. Rows are kept in blocks, with the largest room of each; full ones are skipped.

Very long rows can see more distinct lengths than that is quick for. Beyond `MAX_LENGTHS` of them,
neighbouring ones (about one part in a thousand apart) are placed together as if each were as long
as the longest, while what is left of a row is always counted from true lengths. Everything up to
`MAX_LENGTHS`, which means rows of up to 16,384 tokens whatever they hold, is first-fit decreasing
to the letter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_LENGTHS = 8192
"""Distinct lengths up to half a row that are placed one by one."""
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Packing:
    """Samples grouped by row.

    Attributes:
        items: sample indices, row after row, in a row from the longest to the shortest; [n] int64.
        offsets: row `r` holds `items[offsets[r] : offsets[r + 1]]`; [rows + 1] int64.
        row_length: what a row holds.
    """

    items: NDArray[np.int64]
    offsets: NDArray[np.int64]
    row_length: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        """The samples of one row."""
        return self.items[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return (self[row] for row in range(len(self)))


def pack(lengths: NDArray[np.integer], row_length: int) -> Packing:
    """Pack samples into rows, first-fit decreasing, ties by index.

    Args:
        lengths: [n] integers from 1 to `row_length`.
        row_length: tokens of a row.

    Raises:
        ValueError: a length is out of range.
    """
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or (lengths.size and not np.issubdtype(lengths.dtype, np.integer)):
        raise ValueError(f"lengths: got {lengths.dtype} {lengths.shape}, expected [n] integers")
    if row_length < 1:
        raise ValueError(f"row_length: got {row_length}, expected at least 1")
    if not lengths.size:
        return Packing(np.empty(0, np.int64), np.zeros(1, np.int64), row_length)
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest < 1 or longest > row_length:
        raise ValueError(
            f"lengths: got {shortest} to {longest}, expected 1 to the row length of {row_length}"
        )
    order = stable_argsort(longest - lengths)
    row_of = _first_fit(lengths[order].astype(np.int64, copy=False), row_length)
    num_rows = int(row_of.max()) + 1
    # Stable, so that a row's samples stay in the order they were placed in.
    items = order[stable_argsort(row_of)]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=num_rows))])
    return Packing(items, offsets.astype(np.int64, copy=False), row_length)


def stable_argsort(keys: NDArray[np.integer]) -> NDArray[np.int64]:
    """`np.argsort(keys, kind="stable")` of integers from 0 to 2**48 - 1, several times as fast.

    NumPy sorts 16-bit integers by radix and wider ones by comparison, so wide keys are sorted 16
    bits at a time, the lowest first.
    """
    largest = int(keys.max(initial=0))
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    for shift in (16, 32):
        if largest >> shift == 0:
            break
        digits = (keys >> shift).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order


def _first_fit(descending: NDArray[np.int64], row_length: int) -> NDArray[np.int64]:
    """The row of each sample; [n] int64 for lengths sorted from the longest to the shortest."""
    row_of = np.empty(len(descending), np.int64)
    num_large = int(np.searchsorted(-descending, -(row_length // 2), side="left"))
    row_of[:num_large] = np.arange(num_large)
    rows = _Rows(row_length, row_length - descending[:num_large])
    starts = num_large + _group_starts(descending[num_large:])
    stops = np.append(starts, len(descending))[1:]
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        rows.place(descending[start:stop], row_of[start:stop])
    return row_of


def _group_starts(descending: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where a new group of samples begins that are placed together; the first is 0."""
    if not len(descending):
        return np.empty(0, np.int64)
    starts = np.flatnonzero(np.diff(descending, prepend=descending[0] + 1))
    lengths = descending[starts]
    _, bits = np.frexp(lengths)
    octave = bits.astype(np.int64) - 1  # 2**octave is the largest power of two within the length
    parts = 2 * MAX_LENGTHS
    firsts = np.arange(len(starts))
    while len(firsts) > MAX_LENGTHS:
        # Each octave is cut into equal parts, the short lengths' octaves into single lengths.
        parts = parts * 3 // 4
        part = ((lengths - (1 << octave)) * parts) >> octave
        firsts = np.flatnonzero(np.diff(octave * parts + part, prepend=-1))
    return starts[firsts]


class _Rows:
    """Room left in each row, and the largest room in each block of rows."""

    def __init__(self, row_length: int, room: NDArray[np.int64]) -> None:
        self._row_length = row_length
        self._num_rows = len(room)
        self._room = np.zeros((max(1, -(-len(room) // _BLOCK)), _BLOCK), np.int64)
        self._room.reshape(-1)[: len(room)] = room
        self._top = self._room.max(axis=1)

    def place(self, lengths: NDArray[np.int64], row_of: NDArray[np.int64]) -> None:
        """Place samples of one group, longest first, and write their rows to `row_of`."""
        longest, equal = int(lengths[0]), lengths[0] == lengths[-1]
        done = 0
        blocks = np.flatnonzero(self._top >= longest)
        width = 4 + len(lengths) // 64
        while done < len(lengths) and len(blocks):
            # A few blocks are often enough; where they are not, take more at a time.
            some, blocks = blocks[:width], blocks[width:]
            width *= 8
            room = self._room[some]
            counts = room // longest
            where = np.flatnonzero(counts)
            counts = counts.reshape(-1)[where]
            ends = np.cumsum(counts)
            last = int(np.searchsorted(ends, len(lengths) - done))
            if last < len(ends):
                counts = counts[: last + 1]
                counts[last] -= ends[last] - (len(lengths) - done)
                where = where[: last + 1]
            num = int(counts.sum())
            rows = some[where // _BLOCK] * _BLOCK + where % _BLOCK
            row_of[done : done + num] = np.repeat(rows, counts)
            if equal:
                used = counts * longest
            else:
                firsts = np.cumsum(counts) - counts
                used = np.add.reduceat(lengths[done : done + num], firsts)
            room.reshape(-1)[where] -= used
            self._room[some] = room
            self._top[some] = room.max(axis=1)
            done += num
        if done < len(lengths):
            self._open(lengths[done:], row_of[done:])

    def _open(self, lengths: NDArray[np.int64], row_of: NDArray[np.int64]) -> None:
        each = self._row_length // int(lengths[0])
        num_new = -(-len(lengths) // each)
        first, self._num_rows = self._num_rows, self._num_rows + num_new
        row_of[:] = first + np.arange(len(lengths)) // each
        used = np.add.reduceat(lengths, np.arange(0, len(lengths), each))
        missing = -(-self._num_rows // _BLOCK) - len(self._room)
        if missing > 0:
            # Doubling keeps the copying linear.
            extra = max(missing, len(self._room))
            self._room = np.concatenate([self._room, np.zeros((extra, _BLOCK), np.int64)])
            self._top = np.concatenate([self._top, np.zeros(extra, np.int64)])
        self._room.reshape(-1)[first : self._num_rows] = self._row_length - used
        touched = slice(first // _BLOCK, -(-self._num_rows // _BLOCK))
        self._top[touched] = self._room[touched].max(axis=1)
