"""Stopping inside what takes long and can be done anew: loading, evaluating, indexing.

A request to stop reaches each rank at another moment, so the ranks agree at fixed places: long work
calls `stop_point` between two of its parts. Only inside `interruptible` does that do anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from pixelrag.distributed.collectives import agree_max, gather_objects

_asked: Callable[[], str | None] | None = None


class Interrupted(Exception):
    """Raised by `stop_point` on all ranks; the message says who asked."""


@contextlib.contextmanager
def interruptible(asked: Callable[[], str | None] | None) -> Iterator[None]:
    """Let `stop_point` end the body once ``asked`` gives a reason on any rank; None: let it not.

    All ranks enter and leave it together, for `stop_point` is a collective in its body.
    """
    global _asked
    before, _asked = _asked, asked
    try:
        yield
    finally:
        _asked = before


def stop_point() -> None:
    """End what is under way, if a rank was asked to; a collective where `interruptible`.

    Raises:
        Interrupted: on all ranks.
    """
    if _asked is not None:
        stop_where_asked(_asked())


def stop_where_asked(reason: str | None) -> None:
    """End what is under way if any rank has a reason; a collective.

    Raises:
        Interrupted: on all ranks, with the first rank's reason.
    """
    if agree_max([int(reason is not None)])[0]:
        told = gather_objects(reason)
        rank = next(rank for rank, text in enumerate(told) if text is not None)
        raise Interrupted(told[rank] if rank == 0 else f"{told[rank]} (rank {rank})")
