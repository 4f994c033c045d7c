"""Which rows make up a batch: the same ones however many processes there are, and after a resume.

An order (`pixelrag.data.orders`) names the rows of a global batch by its number; mostly an epoch is
a permutation of all rows that depends on (seed, epoch) alone. A rank's part is a slice of the
batch; or, where the rows' costs are known, as many rows as that, of about equal cost on all ranks:
what is summed over a batch does not depend on who holds which row. So any batch of any epoch can be
named without walking there: resuming costs one permutation, and may go on with another number of
processes. This matters more than usual here, since in contrastive training a row's loss depends on
which other rows are in its batch.
"""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelrag.data.balance import share_out
from pixelrag.data.orders import BatchOrder, PooledOrder
from pixelrag.errors import CheckpointError, ConfigError, DataError

logger = logging.getLogger("pixelrag")


class GlobalBatchSampler:
    """Endless iterator over this rank's part of each global batch, epoch after epoch.

    Every row is served exactly once an epoch (with `drop_last`, all but the remainder). The last
    batch of an epoch may be smaller, and then leave ranks with fewer rows than others or with none:
    their part is an empty list.

    Args:
        num_rows: rows of the dataset.
        global_batch_size: rows of a batch over all ranks.
        rank, world_size: this process and how many there are.
        seed: of the permutations, not negative.
        drop_last: leave out an epoch's last batch if it is smaller than the others.
        order: names the rows of each batch; None = a `PooledOrder` of the arguments above, which
            it must have been made of.
        costs: of each row, above 0, equal on all ranks, [num_rows]; None = ranks get slices.

    Raises:
        ConfigError: the batch is smaller than the world, or an argument is out of its range.
        DataError: there are too few rows for a batch.
    """

    def __init__(
        self,
        num_rows: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        drop_last: bool = False,
        *,
        order: BatchOrder | None = None,
        costs: NDArray[np.float64] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is not one of {world_size} (expected 0 to world - 1)")
        if global_batch_size < world_size:
            raise ConfigError(
                f"the global batch has {global_batch_size} rows for {world_size} processes, fewer "
                "than one each; raise batch.per_device_batch_size or start fewer processes"
            )
        if seed < 0:
            raise ConfigError(f"seed: got {seed}, expected 0 or more")
        least = global_batch_size if drop_last else world_size
        if num_rows < least:
            remedy = (
                "lower batch.per_device_batch_size, or set data.drop_last: false"
                if drop_last
                else "add rows or start fewer processes"
            )
            raise DataError(
                f"the data has {num_rows} usable rows, expected at least {least}: "
                + ("one global batch" if drop_last else "one for each process")
                + f"; {remedy}"
            )
        if num_rows < global_batch_size:
            logger.warning(
                "The data has %d rows, fewer than the global batch of %d: every batch is the whole "
                "data",
                num_rows,
                global_batch_size,
            )
        self.num_rows = num_rows
        self.global_batch_size = global_batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.drop_last = drop_last
        self.position = 0
        """Global batches served so far, over all epochs."""
        self._costs = costs
        self.order = order or PooledOrder(num_rows, global_batch_size, seed, drop_last=drop_last)

    @property
    def batches_per_epoch(self) -> int:
        """Global batches in one pass over the data."""
        return self.order.batches_per_epoch

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self.position // self.batches_per_epoch

    def global_batch(self, position: int) -> NDArray[np.int64]:
        """The rows of a global batch.

        Args:
            position: number of the batch, from 0, counted over all epochs.

        Returns:
            Row indices, [global_batch_size] int64, or fewer in an epoch's last batch.
        """
        return self.order.batch(position)

    def local_batch(self, position: int) -> list[int]:
        """This rank's part of a global batch, in the order of the batch.

        Without costs contiguous, in sizes and order as `np.array_split`; with them shared out by
        `share_out`, no rank having more rows than without.
        """
        rows = self.global_batch(position)
        if self._costs is not None and self.world_size > 1:
            most = -(-len(rows) // self.world_size)
            shares = share_out(self._costs[rows], self.world_size, most)
            return rows[shares[self.rank][0]].tolist()
        share, extra = divmod(len(rows), self.world_size)
        start = self.rank * share + min(self.rank, extra)
        return rows[start : start + share + (self.rank < extra)].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            batch = self.local_batch(self.position)
            # Counted before it is handed over: a state taken while the batch is in use says that
            # the next one is to follow.
            self.position += 1
            yield batch

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """Where the sampler stands, for a checkpoint. The rank and the world are not part of it.

        Args:
            position: batches really trained on, where that is not what the sampler has handed out
                (a loader that prefetches runs ahead of training).
        """
        position = self.position if position is None else position
        return {"position": position, **self._identity(), **self.order.place(position)}

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": self.num_rows,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            "drop_last": int(self.drop_last),
            **self.order.identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken, on this or another number of processes.

        Raises:
            CheckpointError: the state is of other data, batch size or seed, with which its batches
                cannot be continued.
        """
        ours = self._identity()
        told = self.state_dict().keys() - ours.keys()
        if state.keys() != ours.keys() | told:
            raise CheckpointError(
                f"the sampler's state has {sorted(state)}, expected {sorted(ours.keys() | told)}; "
                "it was written under other options of data, or by another version of pixelrag"
            )
        differing = [
            f"{name} was {state[name]}, is {ours[name]}"
            for name in ours
            if state[name] != ours[name]
        ]
        if differing:
            raise CheckpointError(
                "the checkpoint's batches cannot be continued: "
                + ", ".join(differing)
                + ". Restore the data and the settings that it was trained with, or start anew "
                "with checkpoint.resume: never"
            )
        self.position = state["position"]
