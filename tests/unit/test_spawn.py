"""Local workers: their results, and what is told when one fails or none ends."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from pixelrag.distributed.env import World
from pixelrag.distributed.spawn import run_workers
from pixelrag.errors import EngineError

ENV = {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
HERE = "tests.unit.test_spawn"


def report(world: World, payload: dict[str, Any]) -> dict[str, Any]:
    return {
        "rank": world.rank,
        "world_size": world.world_size,
        "local_rank": world.local_rank,
        "payload": payload,
        "flag": os.environ.get("PIXELRAG_TEST_FLAG"),
    }


def fail_on_rank_1(world: World, payload: Any) -> None:
    import torch.distributed as dist

    if world.rank == 1:
        raise ValueError("the reason, on rank 1")
    dist.barrier()  # waits for a rank that never comes


def leave(world: World, payload: Any) -> None:
    print("last words", flush=True)
    os._exit(5)


def test_each_rank_returns_its_result() -> None:
    payload = {"rows": [1, 2], "name": "é"}
    env = ENV | {"PIXELRAG_TEST_FLAG": "set"}
    results = run_workers(f"{HERE}:report", payload, nproc=2, device="cpu", env=env)
    assert results == [
        {"rank": r, "world_size": 2, "local_rank": r, "payload": payload, "flag": "set"}
        for r in (0, 1)
    ]


def test_a_failing_rank_ends_the_others_and_its_traceback_is_told() -> None:
    started = time.monotonic()
    with pytest.raises(EngineError, match="ValueError: the reason, on rank 1") as caught:
        run_workers(f"{HERE}:fail_on_rank_1", None, nproc=2, device="cpu", env=ENV)
    assert "rank 1 ended with code 1" in str(caught.value)
    assert "--- rank 0 ---" in str(caught.value)
    assert time.monotonic() - started < 60


def test_a_worker_that_dies_without_a_word_of_python() -> None:
    with pytest.raises(EngineError, match="rank 0 ended with code 5") as caught:
        run_workers(f"{HERE}:leave", None, nproc=1, device="cpu", env=ENV)
    assert "last words" in str(caught.value)


def test_time_runs_out() -> None:
    with pytest.raises(EngineError, match=r"report: no end after 0\.2 s"):
        run_workers(f"{HERE}:report", None, nproc=1, device="cpu", env=ENV, timeout_seconds=0.2)
