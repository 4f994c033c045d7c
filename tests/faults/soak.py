"""`python -m tests.faults.soak JOB`: half an hour of preemptions, and what they leave behind.

One run goes through undisturbed. A second one, of the same steps, is preempted about once a minute:
SIGTERM or SIGKILL, to all of its ranks or to one. Both end with the same weights. Meanwhile every
process is watched: memory, threads, file descriptors; and after each end what is left of processes
and shared memory. The result is one JSON object on the last line.

Steps sleep (`--pace`), so that it can run beside other work under `nice -n 19`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import signal
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.torch import load_file

from tests.faults.jobs import JOBS, arguments, make_material
from tests.train import nursery

ENGINES = {"contrastive": "fsdp2", "distill": "zero2", "rag": "ddp"}
_GRACE_SECONDS = 120.0
_SAMPLE_SECONDS = 2.0
_SHARED = Path("/dev") / "shm"
_SET_CHILD_SUBREAPER = 36
_WAYS = ("SIGTERM", "SIGTERM to one rank", "SIGKILL", "SIGKILL to one rank")


def pace(payload: dict[str, float]) -> None:
    """In each rank: every step takes `seconds` longer."""
    from pixelrag.train import loop

    step = loop.Loop._step

    def slowly(self: Any, number: int) -> dict[str, float]:
        time.sleep(payload["seconds"])
        return step(self, number)

    loop.Loop._step = slowly


class Watch:
    """Samples of the processes of a run: by process, (seconds since its start, what it holds)."""

    def __init__(self) -> None:
        self.samples: dict[int, list[tuple[float, int, int, int]]] = defaultdict(list)

    def look(self, pids: list[int]) -> None:
        """Take one sample of each: its own resident bytes, threads, file descriptors."""
        for pid in pids:
            try:
                process = psutil.Process(pid)
                held = own_memory(pid), process.num_threads(), process.num_fds()
                self.samples[pid].append((time.time() - process.create_time(), *held))
            except (psutil.Error, OSError):  # it has just ended
                continue

    def slopes(self, column: int, warm_up: float) -> list[float]:
        """Of each process that lived long enough: growth a minute behind its warm-up."""
        found = []
        for samples in self.samples.values():
            rows = np.array([s for s in samples if s[0] > warm_up], dtype=float)
            if len(rows) >= 8:
                found.append(60 * float(np.polyfit(rows[:, 0], rows[:, column], 1)[0]))
        return found

    def settled(self, column: int, count: int = 4) -> list[float]:
        """The same of consecutive parts of the second half of each process's life."""
        found = []
        for samples in self.samples.values():
            rows = np.array(samples[len(samples) // 2 :], dtype=float)
            for part in np.array_split(rows, count):
                if len(part) >= 8:
                    found.append(60 * float(np.polyfit(part[:, 0], part[:, column], 1)[0]))
        return found

    def most(self, column: int) -> float:
        """The highest value of any process."""
        return max(s[column] for samples in self.samples.values() for s in samples)


def _mean(values: list[float], unit: float = 1.0) -> str:
    """With its standard error, from the spread over processes or parts."""
    if len(values) < 2:
        return "too few samples"
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values) / unit:+.3g} +- {error / unit:.2g} (n={len(values)})"


