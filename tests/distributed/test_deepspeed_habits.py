"""DeepSpeed's own habits never act: no compiler is needed, and a user's settings stay exact."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pixelrag.distributed.env import World
from tests.distributed.harness import Results, run_cases
from tests.distributed.trials import assert_exact, run_trial

pytestmark = pytest.mark.distributed

TRIAL = "tests.distributed.trials:run_trial"

# zero_optimization settings that change how and when DeepSpeed communicates, but not what.
SETTINGS_12: dict[str, dict[str, Any]] = {
    "small buckets": {"reduce_bucket_size": 60, "allgather_bucket_size": 60},
    "overlap": {"overlap_comm": True, "reduce_bucket_size": 60},
    "no contiguous gradients": {"contiguous_gradients": False},
    "no reduce-scatter": {"reduce_scatter": False},
    "no shared buckets": {"use_multi_rank_bucket_allreduce": False},
}
SETTINGS_3: dict[str, dict[str, Any]] = {
    "small buckets": {"reduce_bucket_size": 60, "stage3_prefetch_bucket_size": 60},
    "overlap": {"overlap_comm": True, "reduce_bucket_size": 60},
    "no contiguous gradients": {"contiguous_gradients": False},
    "no reduce-scatter": {"reduce_scatter": False},
    "sub-groups": {"sub_group_size": 100},
    "few live parameters": {"stage3_max_live_parameters": 100, "stage3_max_reuse_distance": 10},
}
CASES = {
    f"{engine}, {grad_sync}, {name}": {
        "engine": engine,
        "grad_sync": grad_sync,
        "params": "sharded" if engine == "zero3" else "resident",
        "zero": zero,
        "steps": 2,  # images on one rank, and nowhere
    }
    for engine, settings in (("zero1", SETTINGS_12), ("zero2", SETTINGS_12), ("zero3", SETTINGS_3))
    for name, zero in settings.items()
    for grad_sync in ("deferred", "per_chunk")
    if (engine, grad_sync) != ("zero1", "per_chunk")  # reduces whole gradients in our own code
}


@pytest.fixture(scope="module")
def results() -> Results:
    return run_cases(TRIAL, CASES, nproc=2)


@pytest.mark.parametrize("name", CASES)
def test_settings_that_must_not_change_the_gradient(results: Results, name: str) -> None:
    assert_exact(results[name])


NO_COMPILER = {
    "zero0": {"engine": "zero0"},
    "zero1 offload": {"engine": "zero1", "offload": True},
    "zero2": {"engine": "zero2"},
    "zero2 offload": {"engine": "zero2", "offload": True},
    "zero3": {"engine": "zero3"},
    "zero3 offload": {"engine": "zero3", "offload": True},
}


def without_compiler(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """A trial, and whether any tool that builds things can be found."""
    import shutil

    tools = [name for name in ("c++", "g++", "gcc", "cc", "clang", "ninja") if shutil.which(name)]
    return run_trial(world, case | {"steps": 1}) | {"tools": len(tools)}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    """No compiler on the path, and the locks that killed builds leave behind."""
    extensions = tmp_path_factory.mktemp("extensions")
    for op in ("deepspeed_shm_comm", "cpu_adam", "fused_adam", "utils"):
        (extensions / op).mkdir()
        (extensions / op / "lock").touch()
    env = {
        "PATH": str(Path(sys.executable).parent / "nothing-here"),
        "TORCH_EXTENSIONS_DIR": str(extensions),
    }
    target = "tests.distributed.test_deepspeed_habits:without_compiler"
    return run_cases(target, NO_COMPILER, nproc=2, env=env, warm=False), extensions


@pytest.mark.parametrize("name", NO_COMPILER)
def test_trains_without_a_compiler_and_past_a_stale_lock(
    locked: tuple[Results, Path], name: str
) -> None:
    results, extensions = locked
    found = results[name]
    assert [result.pop("tools") for result in found] == [0, 0]
    assert_exact(found)
    files = sorted(str(path.relative_to(extensions)) for path in extensions.rglob("*"))
    assert [file for file in files if "/" in file] == [f for f in files if f.endswith("/lock")]
