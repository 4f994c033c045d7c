"""Who am I: rank and world size from the launcher's environment, and the process group they imply.

The environment is the only source of truth. torchrun and the deepspeed launcher set ``RANK``,
``LOCAL_RANK``, ``WORLD_SIZE`` and ``MASTER_*``; Slurm's ``srun`` and Open MPI's ``mpirun`` set
names of their own (`launched`); with none of them the process is alone and still gets a
(one-process) group, so that every engine runs the same code with and without a launcher.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from pixelrag.distributed import launched
from pixelrag.distributed.cores import set_threads
from pixelrag.distributed.whereabouts import Position, watched
from pixelrag.distributed.wording import worded_failures
from pixelrag.errors import EngineError

logger = logging.getLogger("pixelrag")


@dataclass(frozen=True, slots=True)
class World:
    """This process's place in the job."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    position: Position = field(default_factory=Position, compare=False)
    """Where this rank stands; see `whereabouts`."""

    @property
    def is_main(self) -> bool:
        """True on the one process that prints and writes shared files."""
        return self.rank == 0


def _int_from(environ: dict[str, str], *names: str) -> int | None:
    for name in names:
        value = environ.get(name)
        if value is None:
            continue
        try:
            return int(value)
        except ValueError:
            raise EngineError(
                f"environment variable {name}: got {value!r}, expected an integer; "
                "start the job with torchrun, the deepspeed launcher, srun or mpirun, or unset it"
            ) from None
    return None


def read_ranks(environ: dict[str, str] | None = None) -> tuple[int, int, int]:
    """Return ``(rank, world_size, local_rank)`` from the launcher's variables.

    Raises:
        EngineError: a variable is not an integer, or only a part of the set is there.
    """
    env = dict(os.environ) if environ is None else environ
    launched.adopt(env)
    rank, world_size = _int_from(env, "RANK"), _int_from(env, "WORLD_SIZE")
    local_rank = _int_from(env, "LOCAL_RANK")
    if rank is None and world_size is None:
        return 0, 1, local_rank or 0
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise EngineError(
            f"the launcher's environment is incomplete: RANK={rank}, WORLD_SIZE={world_size}; "
            "expected both, with 0 <= RANK < WORLD_SIZE"
        )
    return rank, world_size, local_rank or 0


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Return the device of this process: ``cuda:<local_rank>`` where CUDA is there, else the CPU.

    Raises:
        EngineError: ``cuda`` was asked for and is not there, or has too few devices.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EngineError(
            "engine.device: got 'cuda', but torch sees no CUDA device; use auto or cpu"
        )
    if local_rank >= torch.cuda.device_count():
        raise EngineError(
            f"local rank {local_rank} has no device: torch sees {torch.cuda.device_count()}; "
            "start one process per device"
        )
    return torch.device("cuda", local_rank)


def name_accelerator() -> None:
    """Tell DeepSpeed that there is no accelerator, before anything imports it.

    PEFT imports accelerate, which imports DeepSpeed, which otherwise guesses and warns.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


@contextlib.contextmanager
def process_group(device: str = "auto", timeout_seconds: float = 600.0) -> Iterator[World]:
    """Join the job's process group (gloo on CPU, NCCL on CUDA) and leave it again.

    An already initialised group is used as it is and left alone.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
        timeout_seconds: after this long a collective that a rank never joined raises.

    Raises:
        EngineError: a collective failed; names the ranks that are missing, and where each stands.
            Or memory ran out.
        DataError: a data worker died.
    """
    launched.adopt(os.environ)
    rank, world_size, local_rank = read_ranks()
    set_threads()
    place = choose_device(device, local_rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    owned = not dist.is_initialized()
    if owned:
        _init(rank, world_size, place, timeout_seconds)
    try:
        world = World(dist.get_rank(), dist.get_world_size(), local_rank, place)
        with contextlib.ExitStack() as told:
            if owned:
                told.enter_context(watched(world.position, timeout_seconds))
                told.enter_context(worded_failures(world.position))
            yield world
    finally:
        if owned and dist.is_initialized():
            dist.destroy_process_group()


def _init(rank: int, world_size: int, device: torch.device, timeout_seconds: float) -> None:
    timeout = datetime.timedelta(seconds=timeout_seconds)
    # A CPU backend beside NCCL lets small host-side agreements skip the GPU queue.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"backend": backend, "timeout": timeout}
    meeting_file = os.environ.get("PIXELRAG_RENDEZVOUS_FILE")
    if meeting_file is not None:
        options |= {"init_method": f"file://{meeting_file}", "rank": rank, "world_size": world_size}
    elif world_size == 1 and "MASTER_ADDR" not in os.environ:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    else:
        os.environ.setdefault("RANK", str(rank))
        os.environ.setdefault("WORLD_SIZE", str(world_size))
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise EngineError(
                f"rank {rank} of {world_size}: {' and '.join(missing)} not set; a launcher sets "
                "them; with srun and mpirun the script that starts them must export them"
            )
        options |= {"rank": rank, "world_size": world_size}
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            options["store"] = _store_of_this_attempt(world_size, timeout)
    dist.init_process_group(**options)


def _store_of_this_attempt(world_size: int, timeout: datetime.timedelta) -> dist.Store:
    """torchrun's store, apart from what an earlier attempt left in it.

    The store outlives a restart (`--max-restarts`), and gloo would connect to ranks that are gone.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt-{attempt}", store)
