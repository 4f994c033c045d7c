"""Ranks as srun and mpirun name them, over several layouts of nodes and tasks."""

from __future__ import annotations

import itertools

import pytest

from pixelrag.distributed.env import read_ranks
from pixelrag.distributed.launched import adopt, tasks_of_nodes
from pixelrag.errors import ConfigError

LAYOUTS = [[1], [8], [1, 1], [4, 4], [8, 8, 4], [3, 1, 1, 2]]


def srun(tasks: list[int], *, cyclic: bool = False) -> list[dict[str, str]]:
    """What srun sets for each task, by `man srun`; tasks go to nodes in blocks or in turn."""
    groups = [(count, len(list(group))) for count, group in itertools.groupby(tasks)]
    listed = ",".join(f"{count}(x{n})" if n > 1 else str(count) for count, n in groups)
    places = [(local, node) for node, count in enumerate(tasks) for local in range(count)]
    if cyclic:
        places.sort()
    return [
        {
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": str(sum(tasks)),
            "SLURM_LOCALID": str(local),
            "SLURM_NODEID": str(node),
            "SLURM_STEP_TASKS_PER_NODE": listed,
        }
        for rank, (local, node) in enumerate(places)
    ]


def mpirun(tasks: list[int]) -> list[dict[str, str]]:
    """What Open MPI 4's mpirun sets for each process."""
    return [
        {
            "OMPI_COMM_WORLD_RANK": task["SLURM_PROCID"],
            "OMPI_COMM_WORLD_SIZE": task["SLURM_NTASKS"],
            "OMPI_COMM_WORLD_LOCAL_RANK": task["SLURM_LOCALID"],
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(tasks[int(task["SLURM_NODEID"])]),
        }
        for task in srun(tasks)
    ]


@pytest.mark.parametrize("tasks", LAYOUTS, ids=str)
@pytest.mark.parametrize("how", ["block", "cyclic", "mpirun"])
def test_every_task_finds_its_place(tasks: list[int], how: str) -> None:
    made = mpirun(tasks) if how == "mpirun" else srun(tasks, cyclic=how == "cyclic")
    assert [read_ranks(task) for task in made] == [
        (rank, sum(tasks), local) for rank, local in enumerate(_local_ranks(tasks, how))
    ]
    for task in made:
        adopt(task)
    for task, place in zip(made, srun(tasks, cyclic=how == "cyclic"), strict=True):
        assert int(task["LOCAL_WORLD_SIZE"]) == tasks[int(place["SLURM_NODEID"])]


def _local_ranks(tasks: list[int], how: str) -> list[int]:
    blocks = [local for count in tasks for local in range(count)]
    return sorted(blocks) if how == "cyclic" else blocks


def test_the_launcher_nearest_to_the_process_counts() -> None:
    inside = srun([2])[1] | mpirun([4])[3]
    assert read_ranks(inside) == (3, 4, 3)
    assert read_ranks({**inside, "RANK": "0", "WORLD_SIZE": "1"})[:2] == (0, 1)
    # The shell of a batch script has Slurm's variables too, and is no task.
    shell = {k: v for k, v in srun([2])[0].items() if k != "SLURM_STEP_ID"}
    assert read_ranks(shell) == (0, 1, 0)


def test_what_is_no_list_of_tasks_is_an_error() -> None:
    for text in ("8(2)", "", "x", "8(x99999999)", "²", "-1"):
        with pytest.raises(ConfigError, match=r"expected such as 8\(x2\),4"):
            tasks_of_nodes(text)
    for node in ("7", "-1", "one"):
        with pytest.raises(ConfigError, match="SLURM_NODEID"):
            adopt(srun([2])[0] | {"SLURM_NODEID": node})
