"""How many cores a rank may count on: its host's, or what the launcher bound it to."""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger("pixelrag")


def cores_per_rank() -> int:
    """Cores of this process's share of its host, at least 1.

    A launcher that binds ranks to cores has made the shares; otherwise a host's ranks share alike.
    """
    mine = len(os.sched_getaffinity(0))
    if mine < (os.cpu_count() or 1):
        return mine
    return max(1, mine // int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1))))


def set_threads() -> None:
    """Let torch use this rank's share of the cores, unless OMP_NUM_THREADS says otherwise.

    Ranks that each use all cores of a host fight for them; one thread alone wastes the rest.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), cores_per_rank()))


def bounded_workers(wanted: int) -> int:
    """Data workers of this rank: what was asked for, and no more than its cores."""
    cores = cores_per_rank()
    if wanted > cores:
        logger.warning(
            "data.num_workers %d: this rank has %d cores, so it starts %d", wanted, cores, cores
        )
    return min(wanted, cores)
