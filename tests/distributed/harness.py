"""Runs lists of cases on several processes, and brings back what they measured.

Starting processes costs seconds, a case milliseconds: so one start serves many cases, one after
another in one process group. The traceback of a case that raises comes back as its result. If the
ranks can then no longer talk to each other, the list ends, and the tests of later cases say that
they were not reached.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pixelrag.distributed.env import World, process_group
from pixelrag.distributed.spawn import run_workers

ROOT = Path(__file__).resolve().parents[2]
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Results:
    """What the ranks returned, by the case's name."""

    def __init__(self, by_rank: list[dict[str, Any]]) -> None:
        self._by_rank = by_rank

    def __getitem__(self, name: str) -> list[Any]:
        """Every rank's result of one case; fails the calling test if it raised or never ran."""
        found = []
        for rank, results in enumerate(self._by_rank):
            if name not in results:
                last = list(results)[-1] if results else "none"
                pytest.fail(f"rank {rank} did not reach case {name}; its last was {last}")
            if "raised" in results[name]:
                pytest.fail(f"rank {rank}, case {name}:\n{results[name]['raised']}")
            found.append(results[name]["returned"])
        return found


def run_cases(
    function: str,
    cases: dict[str, dict[str, Any]],
    *,
    nproc: int,
    env: dict[str, str] | None = None,
    timeout_seconds: float = 600.0,
    collective_timeout_seconds: float = 60.0,
) -> Results:
    """Call ``function(world, case)`` for each case on every rank; names a ``module:function``.

    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` turns mismatched collectives into errors that name them.
    """
    by_rank = run_workers(
        "tests.distributed.harness:_each_case",
        {"function": function, "cases": cases},
        nproc=nproc,
        device="cpu",
        timeout_seconds=timeout_seconds,
        collective_timeout_seconds=collective_timeout_seconds,
        env=_variables() | (env or {}),
    )
    return Results(by_rank)


def run_alone(
    function: str, cases: dict[str, dict[str, Any]], *, env: dict[str, str] | None = None
) -> Results:
    """The same in one process that no launcher started."""
    environment = {k: v for k, v in os.environ.items() if k not in _LAUNCHER}
    environment |= _variables() | (env or {})
    done = subprocess.run(
        [sys.executable, "-c", "from tests.distributed.harness import _alone; _alone()"],
        input=json.dumps({"function": function, "cases": cases}),
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Results([json.loads(done.stdout.splitlines()[-1])])


def _variables() -> dict[str, str]:
    return {
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    }


def _alone() -> None:
    with process_group("cpu") as world:
        results = _each_case(world, json.load(sys.stdin))
    print(json.dumps(results), flush=True)
    os._exit(0)  # gloo's threads can abort the interpreter's exit


def _each_case(world: World, payload: dict[str, Any]) -> dict[str, Any]:
    module, name = payload["function"].split(":")
    function = getattr(importlib.import_module(module), name)
    results: dict[str, Any] = {}
    for case_name, case in payload["cases"].items():
        try:
            results[case_name] = {"returned": function(world, case)}
        except Exception:  # noqa: BLE001  (the test that asks for this case shows it)
            results[case_name] = {"raised": traceback.format_exc()}
        try:
            dist.barrier()
        except RuntimeError:  # a rank left the others in the middle of a collective
            break
    return results
