"""What every training job does around its loop: logging, resuming, length, engine."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from logging.handlers import MemoryHandler
from pathlib import Path

from torch import nn

from pixelrag.config.base import JobConfig
from pixelrag.distributed.env import World, process_group, read_ranks
from pixelrag.distributed.together import together
from pixelrag.engine import Engine, build_engine
from pixelrag.errors import CheckpointError, PixelragError
from pixelrag.train.atomic import MANIFEST
from pixelrag.train.averaging import averaging_of
from pixelrag.train.checkpoint import resolve_resume, verify_dir
from pixelrag.train.optimizer import PartOf, adamw
from pixelrag.train.owner import held
from pixelrag.train.text_file import require_writable

logger = logging.getLogger("pixelrag")


def show_log(rank: int) -> None:
    """Let rank 0 tell what pixelrag does on the terminal; other ranks show errors alone there.

    What those others have to say is kept for `open_rank_log`.
    """
    if not logger.handlers:
        terminal = logging.StreamHandler(sys.stderr)
        terminal.setFormatter(logging.Formatter("%(message)s"))
        terminal.setLevel(logging.INFO if rank == 0 else logging.ERROR)
        logger.addHandler(terminal)
        logger.propagate = False
        if rank != 0:
            logger.addHandler(MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1))
    logger.setLevel(logging.INFO)
    # Hub and tokenizer chatter of every rank would bury it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def open_rank_log(folder: Path, rank: int) -> None:
    """Write what this rank has said, and will say, to a file of its own; rank 0 has the terminal.

    Called once a run begins: a job that is refused leaves no folder behind.
    """
    for kept in [h for h in logger.handlers if isinstance(h, MemoryHandler)]:
        folder.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(folder / f"rank-{rank:05}.log", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        kept.setTarget(file)
        kept.close()
        logger.removeHandler(kept)
        logger.addHandler(file)


@contextlib.contextmanager
def world_of(config: JobConfig) -> Iterator[World]:
    """The process group that the configuration describes, and a log of what is done in it."""
    show_log(read_ranks()[0])
    with process_group(config.engine.device, config.engine.timeout_seconds) as world:
        yield world


@contextlib.contextmanager
def sole_writer(folder: Path, world: World, option: str = "output_dir") -> Iterator[None]:
    """Let no other run write to the folder that ``option`` named; a collective to enter.

    Raises:
        CheckpointError: another run that lives does, or it cannot be written.
    """
    with contextlib.ExitStack() as kept:
        with together():
            require_writable(folder, option)
            if world.is_main:
                kept.enter_context(held(folder, option))
        yield


def checkpoint_of(config: JobConfig) -> Path | None:
    """The checkpoint to go on from, or None.

    Raises:
        CheckpointError: there is none where one is named, or the folder cannot be read.
    """
    output = Path(config.output_dir)
    if config.checkpoint.init_from is not None:
        _require_checkpoint(Path(config.checkpoint.init_from))
    try:
        return resolve_resume(config.checkpoint.resume, output)
    except OSError as error:
        raise CheckpointError(f"{output}: cannot be read ({error.strerror or error})") from error


def _require_checkpoint(folder: Path) -> None:
    if not (folder / MANIFEST).exists():
        raise CheckpointError(
            f"checkpoint.init_from: {folder} is no checkpoint (it has no {MANIFEST}); expected a "
            "checkpoint-<step> of a run. An exported folder, best/ or last/, is a model: name it "
            "as the model instead"
        )
    verify_dir(folder)


def num_steps(config: JobConfig, steps_per_epoch: float) -> int:
    """Optimizer steps of the whole run."""
    if config.optim.max_steps is not None:
        return config.optim.max_steps
    assert config.optim.num_epochs is not None  # one of the two is given
    # The epsilon keeps 2.2 epochs of 25 steps, 55.00000000000001, at 55.
    return max(1, math.ceil(config.optim.num_epochs * steps_per_epoch - 1e-9))


def engine_for(
    config: JobConfig,
    world: World,
    container: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    part_of: PartOf | None = None,
) -> Engine:
    """Build the engine that the configuration names around the container; a collective.

    ``part_of`` names the part of a parameter, where parts may have learning rates of their own.
    """
    engine = config.engine
    with together():
        return build_engine(
            container,
            adamw(config.optim, part_of, averages=averaging_of(config) is not None),
            name=engine.name,
            device=world.device,
            blocks=blocks,
            precision=engine.precision,
            grad_sync=engine.grad_sync,
            params=engine.params,
            offload_optimizer=engine.offload_optimizer,
            deepspeed=engine.deepspeed,
        )


@contextlib.contextmanager
def worded_disk_errors(folder: Path) -> Iterator[None]:
    """safetensors and tokenizers tell the operating system's errors in words alone."""
    try:
        yield
    except PixelragError:
        raise
    except Exception as error:
        if "(os error " not in str(error):
            raise
        raise CheckpointError(
            f"{folder}: cannot be written: {error}. Free space, and go on with "
            "`--checkpoint.resume auto`"
        ) from error
