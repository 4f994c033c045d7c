"""Slurm's `srun` names ranks in its own words; here they become those of every other launcher."""

from __future__ import annotations

import re
from collections.abc import MutableMapping


def adopt(environ: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE where `srun` started this process.

    Left alone where another launcher did, within a Slurm job or not, and in the shell of a batch
    script, which `srun` did not start.
    """
    if {"RANK", "WORLD_SIZE"} & environ.keys() or "SLURM_STEP_ID" not in environ:
        return
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    environ.update({ours: environ[theirs] for ours, theirs in names.items() if theirs in environ})
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE"))
    if tasks is not None:
        node = int(environ.get("SLURM_NODEID", "0"))
        environ.setdefault("LOCAL_WORLD_SIZE", str(tasks_of_nodes(tasks)[node]))


def tasks_of_nodes(text: str) -> list[int]:
    """Read Slurm's list of tasks by node: ``8(x2),4`` is 8, 8, 4.

    Raises:
        ValueError: it is no such list.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"got {text!r}, expected a list such as 8(x2),4")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
