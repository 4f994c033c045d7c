"""Agrees, before a step, on the sequence of forwards that every rank will run.

Sharded parameters make a forward pass a collective, so a rank with fewer rows, fewer chunks or
no images must still make the same calls. One small exchange of integers tells each rank how many
chunks to run, how far to pad what is gathered, and which of its chunks need a zero-weighted
vision pass because another rank has images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pixelrag.distributed.collectives import exchange
from pixelrag.errors import DataError

Chunk = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Side:
    """One role's chunks on this rank and what all ranks agreed about them."""

    role: str
    chunks: list[Chunk]
    num_rows: list[int]  # by rank
    num_padding_chunks: int
    touch_vision: bool
    num_tokens: int  # of all ranks' real rows

    @property
    def max_rows(self) -> int:
        """Rows of the fullest rank: the length to which gathered tensors are padded."""
        return max(self.num_rows)

    def calls(self) -> list[tuple[Chunk, bool]]:
        """Each forward to run: the chunk, and whether its output counts."""
        own = [(chunk, True) for chunk in self.chunks]
        # A padding call may run on any valid input; its output gets a zero gradient.
        return own + [(self.chunks[0], False)] * self.num_padding_chunks

    def must_touch(self, chunk: Chunk) -> bool:
        """Whether this forward needs a zero-weighted vision pass."""
        return self.touch_vision and chunk.get("pixel_values") is None


def rows_of(chunk: Chunk) -> int:
    """Number of rows in a chunk."""
    return len(chunk["attention_mask"])


def agree_on_schedule(
    roles: Mapping[str, list[Chunk]],
    num_real: Sequence[int],
    *,
    rank: int,
    touches_every_chunk: bool,
) -> tuple[Side, ...]:
    """Return the agreed sides, one a role; a collective (one all-gather of integers).

    Args:
        roles: this rank's chunks by role, at least one of each (a rank without rows passes a
            filler); all ranks name the same roles in the same order.
        num_real: how many rows of each role count; 0 on a rank that only fills.
        rank: this rank.
        touches_every_chunk: the engine wants every chunk to use the same submodules.

    Raises:
        DataError: on all ranks, when some rank has no chunk to run at all.
    """
    count = len(roles)
    images = [any("pixel_values" in chunk for chunk in chunks) for chunks in roles.values()]
    tokens = [
        _num_tokens(chunks) if real else 0
        for chunks, real in zip(roles.values(), num_real, strict=True)
    ]
    mine = [*map(len, roles.values()), *num_real, *map(int, images), *tokens]
    table = exchange(mine)
    empty = [r for r, row in enumerate(table) if 0 in row[:count]]
    if empty:
        raise DataError(
            f"rank {rank}: ranks {empty} have no {' or '.join(roles)} chunk in this step; every "
            "rank must bring at least a filler row (use a global batch of at least one row a rank)"
        )
    any_images = [any(row[2 * count + i] for row in table) for i in range(count)]
    if touches_every_chunk:
        any_images = [any(any_images)] * count
    return tuple(
        Side(
            role,
            chunks,
            [row[count + i] for row in table],
            max(row[i] for row in table) - len(chunks),
            any_images[i],
            sum(row[3 * count + i] for row in table),
        )
        for i, (role, chunks) in enumerate(roles.items())
    )


def side_of_fixed(role: str, num_rows: int) -> Side:
    """A side whose outputs are known, so that nothing runs; a collective."""
    return Side(role, [], [row[0] for row in exchange([num_rows])], 0, False, 0)


def _num_tokens(chunks: list[Chunk]) -> int:
    masks = ("attention_mask", "target_mask")
    return sum(int(chunk[mask].sum()) for chunk in chunks for mask in masks if mask in chunk)
