"""Processes beside the training: fresh interpreters that yield to it and die with it.

A child asks the kernel to be killed when its parent dies (prctl(2), PR_SET_PDEATHSIG), so whatever
ends the trainer ends the whole tree. It has a session of its own: Ctrl-C at the terminal is the
trainer's. Where sessions are scheduled as groups (autogroup, sched(7)), a process's nice value
counts only within its session; so the session's own is lowered as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_PARENT = "PIXELRAG_PARENT_PID"
_NICE = "PIXELRAG_NICE"
_PR_SET_PDEATHSIG = 1
# A child that torch or a launcher would take for a rank of the job must not be one.
_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PIXELRAG_RENDEZVOUS_FILE",
)
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


def launch(
    module: str, *arguments: str, log: Path, nice: int, threads: int, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start ``python -m module arguments`` in the background.

    The module calls `settle_down` first of all.

    Args:
        module: its dotted name.
        arguments: of its command line.
        log: file that takes what it prints, appended.
        nice: 0 (as the trainer) to 19 (what the trainer leaves).
        threads: limit of its CPU threads.
        pass_fds: open files that it gets, under the same numbers.

    Raises:
        RuntimeError: called outside the main thread: the child would die with that thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("background processes are started from the main thread")
    environment = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES}
    environment |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    environment |= {_PARENT: str(os.getpid()), _NICE: str(nice), "TOKENIZERS_PARALLELISM": "false"}
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
        )


def settle_down() -> None:
    """Tie this process to its parent's life and lower its priority; before heavy imports."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[_PARENT]):  # it died before we asked
        os._exit(1)
    nice = int(os.environ[_NICE])
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
        group.write(str(nice))  # not every kernel has it


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a background process, and with it all that it started; nothing is left half-written."""
    if process.poll() is None:
        process.kill()
    process.wait()


def last_words(log: Path, limit: int = 800) -> str:
    """The last line of a log that says something, for messages."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:limit] if lines else ""
