"""Shares rows out so that every rank has about as much to compute, whatever their number."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def share_out(
    costs: NDArray[np.float64], num_ranks: int, rows_per_micro_batch: int
) -> list[list[list[int]]]:
    """Share the rows of a global batch out over ranks and micro-batches, by cost.

    The costliest row goes first, each to the micro-batch with the least cost so far that has a
    place left (Graham 1969). Micro-batches of like cost are then computed at the same time, and
    the ranks take turns in having the costliest.

    Args:
        costs: cost of each row, [R].
        num_ranks: how many ranks.
        rows_per_micro_batch: places of a micro-batch.

    Returns:
        `shares[rank][step]`, lists of row numbers from 0 to R - 1, ascending. All ranks have the
        same number of micro-batches, the fewest that hold all rows; some may be empty.
    """
    num_steps = max(1, -(-len(costs) // (num_ranks * rows_per_micro_batch)))
    slots: list[list[int]] = [[] for _ in range(num_steps * num_ranks)]
    loads = [0.0] * len(slots)
    heap = [(0.0, slot) for slot in range(len(slots))]
    for row in np.argsort(-np.asarray(costs), kind="stable").tolist():
        load, slot = heapq.heappop(heap)
        slots[slot].append(row)
        loads[slot] = load + float(costs[row])
        if len(slots[slot]) < rows_per_micro_batch:
            heapq.heappush(heap, (loads[slot], slot))
    order = sorted(range(len(slots)), key=lambda slot: (-loads[slot], slot))
    totals = [0.0] * num_ranks
    shares: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for step in range(num_steps):
        # The rank with the least so far takes the costliest of this step.
        ranks = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, slot in zip(ranks, order[step * num_ranks :][:num_ranks], strict=True):
            shares[rank].append(sorted(slots[slot]))
            totals[rank] += loads[slot]
    return shares


def imbalance(costs: NDArray[np.float64], shares: Sequence[Sequence[Sequence[int]]]) -> float:
    """The costliest rank's cost over the mean rank's: 1 is perfect."""
    totals = [sum(float(costs[row]) for step in rank for row in step) for rank in shares]
    return max(totals) * len(totals) / sum(totals)
