"""All ranks search the same generation, and change to the next one at the same step.

A background thread opens and verifies what was published. Once a step the ranks agree on a few
integers (one small all-reduce): the newest generation that every rank has ready, the newest that
rank 0 has seen published, whether a refresh shall start, and whether one has failed. When the
newest is ready everywhere, all switch. Nobody waits, unless a lag or a replay pins the step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, NamedTuple

from pixelrag.distributed.collectives import agree_max, told_by_main
from pixelrag.distributed.interrupt import stop_point
from pixelrag.distributed.together import together
from pixelrag.errors import CheckpointError, IndexError_
from pixelrag.retrieval.durable import sha256
from pixelrag.retrieval.generation import MANIFEST, Generation
from pixelrag.retrieval.generations import Generations
from pixelrag.retrieval.history import Event, Replay
from pixelrag.retrieval.loader import Loader
from pixelrag.retrieval.refresh import Refresher

logger = logging.getLogger("pixelrag")

_SETTLE_SECONDS = 0.05
_VISIBLE_SECONDS = 60.0


class Decision(NamedTuple):
    """What all ranks do now: hand a snapshot over; search another generation than before."""

    start: bool
    switched: bool


class Switch:
    """The generation in use, on every rank.

    Args:
        generations: of the run.
        expected: fingerprints that a generation must have.
        refresher: on rank 0; None elsewhere.
        lag: None: switch as soon as all ranks can. Else exactly so many steps after a snapshot,
            waiting there if need be, so that a run can be repeated bit for bit.
        replay: events of an earlier run (`history`), which then decide starts and switches.
        keep: generations that stay on the disk.
        max_staleness: steps that a generation may be old; None: any.
        on_stale: at more: stop the run, or warn.
        prepare: called with every generation that was opened and verified, in the thread that did
            so, before anyone may switch to it.
        options: of `Generation` (shards, threads).

    Attributes:
        current: the generation in use; None before the first.
        history: events so far, equal on all ranks.
    """

    def __init__(
        self,
        generations: Generations,
        expected: Mapping[str, str],
        *,
        refresher: Refresher | None = None,
        lag: int | None = None,
        replay: Sequence[Event] | None = None,
        keep: int = 2,
        max_staleness: int | None = None,
        on_stale: Literal["stop", "warn"] = "warn",
        prepare: Callable[[Generation], None] = lambda generation: None,
        **options: Any,
    ) -> None:
        self.current: Generation | None = None
        self.history: list[Event] = []
        self._generations = generations
        self._expected = dict(expected)
        self._refresher = refresher
        self._lag = lag
        self._replay = None if replay is None else Replay(replay)
        self._keep = keep
        self._max_staleness = max_staleness
        self._on_stale = on_stale
        self._prepare = prepare
        self._options = options
        self._loader: Loader | None = None
        self._dropper: threading.Thread | None = None
        self._ready: Generation | None = None
        self._published = 0  # newest that rank 0 knows of
        self._unusable = 0  # newest that some rank could not open
        self._lost = 0  # the same, as of the last agreement
        self._in_flight: int | None = None  # step of its snapshot
        self._warned = 0
        self._pinned: tuple[int, ...] = ()

    @property
    def number(self) -> int:
        """Of the generation in use; 0 before the first."""
        return 0 if self.current is None else self.current.number

    @property
    def in_flight(self) -> int | None:
        """Step of the snapshot whose generation is being made, if any; equal on all ranks."""
        return self._in_flight

    def age(self, step: int) -> int:
        """Steps since the snapshot of the generation in use."""
        return step - self._current().step

    def pin(self, numbers: Sequence[int]) -> None:
        """Keep these generations on the disk, for checkpoints need them."""
        self._pinned = tuple(numbers)

    def begin(self, step: int) -> None:
        """Note that all ranks hand over a snapshot now, where `at_step` did not say so."""
        self._in_flight = step
        self.history.append(Event(step, "start"))

    def take_back(self) -> None:
        """Forget what `begin` noted, as if the snapshot had not been handed over."""
        self._in_flight = None
        self.history.pop()

    def at_step(self, step: int, *, start: bool = False) -> Decision:
        """Agree on what to do after ``step`` optimizer steps; a collective, once a step.

        Args:
            step: optimizer steps done.
            start: whether a refresh should start if none is in flight; rank 0 decides. Where the
                answer's `start` is true, all ranks call `snapshot.hand_over`.

        Raises:
            IndexError_: the generation in use is older than ``max_staleness`` and ``on_stale``
                says stop, or a replay cannot be followed; on all ranks.
        """
        if self._replay is not None:
            start = step in self._replay.starts
        target, ready, start = self._agree(start)
        switched = False
        if self._pinned_to(step):
            switched = self.settle(step)
            if self._replay is not None and not switched:
                raise told_by_main(
                    IndexError_(
                        f"step {step}: the earlier run switched here, but its generation cannot "
                        "be made again; the warnings above say why"
                    )
                )
        elif ready and self._lag is None and self._replay is None:
            self._switch(step, target)
            switched = True
        start = start and self._in_flight is None
        if start:
            self.begin(step)
        self._check_age(step)
        return Decision(start, switched)

    def settle(self, step: int) -> bool:
        """Wait until nothing is in flight, and switch to what came of it; a collective.

        For the first generation, a synchronous refresh, a pinned step and the end of the run.
        Returns whether there was a switch.
        """
        while True:
            target, ready, _ = self._agree(start=False)
            if ready:
                self._switch(step, target)
                return True
            if target == self.number and self._in_flight is None:
                return False
            stop_point()
            time.sleep(_SETTLE_SECONDS)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the generation in use, the refresh in flight, the history."""
        return {
            "generation": self.number,
            "manifest": "" if self.current is None else sha256(self.current.path / MANIFEST),
            "in_flight": self._in_flight,
            "history": [asdict(event) for event in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Return to the generation of a checkpoint, and no other; a collective.

        Rank 0's refresher has resumed before. What it could not go on with is no longer in
        flight, on any rank.

        Raises:
            CheckpointError: that generation is no longer there, or is another of its number.
            IndexError_: it is damaged.
        """
        number = state["generation"]
        path = self._generations.path(number)
        with together():
            if number:
                manifest = path / MANIFEST
                if not manifest.exists() or sha256(manifest) != state["manifest"]:
                    raise CheckpointError(
                        f"{path}: not the generation that the checkpoint was trained with; bring "
                        "it back, resume from a later checkpoint, or start a new run"
                    )
                self.current = self._open(number)
        self.history = [Event(**event) for event in state["history"]]
        goes_on = False
        if self._refresher is not None:
            self._published = self._generations.newest()
            goes_on = self._refresher.status.busy or self._published > number
        goes_on = bool(agree_max([int(goes_on)])[0])
        self._in_flight = state["in_flight"] if goes_on else None
        if state["in_flight"] is not None and not goes_on:
            self.history.append(Event(state["in_flight"], "failed"))

    def close(self) -> None:
        """Wait for the background threads: the interpreter must not end under them."""
        for thread in (self._loader, self._dropper):
            if thread is not None:
                thread.join()
        self._loader = self._dropper = None

    def _agree(self, start: bool) -> tuple[int, bool, bool]:
        """Exchange what the ranks know; the same answer on all of them.

        Returns:
            The generation to be used next (or the one in use), whether all ranks can switch to it,
            and whether rank 0 would start a refresh.
        """
        self._collect()
        failed = self._look()
        own = self.number if self._ready is None else self._ready.number
        starts = int(start and self._refresher is not None)
        slowest, published, starts, failed, unusable = agree_max(
            [-own, self._published, starts, failed, self._unusable]
        )
        self._unusable = unusable
        target = published if published > unusable else self.number
        if target > own and self._loader is None:
            self._loader = Loader(target, lambda: self._open(target))
            self._loader.start()
        lost = unusable if unusable > self._lost else failed
        self._lost = unusable
        if lost and self._in_flight is not None:
            self.history.append(Event(self._in_flight, "failed", lost))
            self._in_flight = None
        return target, -slowest >= target > self.number, bool(starts)

    def _look(self) -> int:
        """On rank 0: note what was published; the number of a refresh that has failed, or 0."""
        if self._refresher is None:
            return 0
        status = self._refresher.poll()
        if status.state == "published":
            self._published = max(self._published, status.generation)
        return status.generation if status.state == "failed" else 0

    def _pinned_to(self, step: int) -> bool:
        """Whether the generation in flight must be in use from this step on."""
        if self._replay is not None:
            return step in self._replay.switches
        if self._lag is None or self._in_flight is None:
            return False
        return step >= self._in_flight + self._lag

    def _open(self, number: int) -> Generation:
        # Of a disk that hosts share, another host may see a new name a little later.
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while number not in self._generations.numbers() and time.monotonic() < deadline:
            time.sleep(_SETTLE_SECONDS)
        generation = self._generations.open(number, **self._options)
        generation.manifest.check(generation.path, self._expected)
        generation.verify()
        self._prepare(generation)
        return generation

    def _collect(self) -> None:
        loader = self._loader
        if loader is None or loader.is_alive():
            return
        loader.join()
        self._loader = None
        if loader.error is None:
            self._ready = loader.generation
            return
        self._unusable = loader.number
        logger.warning("%s. The training goes on with generation %d", loader.error, self.number)

    def _switch(self, step: int, number: int) -> None:
        if self._ready is None or self._ready.number != number:
            raise AssertionError(f"switch to {number}, ready is {self._ready}")
        self.current, self._ready = self._ready, None
        self._in_flight = None
        self.history.append(Event(step, "switch", number))
        if self._refresher is None:
            return
        logger.info("step %d: generation %d, of step %d", step, number, self.current.step)
        if self._dropper is not None:
            self._dropper.join()
        # Beside the training: files of many gigabytes take their time to go.
        self._dropper = threading.Thread(
            target=self._generations.drop_old, args=(self._keep, self._pinned)
        )
        self._dropper.start()

    def _check_age(self, step: int) -> None:
        if self._max_staleness is None or self.current is None:
            return
        age = self.age(step)
        if age <= self._max_staleness:
            return
        message = (
            f"step {step}: generation {self.number} is {age} steps old, more than "
            f"refresh.max_staleness {self._max_staleness}"
        )
        if self._on_stale == "stop":
            advice = "Give the refresh more cores or devices, or set refresh.on_stale to warn"
            raise told_by_main(IndexError_(f"{message}. {advice}"))
        if self._warned != self.number and self._refresher is not None:
            self._warned = self.number
            logger.warning("%s", message)

    def _current(self) -> Generation:
        if self.current is None:
            raise IndexError_("no generation is in use yet")
        return self.current
