"""Runs pixelrag's own commands as a user would, on several processes, and shows them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from pixelrag.console import say
from pixelrag.errors import EngineError


def run(arguments: Sequence[str], *, nproc: int) -> float:
    """Run ``pixelrag <arguments>`` under torchrun; return the seconds it took.

    The command is printed first, in a form that can be repeated by hand.

    Raises:
        EngineError: it ended with another code than 0; its output, shown as it came, says why.
    """
    launcher = ["torchrun", "--standalone", f"--nproc_per_node={nproc}", "-m", "pixelrag"]
    # torchrun of this very environment, wherever its scripts lie.
    real = [sys.executable, "-m", "torch.distributed.run", *launcher[1:]]
    threads = max(1, (os.cpu_count() or 1) // nproc)
    (seconds,) = _run_all({"": arguments}, launcher, real, threads=threads, at_once=1).values()
    return seconds


def run_alone(jobs: Mapping[str, Sequence[str]], *, threads: int, at_once: int) -> dict[str, float]:
    """Run ``pixelrag <arguments>`` of each job as one process, some side by side.

    Args:
        jobs: arguments by the names that lines of their output begin with ("" = none).
        threads: of each process.
        at_once: jobs that run at the same time; the others wait.

    Returns:
        The seconds that each job took.

    Raises:
        EngineError: a job failed, see `run`; the others are ended.
    """
    real = [sys.executable, "-m", "pixelrag"]
    return _run_all(jobs, ["pixelrag"], real, threads=threads, at_once=at_once)


def _run_all(
    jobs: Mapping[str, Sequence[str]],
    shown: Sequence[str],
    real: Sequence[str],
    *,
    threads: int,
    at_once: int,
) -> dict[str, float]:
    running: list[subprocess.Popen] = []
    # Held while a job starts, so that none starts behind the back of the one who ends them all.
    lock, stopped = threading.Lock(), threading.Event()
    environment = {"OMP_NUM_THREADS": str(threads)} | dict(os.environ)

    def one(name: str, arguments: Sequence[str]) -> float:
        mark = f"{name}: " if name else ""
        started = time.monotonic()
        with lock:
            if stopped.is_set():
                return 0.0
            say(f"{mark}$ {shlex.join([*shown, *arguments])}")
            process = subprocess.Popen(
                [*real, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            running.append(process)
        assert process.stdout is not None  # a pipe
        for line in process.stdout:
            say(f"  {mark}{line.rstrip()}")
        if code := process.wait():
            raise EngineError(
                f"`pixelrag {arguments[0]}` ended with code {code}; see its output above"
            )
        return time.monotonic() - started

    # SIGTERM would end this process and leave the ranks behind.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    pool = ThreadPoolExecutor(at_once)
    try:
        futures = {name: pool.submit(one, name, words) for name, words in jobs.items()}
        wait(futures.values(), return_when=FIRST_EXCEPTION)
        for future in futures.values():
            if future.done():
                future.result()
        return {name: future.result() for name, future in futures.items()}
    finally:
        signal.signal(signal.SIGTERM, before)
        with lock:
            stopped.set()
            for process in running:
                if process.poll() is None:
                    process.terminate()
        pool.shutdown(cancel_futures=True)
