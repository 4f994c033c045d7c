"""Runs a function on several local processes that form one group, and brings the results back.

Used by `pixelrag verify` and the tests. The processes meet through a file, so there is no port to
collide on; a rank that fails ends the others and its traceback is what the caller sees.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pixelrag.errors import EngineError

# After one rank failed, the others get this long to fail by themselves and say why.
_GRACE_SECONDS = 8.0


def run_workers(
    target: str,
    payload: Any,
    *,
    nproc: int,
    timeout_seconds: float = 300.0,
    device: str = "auto",
    collective_timeout_seconds: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``target(world, payload)`` on ``nproc`` processes; return each rank's result.

    Args:
        target: ``package.module:function``, importable by the workers.
        payload: JSON-serialisable argument, the same for every rank.
        nproc: number of processes.
        timeout_seconds: the whole call may take this long.
        device: see ``env.process_group``.
        collective_timeout_seconds: how long a collective waits for a missing rank.
        env: additional environment variables.

    Raises:
        EngineError: a rank failed or time ran out; the message holds the ranks' output.
    """
    with tempfile.TemporaryDirectory(prefix="pixelrag-") as folder:
        job = {
            "target": target,
            "payload": payload,
            "device": device,
            "collective_timeout_seconds": collective_timeout_seconds,
        }
        Path(folder, "job.json").write_text(json.dumps(job), encoding="utf-8")
        workers = [_start(folder, rank, nproc, env or {}) for rank in range(nproc)]
        try:
            _wait(workers, time.monotonic() + timeout_seconds, timeout_seconds)
        except EngineError as error:
            raise EngineError(f"{target}: {error}\n{_outputs(folder, nproc)}") from None
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                worker.wait()
        return [
            json.loads(Path(folder, f"result{rank}.json").read_text(encoding="utf-8"))
            for rank in range(nproc)
        ]


def variables_of(folder: str, rank: int, nproc: int) -> dict[str, str]:
    """What tells a local process its place; the processes meet in ``folder``."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "PIXELRAG_RENDEZVOUS_FILE": str(Path(folder, "rendezvous")),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc)),
    }


def _start(folder: str, rank: int, nproc: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with Path(folder, f"output{rank}.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "pixelrag.distributed.spawn", folder],
            env=os.environ | variables_of(folder, rank, nproc) | dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _wait(workers: list[subprocess.Popen[bytes]], deadline: float, timeout_seconds: float) -> None:
    failed_at = None
    while any(worker.poll() is None for worker in workers):
        now = time.monotonic()
        if now > deadline:
            raise EngineError(f"no end after {timeout_seconds:g} s")
        if failed_at is None and any(worker.poll() not in (None, 0) for worker in workers):
            failed_at = now
        if failed_at is not None and now > failed_at + _GRACE_SECONDS:
            break
        time.sleep(0.02)
    codes = {rank: worker.poll() for rank, worker in enumerate(workers)}
    bad = {rank: code for rank, code in codes.items() if code != 0}
    if bad:
        named = ", ".join(
            f"rank {r} {'was still running' if c is None else f'ended with code {c}'}"
            for r, c in bad.items()
        )
        raise EngineError(named)


def _outputs(folder: str, nproc: int) -> str:
    parts = []
    for rank in range(nproc):
        text = Path(folder, f"output{rank}.txt").read_text(encoding="utf-8", errors="replace")
        parts.append(f"--- rank {rank} ---\n{text[-6000:]}")
    return "\n".join(parts)


def work(folder: str) -> None:
    """A worker's whole life: its job is in ``folder``, and its result goes there."""
    from pixelrag.distributed.env import process_group

    job = json.loads(Path(folder, "job.json").read_text(encoding="utf-8"))
    module, function = job["target"].split(":")
    with process_group(job["device"], job["collective_timeout_seconds"]) as world:
        result = getattr(importlib.import_module(module), function)(world, job["payload"])
        Path(folder, f"result{world.rank}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    code = 0
    try:
        work(sys.argv[1])
    except BaseException:  # noqa: BLE001 - shown below; the parent raises
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads can abort a process in the interpreter's exit although all went well.
    os._exit(code)
