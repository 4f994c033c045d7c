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
import tempfile
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pixelrag.distributed.env import World, process_group
from pixelrag.distributed.spawn import run_workers
from tests.train import nursery

DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
_VARIABLES = {
    "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
}


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
    warm: bool = True,
    timeout_seconds: float = 600.0,
    collective_timeout_seconds: float = 60.0,
) -> Results:
    """Call ``function(world, case)`` for each case on every rank; names a ``module:function``.

    Args:
        function: see above.
        cases: by name.
        nproc: ranks.
        env: further environment variables; `DETAIL` turns mismatched collectives into errors that
            name them, and doubles the time.
        warm: fork the ranks from a server that has imported everything; False = interpreters that
            start from nothing, for what acts in imports.
        timeout_seconds: for all cases.
        collective_timeout_seconds: how long a collective waits for a missing rank.
    """
    with nursery.warm_workers() if warm else nullcontext():
        by_rank = run_workers(
            "tests.distributed.harness:_each_case",
            {"function": function, "cases": cases},
            nproc=nproc,
            device="cpu",
            timeout_seconds=timeout_seconds,
            collective_timeout_seconds=collective_timeout_seconds,
            env=_VARIABLES | (env or {}),
        )
    return Results(by_rank)


def run_alone(
    function: str, cases: dict[str, dict[str, Any]], *, env: dict[str, str] | None = None
) -> Results:
    """The same in one process that no launcher started."""
    with tempfile.TemporaryDirectory(prefix="pixelrag-") as folder:
        log, result = Path(folder, "output.txt"), Path(folder, "result.json")
        payload = {"function": function, "cases": cases}
        process = nursery.fork(_alone, payload, str(result), log=log, env=os.environ | (env or {}))
        process.join(600)
        code = process.exitcode
        process.kill()
        assert code == 0, log.read_text(errors="replace")[-4000:]
        return Results([json.loads(result.read_text())])


def _alone(payload: dict[str, Any], result: str) -> None:
    with process_group("cpu") as world:
        Path(result).write_text(json.dumps(_each_case(world, payload)))


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
