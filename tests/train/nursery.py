"""Starts processes of one or several ranks in a tenth of a second each.

A process that starts from nothing pays about five seconds for its imports, and the tests start
hundreds. So one server process imports everything once and forks: each child is a process of its
own, with its own process group, signals, output and exit code. `start` and `run` call the very
`main` that the console script calls; what launchers add is tested in `test_launchers.py`. Inside
`warm_workers`, `run_workers` forks as well. Whatever is forked has the processes of a refresh, in
the background, forked for it too.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import multiprocessing
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from pixelrag.distributed import spawn
from pixelrag.retrieval import background

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore",
    "PYTHONPATH": str(ROOT),
}
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PRELOAD = ["tests.train.preload"]
_TIMEOUT = 200.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended on each rank."""

    codes: list[int]
    outputs: list[str]

    def check(self) -> Ended:
        """Fail with what the ranks wrote unless all of them succeeded."""
        assert set(self.codes) == {0}, f"exit codes {self.codes}\n{self.text}"
        return self

    @property
    def text(self) -> str:
        """The output of all ranks."""
        return "\n".join(f"--- rank {r} ---\n{text}" for r, text in enumerate(self.outputs))


class Job:
    """A running command."""

    def __init__(self, workers: list[Any], files: list[Path]) -> None:
        self.workers = workers
        self._files = files

    def outputs(self) -> list[str]:
        """What each rank has written so far."""
        return [file.read_text(errors="replace") for file in self._files]

    def wait(self, timeout: float = _TIMEOUT) -> Ended:
        """Wait for all ranks; fail, killing them, when it takes longer than `timeout` seconds."""
        deadline = time.monotonic() + timeout
        try:
            for worker in self.workers:
                worker.join(max(0.0, deadline - time.monotonic()))
            late = [r for r, worker in enumerate(self.workers) if worker.exitcode is None]
            ended = Ended([w.exitcode for w in self.workers], self.outputs())
            assert not late, f"ranks {late} hang after {timeout:g} s\n{ended.text}"
            return ended
        finally:
            self.kill()

    def wait_until(self, condition: Callable[[], bool], timeout: float = _TIMEOUT) -> None:
        """Wait until something has happened, while every rank lives."""
        deadline = time.monotonic() + timeout
        while not condition():
            dead = any(worker.exitcode is not None for worker in self.workers)
            if dead or time.monotonic() > deadline:
                self.kill()
                outputs = "\n".join(self.outputs())
                raise AssertionError(f"ended or timed out before it happened\n{outputs}")
            time.sleep(0.01)

    def wait_for_one(self, timeout: float = _TIMEOUT) -> int:
        """Wait until a rank has ended, and end the others, as launchers do; its exit code."""
        try:
            ended = wait([worker.sentinel for worker in self.workers], timeout)
            assert ended, "no rank has ended"
            return next(w.exitcode for w in self.workers if w.sentinel in ended)
        finally:
            self.kill()

    def signal(self, signum: int) -> None:
        """Send a signal to every rank."""
        for worker in self.workers:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signum)

    def kill(self) -> None:
        """End every rank that still runs."""
        for worker in self.workers:
            worker.kill()
            worker.join()


def start_server() -> None:
    """Import everything once; later calls do nothing."""
    before = dict(os.environ)
    try:
        for name in _LAUNCHER:
            os.environ.pop(name, None)
        os.environ.update(ENVIRONMENT)
        multiprocessing.set_forkserver_preload(_PRELOAD)
        forkserver._forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def start(
    arguments: Sequence[str],
    *,
    nproc: int = 1,
    launcher: bool | None = None,
    setup: str | None = None,
    payload: Any = None,
    powerless: bool = False,
    max_file_bytes: int | None = None,
) -> Job:
    """Start `pixelrag ARGUMENTS` on `nproc` processes.

    Args:
        arguments: the command line behind `pixelrag`.
        nproc: processes.
        launcher: set the variables that launchers set; None = with several processes.
        setup: `module:function`, called with `payload` in each process first; injects faults.
        payload: see `setup`.
        powerless: give up root's right to ignore file permissions.
        max_file_bytes: RLIMIT_FSIZE: the largest file that a process may write.
    """
    folder = Path(tempfile.mkdtemp(dir=_outputs().name))
    workers, files = [], []
    for rank in range(nproc):
        variables: dict[str, str] = {}
        if launcher or (launcher is None and nproc > 1):
            variables = spawn.variables_of(str(folder), rank, nproc) | {"OMP_NUM_THREADS": "1"}
        files.append(folder / f"output{rank}.txt")
        options = (setup, payload, powerless, max_file_bytes)
        workers.append(fork(_command, list(arguments), *options, log=files[-1], env=variables))
    return Job(workers, files)


