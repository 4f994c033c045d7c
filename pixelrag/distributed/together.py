"""One rank's error becomes every rank's: all stop at the same place, and rank 0 tells it once.

A rank that raises alone leaves the others waiting in their next collective, to end there with a
message about a lost connection that says nothing of the cause.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pixelrag.distributed.collectives import agree_max, gather_objects, told_by_main
from pixelrag.errors import EngineError, PixelragError


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Leave the body normally on all ranks, or raise on all of them; a collective.

    The body itself must not start a collective that another rank's failure would keep from ending.

    Raises:
        PixelragError: what the first rank that failed has raised; only rank 0 prints it. A fault
            that is not a `PixelragError` keeps its traceback on its own rank.
    """
    raised: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised again below, once all ranks know
        raised = error
    if not agree_max([int(raised is not None)])[0]:
        return
    reports = gather_objects(None if raised is None else _report(raised))
    if isinstance(raised, PixelragError):
        raise told_by_main(raised)
    if raised is not None:
        raise raised
    rank, (kind, message) = next((r, told) for r, told in enumerate(reports) if told is not None)
    raise told_by_main(kind(f"rank {rank}: {message}"))


def _report(error: Exception) -> tuple[type[PixelragError], str]:
    if not isinstance(error, PixelragError):
        text = f"{type(error).__name__}: {error}; the traceback stands in that rank's output"
        return EngineError, text
    # Errors derived from those of `pixelrag.errors` may want other arguments.
    kinds = (kind for kind in type(error).__mro__ if kind.__module__ == PixelragError.__module__)
    return next(kinds), str(error)
