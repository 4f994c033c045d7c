"""What every training job does around its loop: logging, resuming, length, engine."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from pixelrag.config.base import JobConfig
from pixelrag.distributed.env import World, process_group, read_ranks
from pixelrag.distributed.together import together
from pixelrag.engine import Engine, build_engine
from pixelrag.errors import CheckpointError, PixelragError
from pixelrag.train.checkpoint import resolve_resume
from pixelrag.train.optimizer import adamw

logger = logging.getLogger("pixelrag")


def show_log(rank: int) -> None:
    """Let rank 0 tell what pixelrag does; other ranks speak only of errors."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    # Hub and tokenizer chatter of every rank would bury it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@contextlib.contextmanager
def world_of(config: JobConfig) -> Iterator[World]:
    """The process group that the configuration describes, and a log of what is done in it."""
    show_log(read_ranks()[0])
    with process_group(config.engine.device, config.engine.timeout_seconds) as world:
        yield world


def checkpoint_of(config: JobConfig) -> Path | None:
    """The checkpoint to go on from, or None.

    Raises:
        CheckpointError: there is none where one is named, or the folder cannot be read.
    """
    output = Path(config.output_dir)
    try:
        return resolve_resume(config.checkpoint.resume, output)
    except OSError as error:
        raise CheckpointError(f"{output}: cannot be read ({error.strerror or error})") from error


def num_steps(config: JobConfig, steps_per_epoch: float) -> int:
    """Optimizer steps of the whole run."""
    if config.optim.max_steps is not None:
        return config.optim.max_steps
    # The epsilon keeps 2.2 epochs of 25 steps, 55.00000000000001, at 55.
    return max(1, math.ceil(config.optim.num_epochs * steps_per_epoch - 1e-9))


def engine_for(
    config: JobConfig, world: World, container: nn.Module, blocks: Sequence[nn.Module]
) -> Engine:
    """Build the engine that the configuration names around the container; a collective."""
    engine = config.engine
    with together():
        return build_engine(
            container,
            adamw(config.optim),
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
