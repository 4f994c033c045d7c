"""Where every rank stands, so that a hang or a lost rank is told with names.

A rank notes its step and phase (`Position.move`), which costs nothing. A thread posts it, with a
heartbeat, to the store through which the ranks met. Two things make a rank read the others' posts:

- a collective failed: the peer is gone, or never came within the timeout;
- nothing moved here for almost that long while another rank stands elsewhere: a collective that
  cannot fail by itself (NCCL's kernels do not raise) is about to hang for ever.

Either way one message names the ranks that are missing, and the step and phase of each.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

from pixelrag.errors import EngineError, PixelragError

logger = logging.getLogger("pixelrag")

_BEAT_SECONDS = 1.0
# A heart that misses this many beats in a row has stopped; a busy machine delays one or two.
_LISTEN_BEATS = 3
# How long a rank that lost its peers waits for one of them to have posted why.
_REASON_SECONDS = 1.0
_STORE_SECONDS = 10
# After the report the collective gets this long to fail by itself.
_GRACE_SECONDS = 20.0
_COMMUNICATION = ("gloo", "nccl", "connection closed", "connection reset", "timed out", "tcpstore")


class Position:
    """What a rank does right now; written by the main thread, read by the watch."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.phase = "starting"
        self.since = time.monotonic()

    def move(self, phase: str, step: int | None = None) -> None:
        """Enter a phase, and with ``step`` (optimizer steps done) a new step."""
        if step is not None:
            self.step = step
        self.phase = phase
        self.since = time.monotonic()

    def __str__(self) -> str:
        return _words(self.step, self.phase)


@dataclass(frozen=True, slots=True)
class Post:
    """What a rank has told of itself."""

    host: str
    step: int | None
    phase: str
    beat: int

    @property
    def place(self) -> tuple[int | None, str]:
        """Step and phase: equal on all ranks that wait for nothing but time."""
        return self.step, self.phase

    def __str__(self) -> str:
        return _words(self.step, self.phase)