def run(arguments: Sequence[str], *, timeout: float = _TIMEOUT, **options: Any) -> Ended:
    """`start` and wait."""
    return start(arguments, **options).wait(timeout)


@functools.cache
def _outputs() -> tempfile.TemporaryDirectory:
    """Holds all ranks' output; removed when the process that starts them ends."""
    return tempfile.TemporaryDirectory(prefix="pixelrag-test-")


def fork(
    function: Callable[..., int | None], *arguments: Any, log: Path, env: Mapping[str, str]
) -> Any:
    """Call ``function(*arguments)`` in a process of its own, whose exit code it returns.

    Args:
        function: of a module, for the child finds it by its name.
        arguments: picklable.
        log: file that takes what it prints, appended.
        env: environment variables beside those of the server.
    """
    start_server()
    log.touch()
    context = multiprocessing.get_context("forkserver")
    address = forkserver._forkserver._forkserver_address
    process = context.Process(
        target=_child, args=(address, function, arguments, str(log), dict(env))
    )
    process.start()
    return process


def _child(address, function, arguments, log, env) -> None:
    # What this process forks comes from the same server: its own would import everything again.
    forkserver._forkserver._forkserver_address = address
    forkserver._forkserver.ensure_running = lambda: None
    target = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(env)
    torch.distributed.set_debug_level_from_env()  # read when torch was imported
    # As in a process that started by itself; a loader's workers would else import everything.
    multiprocessing.set_start_method("fork", force=True)
    background.subprocess = _Background
    code = 1
    try:
        code = function(*arguments) or 0
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001 - what an interpreter does with an exception
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _command(arguments, setup, payload, powerless, max_file_bytes) -> int:
    if powerless:
        _drop_capabilities()
    if max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    if setup is not None:
        module, function = setup.split(":")
        getattr(importlib.import_module(module), function)(payload)
    from pixelrag.cli import main

    return main(arguments)


def _drop_capabilities() -> None:
    """Stay who we are, root perhaps, but without any capability: capset(2) with empty sets."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    if ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")


class _Forked:
    """A forked process as `subprocess.Popen` would show it."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode


@contextmanager
def warm_workers() -> Iterator[None]:
    """Let `run_workers` fork its workers."""
    before = spawn._start
    spawn._start = _fork_worker
    try:
        yield
    finally:
        spawn._start = before


@contextmanager
def warm_background() -> Iterator[None]:
    """Let the refreshes of this very process fork their processes."""
    start_server()
    before = background.subprocess
    background.subprocess = _Background
    try:
        yield
    finally:
        background.subprocess = before


def _fork_worker(folder: str, rank: int, nproc: int, env: Mapping[str, str]) -> _Forked:
    variables = os.environ | spawn.variables_of(folder, rank, nproc) | dict(env)
    log = Path(folder, f"output{rank}.txt")
    return _Forked(fork(spawn.work, folder, log=log, env=variables))


class _Background:
    """What `pixelrag.retrieval.background` uses of `subprocess`."""

    DEVNULL, STDOUT = subprocess.DEVNULL, subprocess.STDOUT

    @staticmethod
    def Popen(command, *, env, stdout, pass_fds=(), **options: Any) -> Any:
        if pass_fds:  # a server that forks has not got them
            return subprocess.Popen(command, env=env, stdout=stdout, pass_fds=pass_fds, **options)
        module, *arguments = command[2:]  # python -m module arguments
        log = Path(os.readlink(f"/proc/self/fd/{stdout.fileno()}"))
        return _Forked(fork(_in_background, module, arguments, os.getpid(), log=log, env=env))


def _in_background(module: str, arguments: list[str], parent: int) -> int:
    """As `python -m module arguments`, which would die with its parent."""
    os.setsid()
    threading.Thread(target=_die_with, args=(os.pidfd_open(parent),), daemon=True).start()
    os.environ["PIXELRAG_PARENT_PID"] = str(os.getppid())  # the server
    sys.argv = [module, *arguments]
    return importlib.import_module(module).main(arguments)


def _die_with(parent: int) -> None:
    select.select([parent], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
