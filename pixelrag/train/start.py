"""How every training job starts: its process group, and where a checkpoint left the run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pixelrag.config.base import JobConfig
from pixelrag.distributed.collectives import from_main
from pixelrag.distributed.env import World
from pixelrag.distributed.interrupt import Interrupted, interruptible, stop_point
from pixelrag.distributed.together import together
from pixelrag.errors import CheckpointError
from pixelrag.train.checkpoint import list_checkpoints
from pixelrag.train.job import sole_writer, world_of
from pixelrag.train.loop import is_finished
from pixelrag.train.run_state import RunState, read_state
from pixelrag.train.signals import StopRequest
from pixelrag.train.sinks import check_sinks

logger = logging.getLogger("pixelrag")

# Sections that decide which batches there are.
_DATA = {"data", "batch", "packing", "knowledge_base"}

Config = TypeVar("Config", bound=JobConfig)


def run_job(config: Config, train: Callable[[Config, World, StopRequest], dict[str, Any]]) -> int:
    """Call ``train`` inside a process group of its own; returns the exit code.

    Until the loop begins, a request to stop ends the job at the next `stop_point`.

    Raises:
        PixelragError: see the message; raised before weights are loaded where possible.
    """
    check_sinks([n for n in ("tensorboard", "wandb", "trackio") if getattr(config.logging, n)])
    output = Path(config.output_dir)
    # A signal is noted from the moment the ranks have met until they have parted.
    with contextlib.ExitStack() as signals, world_of(config) as world:
        stop = signals.enter_context(StopRequest(output))
        with sole_writer(output, world):
            try:
                with interruptible(stop.requested):
                    summary = train(config, world, stop)
            except Interrupted as asked:
                reason = str(asked)
                summary = {"preempted": reason}
                from_main(lambda: _stopped_early(output, reason, stop))
    return config.checkpoint.preempted_exit_code if "preempted" in summary else 0


def _stopped_early(output: Path, reason: str, stop: StopRequest) -> None:
    newest = next((path for _, path in list_checkpoints(output)), None)
    logger.info("stopped before training began: %s; nothing was written but PREEMPTED", reason)
    stop.obeyed(reason, newest)


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
        CheckpointError: unreadable, written under another configuration or other data, or past the
            end of the run.
    """
    stop_point()
    if checkpoint is None:
        return None, False
    state = from_main(lambda: read_state(checkpoint, config))
    with together():
        try:
            go_on_at(state.position)
        except CheckpointError as error:
            if not _DATA & {name.split(".")[0] for name in config.checkpoint.allow_changes}:
                raise
            logger.warning(
                "%s\n  allowed by checkpoint.allow_changes: the data begin at their first batch",
                error,
            )
    output = Path(config.output_dir)
    if state.step > total_steps:
        raise CheckpointError(
            f"{checkpoint}: is at step {state.step}; this run ends at step {total_steps}; raise "
            "optim.max_steps or optim.num_epochs, name an earlier checkpoint by checkpoint.resume, "
            "or start anew in another output_dir"
        )
    if state.step == total_steps and from_main(lambda: is_finished(output, state.step)):
        logger.info("%s has all %d steps; nothing to do", checkpoint, total_steps)
        return state, True
    logger.info("resuming from %s, step %d of %d", checkpoint, state.step, total_steps)
    return state, False
