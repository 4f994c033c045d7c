"""Ranks from the launcher's environment, and the process group of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pixelrag.distributed.env import choose_device, process_group, read_ranks
from pixelrag.errors import EngineError

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 0)),
        ({"LOCAL_RANK": "0"}, (0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (3, 8, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0)),
        (
            {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"},
            (5, 6, 1),
        ),
        # Inside an sbatch or salloc shell, but not started by srun: alone.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "6"}, (0, 1, 0)),
        # torchrun inside a Slurm job: the launcher nearest to the process counts.
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "SLURM_PROCID": "0"}
            | {"SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"},
            (1, 2, 1),
        ),
    ],
)
def test_ranks(environ: dict[str, str], expected: tuple[int, int, int]) -> None:
    assert read_ranks(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK: got 'one', expected an integer"),
        ({"RANK": "1"}, "RANK=1, WORLD_SIZE=None"),
        ({"WORLD_SIZE": "2"}, "RANK=None, WORLD_SIZE=2"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1, WORLD_SIZE=2"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "RANK=0, WORLD_SIZE=None"),
    ],
)
def test_an_environment_that_makes_no_sense(environ: dict[str, str], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_ranks(environ)


def test_the_device_is_chosen_by_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 0) == choose_device("cpu", 3) == torch.device("cpu")
    with pytest.raises(EngineError, match="torch sees no CUDA device; use auto or cpu"):
        choose_device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 1) == choose_device("cuda", 1) == torch.device("cuda", 1)
    assert choose_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(EngineError, match="local rank 2 has no device: torch sees 2"):
        choose_device("auto", 2)


def test_one_process_joins_a_group_of_its_own_and_leaves_it() -> None:
    with process_group("cpu") as world:
        assert (world.rank, world.world_size, world.local_rank) == (0, 1, 0)
        assert world.is_main
        assert world.device == torch.device("cpu")
        assert dist.get_backend() == "gloo"
    assert not dist.is_initialized()
    with process_group("cpu"):  # and again in the same process
        dist.barrier()
    assert not dist.is_initialized()


def test_a_group_that_is_there_is_used_and_left_alone() -> None:
    with process_group("cpu"):
        with process_group("cpu") as inner:
            assert inner.world_size == 1
        assert dist.is_initialized()


def test_an_error_inside_still_leaves_the_group() -> None:
    with pytest.raises(KeyError), process_group("cpu"):
        raise KeyError
    assert not dist.is_initialized()


def test_several_ranks_need_a_place_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(EngineError, match="rank 1 of 2: MASTER_ADDR and MASTER_PORT not set"),
        process_group("cpu"),
    ):
        pass