class Soak:
    """One job's soak in a folder of its own."""

    def __init__(self, job: str, folder: Path, options: argparse.Namespace) -> None:
        # Whatever loses its parent below becomes a child of this process, and is seen.
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        nursery.start_server()
        self._folder = folder
        self._options = options
        self._job = job
        self._steps = round(0.7 * 60 * options.minutes / options.pace)
        self._shared = set(_shared_memory())
        self._ours = {p.pid for p in psutil.Process().children(recursive=True)}
        self.straight, self.preempted = Watch(), Watch()
        self.outcomes: Counter[str] = Counter()
        self.leaked: list[str] = []
        make_material(folder / "material", job)

    def _start(self, name: str, seconds: float) -> nursery.Job:
        refresh = ["--refresh.every_steps=60", "--refresh.deterministic_lag=5"]
        flags = [
            f"--engine.name={ENGINES[self._job]}",
            f"--engine.timeout_seconds={_GRACE_SECONDS:.0f}",
            f"--optim.max_steps={self._steps}",
            "--eval.every_steps=45",
            "--checkpoint.every_steps=20",
            "--logging.every_steps=5",
            *(refresh if self._job == "rag" else ["--data.num_workers=1"]),
        ]
        command = arguments(self._folder / "material", self._job, self._folder / name, *flags)
        options = {"setup": "tests.faults.soak:pace", "payload": {"seconds": seconds}}
        return nursery.start(command, nproc=2, **options)

    def _watched(self, job: nursery.Job, watch: Watch, until: float) -> bool:
        """Sample a run until it ends, or until a moment; whether it has ended."""
        pids = [worker.pid for worker in job.workers]
        while all(worker.exitcode is None for worker in job.workers):
            if time.monotonic() > until:
                return False
            watch.look(pids)
            time.sleep(_SAMPLE_SECONDS)
        return True

    def _left_over(self, when: str) -> None:
        """Note processes that outlive their run by ten seconds."""
        deadline = time.monotonic() + 10
        while left := [p for p in _children() if p.pid not in self._ours]:
            if time.monotonic() > deadline:
                self.leaked += [f"{when}: process {p.pid} {p.name()} {p.status()}" for p in left]
                for process in left:
                    process.kill()
                return
            time.sleep(0.2)

    def run(self) -> dict[str, Any]:
        """Both runs; returns the figures."""
        job = self._start("straight", self._options.pace / 5)
        self._watched(job, self.straight, float("inf"))
        job.wait(_GRACE_SECONDS).check()
        self._left_over("undisturbed run")
        told = self._growth(self.straight)
        print(f"{self._job}: {self._steps} steps undisturbed: {json.dumps(told)}", flush=True)
        draw = random.Random(self._options.seed)
        end = time.monotonic() + 60 * self._options.minutes
        while time.monotonic() < end:
            job = self._start("preempted", self._options.pace)
            pause = 60 * self._options.every * draw.uniform(0.5, 1.5)
            if self._watched(job, self.preempted, time.monotonic() + pause):
                break
            self._preempt(job, draw.choice(_WAYS), draw.randrange(2))
        job = self._start("preempted", self._options.pace / 5)  # whatever is left of the steps
        self._watched(job, self.preempted, float("inf"))
        job.wait(_GRACE_SECONDS).check()
        self._left_over("last run")
        return self._figures()

    def _preempt(self, job: nursery.Job, way: str, rank: int) -> None:
        signum = signal.SIGTERM if "TERM" in way else signal.SIGKILL
        one = "one rank" in way
        for worker in [job.workers[rank]] if one else job.workers:
            psutil.Process(worker.pid).send_signal(signum)
        try:
            codes = str(sorted(set(job.wait(_GRACE_SECONDS).codes)))
        except AssertionError:
            codes = f"killed after {_GRACE_SECONDS:.0f} s: {job.outputs()}"
        self.outcomes[f"{way}: exit codes {codes}"] += 1
        self._left_over(way)
        print(f"{self._job}: {way}: {codes}", flush=True)

    def _figures(self) -> dict[str, Any]:
        run, straight = self._folder / "preempted", self._folder / "straight"
        figures: dict[str, Any] = {
            "job": self._job,
            "engine": ENGINES[self._job],
            "steps": self._steps,
            "minutes": self._options.minutes,
            "preemptions": dict(self.outcomes),
            "weights equal in every bit": _equal(run, straight),
            "left over": self.leaked,
            "shared memory left": sorted(set(_shared_memory()) - self._shared),
            "hidden names left": _hidden(run),
        }
        for name, watch in (("undisturbed", self.straight), ("preempted", self.preempted)):
            figures[name] = self._growth(watch)
        return figures

    def _growth(self, watch: Watch) -> dict[str, Any]:
        """Of the preempted run's processes, which are never old, behind their warm-up."""

        def grows(column: int, unit: float = 1.0) -> str:
            young = watch is self.preempted
            found = watch.slopes(column, self._options.warm_up) if young else watch.settled(column)
            return _mean(found, unit)

        return {
            "processes": len(watch.samples),
            "minutes of the oldest": round(watch.most(0) / 60, 1),
            "memory KiB a minute": grows(1, 1024),
            "threads a minute": grows(2),
            "file descriptors a minute": grows(3),
            "most memory MiB": round(watch.most(1) / 2**20, 1),
            "most threads": watch.most(2),
            "most file descriptors": watch.most(3),
        }


def own_memory(pid: int) -> int:
    """Resident bytes that are no file's: pages of libraries come and go as others need room."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def _children() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _shared_memory() -> Iterator[str]:
    """Names in /dev/shm, POSIX semaphores among them, that no living process maps."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped |= {
                w for line in maps.open() for w in line.split() if w.startswith(f"{_SHARED}/")
            }
        except OSError:
            continue
    files = (path for path in _SHARED.iterdir() if path.is_file())
    return (str(path) for path in files if str(path) not in mapped)


def _hidden(run: Path) -> list[str]:
    """Names that begin with a dot; the lock of the index is a file that stays."""
    names = (str(path.relative_to(run)) for path in run.rglob(".*"))
    return sorted(name for name in names if name != "index/.lock")


def _equal(run: Path, other: Path) -> bool:
    for name in ("last", "best"):
        pairs = zip(
            sorted((run / name).rglob("*.safetensors")),
            sorted((other / name).rglob("*.safetensors")),
            strict=True,
        )
        for mine, theirs in pairs:
            a, b = load_file(mine), load_file(theirs)
            if a.keys() != b.keys() or not all(a[key].equal(b[key]) for key in a):
                return False
    return True


def main() -> None:
    """Parse the command line, soak, and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=1, help="minutes between preemptions")
    parser.add_argument("--pace", type=float, default=0.2, help="seconds that a step sleeps")
    parser.add_argument("--warm-up", type=float, default=20, help="seconds left out of slopes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pixelrag-soak-") as folder:
        figures = Soak(options.job, Path(folder), options).run()
    print(json.dumps(figures), flush=True)
    whole = figures["weights equal in every bit"] and not figures["hidden names left"]
    raise SystemExit(0 if whole and not figures["left over"] else 1)


if __name__ == "__main__":
    main()
