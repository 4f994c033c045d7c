"""One attempt at a refresh: ``python -m pixelrag.retrieval.coordinator PART``.

    encoding -> building -> validating -> published, or failed with a reason

A light process (it imports no torch) that starts the workers, watches them, and publishes. It
goes on where a dead one stopped: shards, vectors and index files that are there are whole, and
belong to the spec and snapshot whose hash `sealed.json` holds; made from others, they are deleted.
It never tries again by itself: the trainer starts it anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pixelrag.errors import PixelragError
from pixelrag.retrieval import refresh_spec as files
from pixelrag.retrieval.background import end, last_words, launch, settle_down
from pixelrag.retrieval.generation import (
    IDS,
    MANIFEST,
    METADATA,
    METRIC,
    SUMMARY,
    VECTORS,
    index_names,
)
from pixelrag.retrieval.generations import WORK, Generations
from pixelrag.retrieval.refresh_spec import RefreshSpec, read_json, shard_name, write_json
from pixelrag.retrieval.refresh_worker import PERMANENT, alive_file

_TICK_SECONDS = 0.05
_SAY_TICKS = 20
_LOCK_SECONDS = 10.0
# Shards and the joined vectors exist at once; then vectors and an index with links or codes.
_SPACE_FACTOR = 2.5


class Failed(Exception):
    """The attempt has failed; `permanent` where another would fail as well."""

    def __init__(self, reason: str, *, permanent: bool = False) -> None:
        super().__init__(reason)
        self.permanent = permanent


class Coordinator:
    """See the module.

    Args:
        part: `gen-<n>.part` with spec and snapshot in its work folder.
    """

    def __init__(self, part: Path) -> None:
        self.part = part
        self.work = part / WORK
        self.generations = Generations(part.parent)
        self.number = int(part.name.removeprefix("gen-").removesuffix(".part"))

    def run(self) -> None:
        """Make the generation and publish it.

        Raises:
            Failed: it could not be made.
            PixelragError: spec or snapshot cannot be read.
        """
        if (self.part / MANIFEST).exists():  # killed between the last file and the renaming
            self.generations.publish(self.number)
            return
        spec = RefreshSpec.read(self.work)
        weights = files.weights_hash(self.work)
        self._seal(spec, weights)
        self._say("encoding", spec)
        if not (self.part / VECTORS).exists():
            self._require_space(spec)
            self._encode(spec)
        self._say("building", spec)
        self._one("build", spec)
        self._say("validating", spec)
        self._one("validate", spec)
        self._publish(spec, weights)

    def _seal(self, spec: RefreshSpec, weights: str) -> None:
        """Delete what was made from another spec or snapshot."""
        seal = {"seal": spec.seal(weights)}
        before = self.work / files.SEALED_BEFORE
        if seal not in (read_json(self.work / files.SEALED), read_json(before)):
            for file in (*self.work.glob("shard-*.npy"), *self.part.iterdir()):
                if file.is_file():
                    file.unlink()
        write_json(self.work / files.SEALED, seal)
        before.unlink(missing_ok=True)

    def _encode(self, spec: RefreshSpec) -> None:
        missing = self._missing(spec)
        workers = []
        # One process asks all actors of a Ray cluster.
        devices = spec.devices if spec.ray is None else ["ray"]
        for number, device in enumerate(devices):
            shards = missing[number :: len(devices)]
            if shards:
                workers.append((f"encode-{shards[0]}", ["encode", device, *map(str, shards)]))
        self._together(workers, spec)
        missing = self._missing(spec)
        if missing:
            raise Failed(f"shards {missing[:5]} were not written, though every worker was done")

    def _missing(self, spec: RefreshSpec) -> list[int]:
        return [s for s in range(spec.num_shards) if not (self.work / shard_name(s)).exists()]

    def _one(self, job: str, spec: RefreshSpec) -> None:
        self._together([(job, [job, spec.devices[0]])], spec)

    def _together(self, jobs: Sequence[tuple[str, list[str]]], spec: RefreshSpec) -> None:
        """Run workers side by side until all are done or one has failed; then none is left."""
        running = {}
        try:
            for name, arguments in jobs:
                alive_file(self.work, name).touch()
                (self.work / f"{name}.log").unlink(missing_ok=True)
                process = launch(
                    "pixelrag.retrieval.refresh_worker",
                    str(self.work),
                    *arguments,
                    log=self.work / f"{name}.log",
                    nice=spec.nice,
                    threads=spec.threads,
                )
                running[name] = _Watch(process, alive_file(self.work, name))
            ticks = 0
            while running:
                time.sleep(_TICK_SECONDS)
                ticks += 1
                os.utime(self.work / files.STATE)  # this process's own sign of life
                for name, watch in list(running.items()):
                    if watch.process.poll() is None:
                        silent = watch.silent_seconds()
                        if silent > spec.timeout_seconds:
                            raise Failed(f"{name}: no sign of life for {silent:.0f} s; killed")
                        continue
                    del running[name]
                    self._judge(name, watch.process.returncode)
                if ticks % _SAY_TICKS == 0 and any(n.startswith("encode") for n in running):
                    self._say("encoding", spec)
        finally:
            for watch in running.values():
                end(watch.process)

    def _judge(self, name: str, code: int) -> None:
        if code == 0:
            return
        told = last_words(self.work / f"{name}.log")
        if code == PERMANENT:
            raise Failed(told or f"{name} failed", permanent=True)
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        raise Failed(f"{name} {ended}" + (f": {told}" if told else ""))

    def _publish(self, spec: RefreshSpec, weights: str) -> None:
        wanted = {VECTORS, IDS, METADATA, SUMMARY, *index_names(spec.num_index_shards)}
        for file in self.part.iterdir():
            if file.name not in wanted and file.name != WORK:
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        self.generations.seal(
            spec.generation,
            step=spec.step,
            num_passages=spec.num_passages,
            dim=spec.dim,
            metric=METRIC,
            index=spec.index,
            index_files=index_names(spec.num_index_shards),
            fingerprints=spec.fingerprints | {"weights": weights},
            validation={
                **(read_json(self.work / files.VALIDATION) or {}),
                **(read_json(self.work / files.BUILT) or {}),
            },
        )
        self.generations.publish(spec.generation)

    def _require_space(self, spec: RefreshSpec) -> None:
        vectors = spec.num_passages * spec.dim * 4
        there = sum(file.stat().st_size for file in self.work.glob("shard-*.npy"))
        needed = int(_SPACE_FACTOR * vectors) - there
        free = shutil.disk_usage(self.part).free
        if free < needed:
            raise Failed(
                f"{self.part.parent}: generation {spec.generation} needs about "
                f"{needed / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free. Free space, or lower "
                "refresh.keep"
            )

    def _say(self, state: str, spec: RefreshSpec) -> None:
        done = spec.num_shards if state != "encoding" else 0
        if state == "encoding":
            done = spec.num_shards - len(self._missing(spec))
        content = {"state": state, "done": done, "of": spec.num_shards}
        if read_json(self.work / files.STATE) != content:
            write_json(self.work / files.STATE, content)


class _Watch:
    """A process and the file whose time stamp shows that it gets on."""

    def __init__(self, process: subprocess.Popen[bytes], file: Path) -> None:
        self.process = process
        self._file = file
        self._stamp = file.stat().st_mtime_ns
        self._seen = time.monotonic()

    def silent_seconds(self) -> float:
        """Seconds since the time stamp changed; a clock that is set changes nothing."""
        stamp = self._file.stat().st_mtime_ns
        if stamp != self._stamp:
            self._stamp, self._seen = stamp, time.monotonic()
        return time.monotonic() - self._seen


@contextlib.contextmanager
def _alone(work: Path) -> Iterator[None]:
    """One coordinator a part: the one before, killed with its trainer, may take a moment to go."""
    with open(work / "lock", "w", encoding="utf-8") as lock:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise Failed(f"{work.parent} is held by another coordinator") from error
                time.sleep(_TICK_SECONDS)
        yield


def main(arguments: Sequence[str]) -> int:
    """Run one attempt; the process's exit code."""
    settle_down()
    coordinator = Coordinator(Path(arguments[0]))
    work = coordinator.work
    try:
        # A sealed part may have lost its work folder already.
        with _alone(work) if work.exists() else contextlib.nullcontext():
            coordinator.run()
    except (Failed, PixelragError, OSError) as error:
        permanent = error.permanent if isinstance(error, Failed) else not isinstance(error, OSError)
        with contextlib.suppress(OSError):  # a full disk: the log has it
            write_json(work / files.FAILED, {"reason": str(error), "permanent": permanent})
        print(str(error), flush=True)  # noqa: T201 - the trainer reads it
        return PERMANENT if permanent else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
