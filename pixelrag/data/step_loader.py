"""Serves batches in order, from this process or from workers that prepare them ahead."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from pixelrag.data.packed_batch import PackedStep, PackedSteps
from pixelrag.distributed.cores import bounded_workers
from pixelrag.errors import DataError, PixelragError

Key_ = TypeVar("Key_", contravariant=True)
Batch_ = TypeVar("Batch_", covariant=True)


class Maker(Protocol[Key_, Batch_]):
    """Makes a batch of what names it; picklable."""

    def __getitem__(self, key: Key_, /) -> Batch_: ...


def load_steps(
    steps: PackedSteps,
    start: int = 0,
    *,
    num_workers: int = 0,
    prefetch_factor: int = 2,
    timeout_seconds: float = 300,
) -> Iterator[PackedStep]:
    """Endless steps from number `start`, counted over all epochs, on; see `load_ahead`."""
    return load_ahead(
        steps,
        itertools.count(start),
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        timeout_seconds=timeout_seconds,
    )


def load_ahead(
    maker: Maker[Key_, Batch_],
    keys: Iterable[Key_],
    *,
    num_workers: int,
    prefetch_factor: int,
    timeout_seconds: float,
) -> Iterator[Batch_]:
    """The batches of `keys`, in their order.

    Args:
        maker: makes them.
        keys: name them; read ahead of what is served.
        num_workers: processes that prepare batches ahead, at most one a core; 0 = none beside this
            one.
        prefetch_factor: batches that each of them prepares ahead.
        timeout_seconds: a worker that gives nothing for so long is taken for dead.

    Raises:
        DataError: a worker gave nothing for `timeout_seconds`, or died.
    """
    num_workers = bounded_workers(num_workers)
    if num_workers == 0:
        return (maker[key] for key in keys)
    loader: DataLoader[Any] = DataLoader(
        _Carried(maker),
        batch_size=None,  # a key names a whole batch already
        sampler=keys,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        timeout=timeout_seconds,
        pin_memory=torch.cuda.is_available(),
        # Its own: the workers' seed must not be drawn from the stream that dropout draws from.
        generator=torch.Generator(),
    )
    return _raising(iter(loader), num_workers, timeout_seconds)


class _Carried(Dataset[Any]):
    """Hands errors over as values: a worker's loader would bury them under its own traceback."""

    def __init__(self, maker: Maker[Any, Any]) -> None:
        self._maker = maker

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._maker[key]
        except PixelragError as error:
            return error


def _raising(batches: Iterator[Any], num_workers: int, timeout_seconds: float) -> Iterator[Any]:
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
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
        if isinstance(batch, PixelragError):
            raise batch
        yield batch
