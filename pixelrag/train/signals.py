"""Stopping a run politely: signals and a STOP file that only set state, read between two steps.

SIGTERM (a scheduler's preemption), SIGINT (Ctrl-C) and SIGUSR1 (Slurm's `--signal=USR1@120`) are
noted; nothing else happens in the handler, because it may run in the middle of a collective or of a
file being written. `requested()` is asked after each step, and between the parts of what takes long
(`distributed/interrupt.py`); the ranks agree, save and leave. A file named STOP in the run's folder
asks for the same without a signal.

The same signal a second time ends the process at once, by the signal's own default: that is a
person pressing Ctrl-C again. Two things look like it and are not:

- A launcher relays what it got. On one Ctrl-C the terminal signals every process of the group, then
  torchrun signals its workers once more, and the deepspeed launcher too. So a repeat within
  `relay_seconds` of the first counts as the first.
- Slurm sends SIGUSR1 early and SIGTERM at the limit. A *different* signal therefore never cuts
  short the checkpoint that the first one asked for.

A Python handler runs between two bytecodes of the main thread: a call that blocks in C (a hung
collective) delays the second signal until it returns; SIGKILL does not wait.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

from pixelrag.train.text_file import replace_text

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STOP_FILE = "STOP"
PREEMPTED = "PREEMPTED"


class StopRequest:
    """Context manager that turns signals and a STOP file into a reason to stop.

    Args:
        stop_dir: the run's folder, where a file named STOP is looked for; None: signals alone.
        relay_seconds: how long a repeat of the first signal counts as the launcher relaying it.
        clock: seconds, monotonic; tests pass their own.

    Entering outside the main thread, where Python allows no handlers, logs a warning and watches
    the STOP file alone. Leaving restores the handlers that were there.
    """

    def __init__(
        self,
        stop_dir: Path | None = None,
        *,
        relay_seconds: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dir = stop_dir
        self._stop_file = None if stop_dir is None else stop_dir / STOP_FILE
        self._relay_seconds = relay_seconds
        self._clock = clock
        self._first_seen: dict[int, float] = {}
        self._previous: dict[signal.Signals, signal.Handlers | Callable | int | None] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            logger.warning("not in the main thread: signals are not caught, only the STOP file is")
            return self
        for signum in STOP_SIGNALS:
            self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for signum, handler in self._previous.items():
            # None: the earlier handler was installed from C and cannot be put back from Python.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def requested(self) -> str | None:
        """Why to stop ("SIGTERM", "STOP file ..."), or None. Cheap: one stat call.

        The answer is this process's own. Ranks must agree on it before acting, since signals reach
        them at different steps.
        """
        if self._first_seen:
            return signal.Signals(next(iter(self._first_seen))).name
        if self._stop_file is not None and self._stop_file.exists():
            return f"STOP file {self._stop_file}"
        return None

    def obeyed(self, reason: str, checkpoint: Path | None) -> None:
        """Write `PREEMPTED`: why, and the checkpoint to go on from. Rank 0, once all is saved.

        The STOP file goes, so that the resumed run does not stop too.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self._dir is not None:
            self._dir.mkdir(parents=True, exist_ok=True)
            replace_text(self._dir / PREEMPTED, f"{reason}\n{checkpoint or 'no checkpoint'}\n")
            if self._stop_file is not None:
                self._stop_file.unlink(missing_ok=True)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = self._clock()
        first = self._first_seen.setdefault(signum, now)
        if now - first > self._relay_seconds:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
