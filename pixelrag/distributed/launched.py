"""Slurm's `srun` and Open MPI's `mpirun` name ranks in their own words; here those become ours."""

from __future__ import annotations

import re
from collections.abc import MutableMapping

from pixelrag.errors import ConfigError

_SRUN = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_MPIRUN = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


def adopt(environ: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE where `srun` or `mpirun` started us.

    Left alone where another launcher did, within a Slurm job or not, and in the shell of a batch
    script, which `srun` did not start.
    """
    if {"RANK", "WORLD_SIZE"} & environ.keys():
        return
    if "OMPI_COMM_WORLD_RANK" in environ:  # nearer than srun, by which mpirun may have come here
        _translate(environ, _MPIRUN)
    elif "SLURM_STEP_ID" in environ:
        _translate(environ, _SRUN)
        tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE"))
        if tasks is not None:
            node = environ.get("SLURM_NODEID", "0")
            counts = dict(enumerate(map(str, tasks_of_nodes(tasks))))
            if not node.isdecimal() or int(node) not in counts:
                raise ConfigError(f"SLURM_NODEID: got {node!r}, of {len(counts)} nodes ({tasks})")
            environ.setdefault("LOCAL_WORLD_SIZE", counts[int(node)])


def _translate(environ: MutableMapping[str, str], names: dict[str, str]) -> None:
    environ.update({ours: environ[theirs] for ours, theirs in names.items() if theirs in environ})


def tasks_of_nodes(text: str) -> list[int]:
    """Read Slurm's list of tasks by node: ``8(x2),4`` is 8, 8, 4.

    Raises:
        ConfigError: it is no such list, or of more nodes than there are.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip())
        if match is None or len(counts) > 1_000_000:
            raise ConfigError(f"SLURM_TASKS_PER_NODE: got {text!r}, expected such as 8(x2),4")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
