"""Which rows a step trains on: the same whatever the number of processes, and after a resume.

A global batch is named by its number alone, counted over all epochs. What is in it follows from the
plan and the seed; who computes which of its rows follows from their costs and the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pixelrag.data.balance import share_out
from pixelrag.data.pack_plan import PackPlan
from pixelrag.data.sampler import GlobalBatchSampler
from pixelrag.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class StepRows:
    """One rank's part of a global batch, and what the whole of it holds.

    Attributes:
        position: number of the batch, over all epochs.
        epoch: the epoch that the rows are of.
        micro_batches: rows of that epoch, for each micro-batch; as many on every rank, some of
            them perhaps empty.
        num_supervised: tokens that are learnt from in the global batch: what its loss is divided
            by. No rank needs to ask the others for it.
        num_tokens: tokens of the global batch, padding not counted.
        num_rows: rows of the global batch.
    """

    position: int
    epoch: int
    micro_batches: list[list[int]]
    num_supervised: int
    num_tokens: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A stretch of a sample that was trained on.

    Attributes:
        position: number of the global batch, over all epochs.
        epoch: from 0.
        row: row of the epoch.
        sample_id: where the sample comes from.
        start, stop: its tokens that were in the row.
    """

    position: int
    epoch: int
    row: int
    sample_id: str
    start: int
    stop: int


class PackedSampler:
    """Endless iterator over this rank's part of each global batch, epoch after epoch.

    Args:
        plan: the rows.
        global_batch_rows: rows of an optimizer step over all ranks.
        micro_batch_rows: rows that a rank computes at once, at most.
        rank, world_size: this process and how many there are.
        drop_last: leave out an epoch's last batch if it is smaller than the others.

    Raises:
        ConfigError: an argument is out of its range.
        DataError: with `drop_last`, there are too few rows for a batch.
    """

    def __init__(
        self,
        plan: PackPlan,
        global_batch_rows: int,
        micro_batch_rows: int,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is not one of {world_size} (expected 0 to world - 1)")
        if micro_batch_rows < 1:
            raise ConfigError(
                f"batch.per_device_batch_size: got {micro_batch_rows}, expected at least 1"
            )
        self.plan = plan
        self.micro_batch_rows = micro_batch_rows
        self.rank = rank
        self.world_size = world_size
        # The order of rows does not depend on ranks, so it is drawn as for one.
        self._order = GlobalBatchSampler(
            plan.num_rows, global_batch_rows, seed=plan.seed, drop_last=drop_last
        )

    @property
    def position(self) -> int:
        """Global batches served so far, over all epochs."""
        return self._order.position

    @property
    def batches_per_epoch(self) -> int:
        """Global batches in one pass over the rows."""
        return self._order.batches_per_epoch

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._order.epoch

    def global_batch(self, position: int) -> NDArray[np.int64]:
        """Rows of a global batch, of epoch `position // batches_per_epoch`; [R] int64."""
        return self._order.global_batch(position)

    def step(self, position: int) -> StepRows:
        """This rank's part of a global batch.

        Args:
            position: number of the batch, from 0, counted over all epochs.
        """
        epoch = position // self.batches_per_epoch
        of_epoch, rows = self.plan.epoch(epoch), self.global_batch(position)
        shares = share_out(of_epoch.costs[rows], self.world_size, self.micro_batch_rows)
        return StepRows(
            position,
            epoch,
            [rows[places].tolist() for places in shares[self.rank]],
            int(of_epoch.supervised[rows].sum()),
            int(of_epoch.tokens[rows].sum()),
            len(rows),
        )

    def __iter__(self) -> Iterator[StepRows]:
        while True:
            step = self.step(self.position)
            # Counted before it is handed over: a state taken while the batch is in use says that
            # the next one is to follow.
            self._order.position += 1
            yield step

    def ledger(self, start: int, stop: int) -> Iterator[LedgerEntry]:
        """Every sample of the global batches from `start` to before `stop`, on all ranks.

        Nothing is recorded during training for this: what was consumed up to a checkpoint is
        `ledger(0, state["position"])`.
        """
        pieces, store = self.plan.pieces, self.plan.store
        for position in range(start, stop):
            epoch = position // self.batches_per_epoch
            of_epoch = self.plan.epoch(epoch)
            for row in self.global_batch(position).tolist():
                for piece in of_epoch.row(row).tolist():
                    first = int(pieces.starts[piece])
                    yield LedgerEntry(
                        position,
                        epoch,
                        row,
                        store.sample_id(int(pieces.samples[piece])),
                        first,
                        first + int(pieces.lengths[piece]),
                    )

    def state_dict(self, position: int | None = None) -> dict[str, object]:
        """Where the sampler stands, for a checkpoint. The rank and the world are not part of it.

        Args:
            position: batches really trained on, where that is not what the sampler has handed out
                (a loader that prefetches runs ahead of training).
        """
        order = self._order
        return {
            "position": order.position if position is None else position,
            "global_batch_rows": order.global_batch_size,
            "drop_last": order.drop_last,
            **self.plan.identity(),
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on exactly where `state` was taken, on this or another number of processes.

        Raises:
            CheckpointError: the state is of other data, rows, batch size or seed, with which its
                batches cannot be continued.
        """
        ours = self.state_dict()
        if state.keys() != ours.keys():
            raise CheckpointError(
                f"the sampler's state has {sorted(state)}, expected {sorted(ours)}; "
                "it was written by another version of pixelrag"
            )
        differing = [
            f"{name} was {_short(state[name])}, is {_short(ours[name])}"
            for name in ours
            if name != "position" and state[name] != ours[name]
        ]
        position = state["position"]
        if not isinstance(position, int) or position < 0:
            differing.append(f"position is {position!r}, expected 0 or more")
        if differing or not isinstance(position, int):
            raise CheckpointError(
                "the checkpoint's batches cannot be continued: "
                + ", ".join(differing)
                + ". Restore the data and the settings that it was trained with, or start anew "
                "with checkpoint.resume: never"
            )
        self._order.position = position


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:12] + "..."