class Watch:
    """Posts this rank's position and tells where the others stand.

    Args:
        store: the store of the default group.
        rank: this process's rank.
        world_size: number of ranks.
        position: this rank's.
        timeout_seconds: how long a collective may wait.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        position: Position,
        timeout_seconds: float,
    ) -> None:
        # Its own connection: the main thread may hold the group's while it waits.
        self._store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        # A link that is cut answers nothing at all.
        self._store.set_timeout(datetime.timedelta(seconds=_STORE_SECONDS))
        self._rank = rank
        self._world_size = world_size
        self._position = position
        self._timeout = timeout_seconds
        self._host = socket.gethostname()
        self._beats = 0
        self._reported = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pixelrag-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=5.0)

    def fail(self, error: BaseException) -> None:
        """Post why this rank leaves, for those that it leaves behind."""
        words = f"{type(error).__name__}: {error}"[:2000]
        with self._lock, contextlib.suppress(dist.DistError, RuntimeError):
            self._store.set(self._key("failed", self._rank), words)

    def explain(self, error: BaseException) -> EngineError:
        """Turn a collective's failure into a message that names ranks, steps and phases."""
        mine = self._post()
        # gloo's advice behind its first sentence is of no use to a trainer's user.
        first = (str(error).strip().splitlines() or ["no message"])[0].split(". ")[0][:300]
        try:
            reasons = self._reasons()
            posts, silent = ({}, []) if reasons else self._listen()
        except (dist.DistError, RuntimeError) as lost:
            return EngineError(
                f"rank {self._rank} ({mine}): a collective failed ({first}), and the store that "
                f"the ranks met through does not answer either ({lost}): the host of rank 0 or its "
                "launcher is gone. Start the job again; it resumes from its last checkpoint"
            )
        if reasons:
            told = "; ".join(f"rank {rank} failed: {text}" for rank, text in reasons.items())
            return EngineError(
                f"rank {self._rank} ({mine}) stops because {told}. Mend it and start the job "
                "again; it resumes from its last checkpoint"
            )
        return EngineError(
            f"rank {self._rank}: a collective failed ({first}). {self._describe(posts, silent)} "
            "Start the job again; it resumes from its last checkpoint"
        )

    def _run(self) -> None:
        while not self._over.wait(_BEAT_SECONDS):
            try:
                self._beat()
                self._look_for_a_hang()
            except (dist.DistError, RuntimeError):
                # The main thread's next collective fails too, and tells.
                return

    def _beat(self) -> None:
        self._beats += 1
        post = {k: getattr(self._post(), k) for k in Post.__slots__}
        with self._lock:
            self._store.set(self._key("at", self._rank), json.dumps(post))

    def _look_for_a_hang(self) -> None:
        still = time.monotonic() - self._position.since
        if still < 0.9 * self._timeout:
            self._reported = False
        elif not self._reported:
            posts, silent = self._listen()
            if len({post.place for post in posts.values()}) == 1 and not silent:
                return  # all in one long phase: nobody is missing
            self._reported = True
            if min(set(posts) - set(silent)) == self._rank:
                _tell(f"nothing has moved for {still:.0f} s. {self._describe(posts, silent)}")
        elif still > self._timeout + _GRACE_SECONDS:
            _tell(f"rank {self._rank} ends: its collective neither came nor failed")
            sys.stdout.flush()
            os._exit(EngineError.exit_code)

    def _post(self) -> Post:
        return Post(self._host, self._position.step, self._position.phase, self._beats)

    def _posts(self) -> dict[int, Post]:
        found = {}
        with self._lock:
            for rank in range(self._world_size):
                if self._store.check([self._key("at", rank)]):
                    found[rank] = Post(**json.loads(self._store.get(self._key("at", rank))))
        found[self._rank] = self._post()
        return found

    def _listen(self) -> tuple[dict[int, Post], list[int]]:
        """What every rank posts, and which hearts have stopped: a few beats long."""
        before = self._posts()
        for _ in range(_LISTEN_BEATS):
            time.sleep(_BEAT_SECONDS)
            if threading.current_thread() is self._thread:
                self._beat()  # others may listen too
        after = self._posts()
        silent = [
            rank
            for rank, post in before.items()
            if rank != self._rank and after[rank].beat == post.beat
        ]
        return after, silent

    def _reasons(self) -> dict[int, str]:
        deadline = time.monotonic() + _REASON_SECONDS
        while True:
            with self._lock:
                failed = {
                    rank: self._store.get(self._key("failed", rank)).decode()
                    for rank in range(self._world_size)
                    if rank != self._rank and self._store.check([self._key("failed", rank)])
                }
            if failed or time.monotonic() > deadline:
                return failed
            time.sleep(0.1)

    def _describe(self, posts: dict[int, Post], silent: list[int]) -> str:
        mine = posts[self._rank]
        lines = []
        unheard = [rank for rank in range(self._world_size) if rank not in posts]
        if unheard:
            lines.append(f"Never heard of: {_ranks(unheard)}.")
        for rank in silent:
            lines.append(f"No sign of life from rank {rank} on {posts[rank].host} ({posts[rank]}).")
        groups: dict[str, list[int]] = {}
        for rank, post in posts.items():
            if rank not in silent and post.place != mine.place:
                groups.setdefault(f"{post} on {post.host}", []).append(rank)
        lines += [f"Elsewhere: {_ranks(ranks)} in {place}." for place, ranks in groups.items()]
        waiting = [r for r, post in posts.items() if r not in silent and post.place == mine.place]
        lines.append(f"Waiting: {_ranks(waiting)} in {mine}.")
        return " ".join(lines)

    def _key(self, kind: str, rank: int) -> str:
        return f"pixelrag/{kind}/{rank}"


@contextlib.contextmanager
def watched(position: Position, timeout_seconds: float) -> Iterator[None]:
    """Run the body of a job with a watch over the default group's ranks.

    Raises:
        EngineError: a collective of the body failed; the message names the ranks that are missing.
    """
    if dist.get_world_size() == 1:
        yield
        return
    store = dist.distributed_c10d._get_default_store()
    watch = Watch(store, dist.get_rank(), dist.get_world_size(), position, timeout_seconds)
    with watch:
        try:
            yield
        except Exception as error:
            if is_communication_error(error):
                raise watch.explain(error) from error
            if not (isinstance(error, PixelragError) and error.told_by_main):
                watch.fail(error)
            raise


def is_communication_error(error: BaseException) -> bool:
    """Whether a collective failed because of another rank or the network between."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    text = str(error).lower()
    return type(error) is RuntimeError and any(word in text for word in _COMMUNICATION)


def _words(step: int | None, phase: str) -> str:
    return f"{'before the first step' if step is None else f'step {step + 1}'}, {phase}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def _tell(text: str) -> None:
    sys.stderr.write(f"pixelrag: error: {text}\n")
    sys.stderr.flush()
