"""Writes checkpoints beside the training: a step waits for the snapshot, never for the disk.

`save` copies parameters and optimizer state to host memory, each tensor whole and on one rank, so
that every rank holds and writes about 1/W of the checkpoint. A thread of each rank then writes its
files. Rank 0's thread waits until all ranks have reported through the store that they met in, seals
the folder (hashes, manifest, fsync) and renames it. Threads run no collectives: the training's must
not be disturbed. A failure is found at the next step border, on all ranks.
"""

from __future__ import annotations

import datetime
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pixelrag.config.base import JobConfig, dump
from pixelrag.distributed.collectives import agree_max, from_main, gather_objects, told_by_main
from pixelrag.engine.base import Engine
from pixelrag.errors import CheckpointError, PixelragError
from pixelrag.train import atomic
from pixelrag.train.averaging import averaging_of
from pixelrag.train.checkpoint import checkpoint_dir, rotate
from pixelrag.train.run_state import RunState, flat_optimizer, part_name, take_averages
from pixelrag.train.state import save_tensors

logger = logging.getLogger("pixelrag")

# A rank that is late with its files has a slow disk; one that is this late is gone.
_LATEST = datetime.timedelta(hours=2)


class Saver:
    """Owns the checkpoints of a run. All methods but `has_failed` and `settle` are
    collective.

    Attributes:
        saved_step: step of the newest whole checkpoint (rank 0).
        stall_seconds: that steps have waited for saves so far.

    Args:
        output_dir: the run's folder, on storage that all ranks share.
        engine: whose state is saved.
        config: the job's configuration, written into every checkpoint.
        tell: shows the user a line.
    """

    def __init__(
        self, output_dir: Path, engine: Engine, config: JobConfig, tell: Callable[[str], None]
    ) -> None:
        self._output = output_dir
        self._engine = engine
        self._config = config
        self._tell = tell
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._best_step: int | None = None
        self._waited: list[float] = []
        self._wrote: list[float] = []
        self.saved_step = 0
        self.stall_seconds = 0.0
        world_size = engine.world_size
        store = dist.distributed_c10d._get_default_store() if world_size > 1 else None
        self._store = None if store is None else store.clone()  # type: ignore[attr-defined]  # as in whereabouts
        if self._store is not None:
            self._store.set_timeout(_LATEST)
        # Equal on all ranks; tells this save's posts from those of one that failed before.
        self._count = 0

    @property
    def has_failed(self) -> bool:
        """Whether this rank's last checkpoint could not be written; cheap."""
        return self._error is not None

    def figures(self) -> dict[str, float]:
        """Seconds that steps waited for the saves since the last call, and that writing took.

        A checkpoint being written counts once it is whole; the writing is rank 0's.
        """
        found = {}
        for name, seconds in (("stall", self._waited), ("write", self._wrote)):
            if seconds:
                found[f"checkpoint/{name}_seconds"] = sum(seconds)
                seconds.clear()
        return found

    def save(self, state: RunState) -> None:
        """Begin the checkpoint of a step, after the one before has been written.

        Raises:
            CheckpointError: the one before failed, there is no space, or another run writes there.
        """
        started = time.monotonic()
        self.finish()
        final = checkpoint_dir(self._output, state.step)
        owner = owner_by_size(self._engine)
        parts = {"model": self._engine.full_parameters(trainable_only=True, owner=owner)}
        averages, moments = averaging_of(self._config), self._config.checkpoint.save_optimizer
        if averages or moments:
            optimizer = self._engine.optimizer_state(owner=owner)
            if averages:
                parts["ema"] = take_averages(optimizer)
            if moments:
                parts["optimizer"] = flat_optimizer(optimizer)
        sizes = [t.numel() * t.element_size() for part in parts.values() for t in part.values()]
        total = sum(gather_objects(sum(sizes)))
        from_main(lambda: atomic.begin(final, total))
        self._count += 1
        self._best_step = state.best_step
        waited = time.monotonic() - started
        arguments = (final, state, parts, waited)
        self._thread = threading.Thread(
            target=self._write, args=arguments, name="pixelrag-saver", daemon=True
        )
        self._thread.start()
        if not self._config.checkpoint.async_save:
            self.finish()
        self._waited.append(time.monotonic() - started)
        self.stall_seconds += self._waited[-1]

    def finish(self) -> None:
        """Wait until the last checkpoint is whole.

        Raises:
            CheckpointError: on all ranks, when it could not be written; earlier ones are as before.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if agree_max([int(self.has_failed)])[0]:
            self.fail()

    def settle(self, seconds: float = 30.0) -> None:
        """Give a checkpoint under way a moment to become whole, when training ends by an error.

        No collective, and no wait without end: the ranks that it needs may be gone.
        """
        if self._thread is not None:
            self._thread.join(seconds)

    def fail(self) -> None:
        """Raise on all ranks what made a rank's writing fail.

        Raises:
            CheckpointError: names the rank.
        """
        told = gather_objects(None if self._error is None else str(self._error))
        rank, text = next((r, text) for r, text in enumerate(told) if text is not None)
        raise told_by_main(CheckpointError(text if rank == 0 else f"rank {rank}: {text}"))

    def _write(
        self,
        final: Path,
        state: RunState,
        parts: Mapping[str, Mapping[str, torch.Tensor]],
        waited: float,
    ) -> None:
        started = time.monotonic()
        reports: list[str] | None = None
        try:
            with atomic.disk_errors(final):
                self._write_own(atomic.hidden(final, "tmp"), parts)
            if self._engine.rank == 0:
                reports = self._reports()
                self._commit(final, state, reports)
                took = time.monotonic() - started
                self._wrote.append(took)
                waited += 0.0 if self._config.checkpoint.async_save else took
                self._tell(f"saved {final} (the step waited {waited:.2f} s, the disk {took:.2f} s)")
                self.saved_step = state.step
            else:
                self._post("")
        except Exception as error:
            self._error = error
            if self._engine.rank == 0:
                if reports is None:
                    self._reports()  # a rank that still writes would bring the folder back
                atomic.abandon(final)
            else:
                self._post(str(error) or type(error).__name__)
            if not isinstance(error, (PixelragError, OSError)):
                logger.exception("%s could not be written", final)

    def _write_own(self, folder: Path, parts: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        rank, world_size = self._engine.rank, self._engine.world_size
        for kind, tensors in parts.items():
            save_tensors(folder / part_name(kind, rank, world_size), tensors)

    def _commit(self, final: Path, state: RunState, reports: list[str]) -> None:
        for rank, failure in enumerate(reports, start=1):
            if failure:
                raise CheckpointError(f"rank {rank}: {failure}")
        folder = atomic.hidden(final, "tmp")
        (folder / "state.json").write_text(json.dumps(asdict(state)), encoding="utf-8")
        (folder / "config.yaml").write_text(dump(self._config), encoding="utf-8")
        info: dict[str, Any] = {
            "step": state.step,
            "world_size": self._engine.world_size,
            "engine": self._engine.name,
        }
        atomic.publish(final, info)
        options = self._config.checkpoint
        rotate(
            self._output,
            options.keep_last,
            keep_every=options.keep_every,
            keep_step=self._best_step if options.keep_best else None,
        )

    def _reports(self) -> list[str]:
        """What each other rank posted once it was done with the folder; "" where all went well."""
        keys = [self._key(rank) for rank in range(1, self._engine.world_size)]
        if self._store is None:  # there are no others
            return []
        reports = [self._store.get(key).decode() for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return reports

    def _post(self, failure: str) -> None:
        assert self._store is not None  # of a rank that is not the only one
        self._store.set(self._key(self._engine.rank), failure)

    def _key(self, rank: int) -> str:
        return f"pixelrag/saved/{self._count}/{rank}"


def owner_by_size(engine: Engine) -> Callable[[str], int]:
    """Deal the trained parameters out in order, so that every rank gets about as many numbers."""
    sizes = {n: torch.Size(engine.shape_of(p)).numel() for n, p in engine.named_trainable()}
    total = sum(sizes.values())
    owners: dict[str, int] = {}
    before = 0
    for name, size in sizes.items():
        middle = before + size / 2
        owners[name] = min(engine.world_size - 1, int(middle * engine.world_size / total))
        before += size
    return owners.__getitem__
