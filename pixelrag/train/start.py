"""How every training job starts: its process group, and where a checkpoint left the run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pixelrag.config.base import JobConfig
from pixelrag.distributed.collectives import from_main
from pixelrag.distributed.env import World
from pixelrag.distributed.together import together
from pixelrag.train.job import world_of
from pixelrag.train.loop import is_finished
from pixelrag.train.run_state import RunState, read_state
from pixelrag.train.sinks import check_sinks

logger = logging.getLogger("pixelrag")

Config = TypeVar("Config", bound=JobConfig)


def run_job(config: Config, train: Callable[[Config, World], dict[str, Any]]) -> int:
    """Call ``train`` inside a process group of its own; returns the exit code.

    Raises:
        PixelragError: see the message; raised before weights are loaded where possible.
    """
    check_sinks([n for n in ("tensorboard", "wandb", "trackio") if getattr(config.logging, n)])
    with world_of(config) as world:
        train(config, world)
    return 0


def go_on(
    config: JobConfig,
    checkpoint: Path | None,
    total_steps: int,
    go_on_at: Callable[[dict[str, Any]], None],
) -> tuple[RunState | None, bool]:
    """Where ``checkpoint`` left the run, and whether nothing is left to do; a collective.

    Args:
        config: the job's configuration.
        checkpoint: a checkpoint of this run; None for a new one.
        total_steps: optimizer steps of the whole run.
        go_on_at: takes the position in the data, and refuses that of other data.

    Raises:
        CheckpointError: unreadable, or written under another configuration or other data.
    """
    if checkpoint is None:
        return None, False
    state = from_main(lambda: read_state(checkpoint, config))
    with together():
        go_on_at(state.position)
    output = Path(config.output_dir)
    if state.step >= total_steps and from_main(lambda: is_finished(output, state.step)):
        logger.info("%s has all %d steps; nothing to do", checkpoint, total_steps)
        return state, True
    logger.info("resuming from %s, step %d of %d", checkpoint, state.step, total_steps)
    return state, False
