"""Renews the knowledge base beside the training: starts, watches and retries refreshes.

    idle -> snapshot -> encoding -> building -> validating -> published
                any error -> waiting (back-off) -> encoding ... -> failed(reason)

Lives on rank 0 alone. Nothing here waits: `poll` looks at a process and a file. Whatever happens
to the workers, the generation in use stays as it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pixelrag.errors import IndexError_, PixelragError
from pixelrag.retrieval import durable
from pixelrag.retrieval import refresh_spec as files
from pixelrag.retrieval.background import end, last_words, launch
from pixelrag.retrieval.coordinator import PERMANENT
from pixelrag.retrieval.generation import MANIFEST, Manifest, say_once
from pixelrag.retrieval.generations import WORK, Generations
from pixelrag.retrieval.refresh_spec import RefreshSpec, read_json
from pixelrag.retrieval.refresh_status import Status
from pixelrag.retrieval.reuse import reuse, reuse_earlier

logger = logging.getLogger("pixelrag")

_WAIT_SECONDS = 0.05
# The coordinator renews its state file 20 times a second, but a machine may be very busy.
_SILENT_SECONDS = 120.0


class Refresher:
    """Runs refreshes, one at a time.

    Args:
        generations: where they go; held by this run (`Generations.owned`).
        recipe: what every refresh has in common; `generation` and `step` are filled in.
        retries: further attempts after a failure that may pass (a killed or hung worker, a full
            disk); what would fail again fails at once.
        retry_seconds: pause before the first of them, doubled for each further one.
        clock: seconds, monotonic; tests pass their own.
    """

    def __init__(
        self,
        generations: Generations,
        recipe: RefreshSpec,
        *,
        retries: int = 2,
        retry_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._generations = generations
        self._recipe = recipe
        self._retries = retries
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._status = Status()
        self._nice = recipe.nice
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._retry_at = 0.0
        self._seen = (0, 0.0)  # time stamp of the state file, and when it was new

    @property
    def status(self) -> Status:
        """As of the last `poll`."""
        return self._status

    def begin(self, step: int) -> Path:
        """Open a refresh; returns the folder where its snapshot goes, as `weights.safetensors`.

        Shards that an interrupted refresh left are used if spec and snapshot prove to be the same.

        Raises:
            IndexError_: one is in flight.
            OSError: the folder cannot be made; `fail` then ends the refresh.
        """
        if self._status.busy:
            raise IndexError_(
                f"generation {self._status.generation} is being made; one refresh at a time"
            )
        number = self._generations.newest() + 1
        for other in self._generations.parts():
            sealed = (self._generations.part(other) / MANIFEST).exists()
            if other != number or sealed:
                self._generations.discard_part(other)
        self._began = self._clock()
        self._status = Status("snapshot", number, step)
        work = self._generations.part(number) / WORK
        work.mkdir(parents=True, exist_ok=True)
        # A spec vouches for the snapshot beside it, a seal for both: `resume` relies on that.
        (work / files.SPEC).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.replace(work / files.SEALED, work / files.SEALED_BEFORE)
        return work

    def start(
        self,
        folder: Path,
        step: int,
        *,
        like: Path | None = None,
        earlier: bool = False,
        **circumstances: Any,
    ) -> None:
        """Hand the snapshot in ``folder`` to the workers.

        Args:
            folder: what `begin` returned.
            step: as given to `begin`.
            like: a generation of the same vectors, see `reuse`; if it is none, the refresh fails.
            earlier: take the vectors of a generation that is here already, where they are the
                same: for the first of a run, which may begin in the folder of another.
            circumstances: `devices` and `nice` of this refresh alone, where the training waits
                for it and needs neither.

        Raises:
            IndexError_: `begin` was not called for it, or there is no snapshot.
        """
        status = self._status
        work = self._generations.part(status.generation) / WORK
        if status.state != "snapshot" or (folder, step) != (work, status.step):
            raise IndexError_(f"start({folder}, {step}) without begin({step})")
        if not (folder / files.WEIGHTS).exists():
            raise IndexError_(f"{folder}: no {files.WEIGHTS}; save the snapshot first")
        self._nice = circumstances.get("nice", self._recipe.nice)
        try:
            witness = folder / files.TRAINING
            spec = replace(
                self._recipe,
                generation=status.generation,
                step=step,
                witness=durable.sha256(witness) if witness.exists() else None,
                **circumstances,
            )
            spec.write(folder)
            if like is not None:
                reuse(like, work.parent, spec)
            elif earlier:
                reuse_earlier(self._generations, work.parent, spec)
        except (OSError, PixelragError) as error:
            self._attempt_failed(str(error), permanent=True)  # the snapshot is lost with it
            return
        self._launch()

    def secure(self) -> None:
        """Force the snapshot in flight onto the disk, for a checkpoint will count on it."""
        work = self._generations.part(self._status.generation) / WORK
        for file in (work / files.WEIGHTS, work / files.TRAINING):
            if self._status.busy and file.exists():
                durable.fsync(file)

    def resume(self, step: int) -> bool:
        """Go on with what an earlier process of this run left; whether there was something.

        Args:
            step: where the run goes on; what came from later snapshots is deleted, for the run
                will come to them anew.
        """
        self._generations.empty_trash()
        for number in self._generations.drop_after(step):
            logger.warning("generation %d is of a step after %d; deleted", number, step)
        for number in self._generations.parts():
            part = self._generations.part(number)
            snapshot_step = self._resumable(part, number)
            if snapshot_step is None or snapshot_step > step or self._status.busy:
                # Of a later step, or killed in the next snapshot: its shards are kept in case the
                # same snapshot comes again.
                if snapshot_step is None and not self._in_snapshot(part, number):
                    self._generations.discard_part(number)
                continue
            self._began = self._clock()
            self._nice = self._recipe.nice
            self._status = Status("encoding", number, snapshot_step)
            logger.info(
                "generation %d: going on with the refresh of step %d", number, snapshot_step
            )
            self._launch()
        return self._status.busy

    def _in_snapshot(self, part: Path, number: int) -> bool:
        """Whether a process was killed between `begin` and `start` over the shards of another."""
        work, following = part / WORK, self._generations.newest() + 1
        sealed_before = (work / files.SEALED_BEFORE).exists()
        return number == following and sealed_before and not (work / files.SPEC).exists()

    def _resumable(self, part: Path, number: int) -> int | None:
        """Step of a part's snapshot if it can be gone on with."""
        if number != self._generations.newest() + 1:
            return None
        try:
            if (part / MANIFEST).exists():
                return self._generations.manifest_of_part(number).step
            spec = RefreshSpec.read(part / WORK)
            seal = spec.seal(files.weights_hash(part / WORK))
            sealed = read_json(part / WORK / files.SEALED)
            # Without a seal no coordinator has looked at it yet; with another it is torn.
            return spec.step if sealed in (None, {"seal": seal}) else None
        except IndexError_:
            return None

    def poll(self) -> Status:
        """Look where the refresh is, and start the next attempt when it is due. Never waits.

        A failure is reported once, in the log, when it happens.
        """
        if not self._status.busy or self._status.state == "snapshot":
            return self._status
        now = self._clock()
        self._status = replace(self._status, seconds=now - self._began)
        if self._process is None:
            if now >= self._retry_at:
                self._launch()
            return self._status
        code = self._process.poll()
        if code is None:
            self._watch(now)
        elif self._generations.path(self._status.generation).exists():
            self._published()  # even if it was killed just after the commit point
        else:
            self._ended(code)
        return self._status

    def wait(self, timeout_seconds: float | None = None) -> Status:
        """Poll until nothing is in flight; for one process alone (see `Switch.settle`).

        Raises:
            IndexError_: it takes longer than ``timeout_seconds``.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self.poll().busy:
            if self._status.state == "snapshot":
                raise IndexError_("waiting for a refresh that was not started")
            if deadline is not None and time.monotonic() > deadline:
                raise IndexError_(
                    f"generation {self._status.generation}: still {self._status.state} after "
                    f"{timeout_seconds:g} s"
                )
            time.sleep(_WAIT_SECONDS)
        return self._status

    def fail(self, reason: str) -> None:
        """Give up the refresh in flight, for what fails before the workers have it."""
        if self._status.busy:
            self._end_process()
            self._attempt_failed(reason, permanent=True)

    def close(self) -> None:
        """End what is in flight; its finished shards stay for `resume`."""
        self._end_process()
        if self._status.busy:
            self._status = replace(self._status, state="idle")

    def _end_process(self) -> None:
        if self._process is not None:
            end(self._process)
            self._process = None

    def _launch(self) -> None:
        status = self._status
        part = self._generations.part(status.generation)
        self._status = replace(status, state="encoding", attempt=status.attempt + 1)
        self._seen = (0, self._clock())
        try:
            for name in (files.FAILED, files.STATE, "coordinator.log"):
                (part / WORK / name).unlink(missing_ok=True)
            self._process = launch(
                "pixelrag.retrieval.coordinator",
                str(part),
                log=self._log(part),
                nice=self._nice,
                threads=1,
            )
        except OSError as error:
            self._attempt_failed(f"{part}: {error}", permanent=False)

    def _log(self, part: Path) -> Path:
        # A sealed part may have lost its work folder; its coordinator has nothing to say.
        return part / WORK / "coordinator.log" if (part / WORK).exists() else Path("/dev/null")

    def _watch(self, now: float) -> None:
        file = self._generations.part(self._status.generation) / WORK / files.STATE
        try:
            stamp = file.stat().st_mtime_ns
        except OSError:
            stamp = 0
        if stamp != self._seen[0]:
            self._seen = (stamp, now)
            content = read_json(file) or {}
            if content.keys() >= {"state", "done", "of"}:
                self._status = replace(self._status, **content)
        elif now - self._seen[1] > _SILENT_SECONDS:
            self._end_process()
            self._attempt_failed("the coordinator gave no sign of life; killed", permanent=False)

    def _published(self) -> None:
        self._process = None
        self._status = replace(self._status, state="published", reason="")
        manifest = Manifest.read(self._generations.path(self._status.generation))
        if fallback := manifest.validation.get("built on the CPU"):
            say_once(f"index: built on the CPU ({fallback})")
        logger.info(
            "generation %d (step %d) published after %.1f s",
            self._status.generation,
            self._status.step,
            self._status.seconds,
        )

    def _ended(self, code: int) -> None:
        self._process = None
        work = self._generations.part(self._status.generation) / WORK
        failed = read_json(work / files.FAILED) or {}
        told = failed.get("reason") or last_words(work / "coordinator.log")
        self._attempt_failed(
            str(told) if told else f"the coordinator ended with code {code}",
            permanent=bool(failed.get("permanent", code == PERMANENT)),
        )

    def _attempt_failed(self, reason: str, *, permanent: bool) -> None:
        status = self._status
        attempt = max(1, status.attempt)
        if permanent or attempt > self._retries:
            self._status = replace(status, state="failed", reason=reason)
            logger.warning(
                "generation %d (step %d) failed, attempt %d: %s. %s",
                status.generation,
                status.step,
                attempt,
                reason,
                "The training goes on with the generation it has"
                if self._generations.newest()
                else "There is no other generation to go on with",
            )
            self._generations.discard_part(status.generation)
            return
        pause = self._retry_seconds * 2 ** (attempt - 1)
        self._retry_at = self._clock() + pause
        self._status = replace(status, state="waiting", reason=reason, attempt=attempt)
        logger.warning(
            "generation %d: attempt %d failed: %s. The next in %.3g s",
            status.generation,
            attempt,
            reason,
            pause,
        )
