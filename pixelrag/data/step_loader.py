"""Serves steps in order, from this process or from workers that prepare them ahead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset

from pixelrag.data.packed_batch import PackedStep, PackedSteps
from pixelrag.distributed.cores import bounded_workers
from pixelrag.errors import DataError, PixelragError


def load_steps(
    steps: PackedSteps,
    start: int = 0,
    *,
    num_workers: int = 0,
    prefetch_factor: int = 2,
    timeout_seconds: float = 300,
) -> Iterator[PackedStep]:
    """Endless steps from number `start` on.

    Args:
        steps: makes a step of its number.
        start: number of the first one, over all epochs.
        num_workers: processes that prepare steps ahead, at most one a core; 0 = none beside this
            one.
        prefetch_factor: steps that each of them prepares ahead.
        timeout_seconds: a worker that gives nothing for so long is taken for dead.

    Raises:
        DataError: a worker gave nothing for `timeout_seconds`, or died.
    """
    num_workers = bounded_workers(num_workers)
    if num_workers == 0:
        return (steps[position] for position in itertools.count(start))
    loader = DataLoader(
        _Carried(steps),
        batch_size=None,  # a number is a whole step already
        sampler=_From(start),
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        timeout=timeout_seconds,
        pin_memory=torch.cuda.is_available(),
        # Its own: the workers' seed must not be drawn from the stream that dropout draws from.
        generator=torch.Generator(),
    )
    return _raising(iter(loader), num_workers, timeout_seconds)


class _From:
    """The numbers from `start` on."""

    def __init__(self, start: int) -> None:
        self._start = start

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self._start)


class _Carried(Dataset[PackedStep | PixelragError]):
    """Hands errors over as values: a worker's loader would bury them under its own traceback."""

    def __init__(self, steps: PackedSteps) -> None:
        self._steps = steps

    def __getitem__(self, position: int) -> PackedStep | PixelragError:
        try:
            return self._steps[position]
        except PixelragError as error:
            return error


def _raising(
    steps: Iterator[PackedStep | PixelragError], num_workers: int, timeout_seconds: float
) -> Iterator[PackedStep]:
    while True:
        try:
            step = next(steps)
        except (RuntimeError, OSError, EOFError) as error:
            # What the loader raises for workers that stall, die, or die while they hand over.
            reason = str(error).strip() or type(error).__name__
            what = (
                f"gave nothing for {timeout_seconds:g} seconds (data.worker_timeout_seconds)"
                if "timed out" in reason
                else f"failed: {reason.splitlines()[-1]}"
            )
            raise DataError(
                f"One of {num_workers} data workers {what}. Notebooks and containers often have "
                "too little shared memory for them; set data.num_workers: 0 to prepare batches in "
                "the training process"
            ) from error
        if isinstance(step, PixelragError):
            raise step
        yield step
