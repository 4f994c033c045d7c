"""Compares the engines for a job, and finds the largest chunk or micro-batch that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pixelrag.config.base import JobConfig
from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.distill import DistillConfig
from pixelrag.plan.hardware import Cluster
from pixelrag.plan.prediction import Prediction, predict
from pixelrag.plan.workload import Lengths

ENGINES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to run the job.

    Attributes:
        config: of it.
        prediction: what it costs.
    """

    config: JobConfig
    prediction: Prediction

    @property
    def name(self) -> str:
        """Engine and modes."""
        name, found = self.config.engine.name, self.prediction
        params = f", {found.params}" if name in ("zero3", "fsdp2") else ""
        return f"{name}, {found.grad_sync}{params}"


def engines(config: JobConfig, cluster: Cluster, lengths: Lengths) -> list[Alternative]:
    """The job on every engine that its configuration can have, otherwise as it is."""
    names = ENGINES
    if config.engine.deepspeed is not None:  # a file is of one stage
        names = (config.engine.name,)
    found = []
    for name in names:
        offload = config.engine.offload_optimizer and name != "ddp"
        update = {"name": name, "offload_optimizer": offload}
        if name not in ("zero3", "fsdp2"):
            update["params"] = "auto"
        engine = config.engine.model_copy(update=update)
        found.append(_tried(config.model_copy(update={"engine": engine}), cluster, lengths))
    return found


def largest(
    config: JobConfig, cluster: Cluster, lengths: Lengths
) -> tuple[str, int, Alternative] | None:
    """Double what sets the memory until it no longer fits.

    Returns:
        The option, its largest value that fits, and what that costs; None where not even half of
        the configured value fits.
    """
    option, best = "", None
    for option, value, candidate in _larger(config, cluster.world_size):
        tried = _tried(candidate, cluster, lengths)
        if not tried.prediction.fits(cluster.device.memory):
            break
        best = option, value, tried
    return best


def _larger(config: JobConfig, world_size: int) -> Iterator[tuple[str, int, JobConfig]]:
    """The configured size, and its doubles up to all that a rank has in a step."""
    batch = config.batch
    if isinstance(config, DistillConfig):
        rows = config.batch.rows(world_size) // world_size
        size = batch.per_device_batch_size
        while size <= rows:
            if rows % size == 0:
                update = {
                    "per_device_batch_size": size,
                    "gradient_accumulation_steps": rows // size,
                }
                changed = config.model_copy(update={"batch": batch.model_copy(update=update)})
                yield "batch.per_device_batch_size", size, changed
            size *= 2
        return
    name = "chunk_size" if isinstance(config, ContrastiveConfig) else "generator_chunk_size"
    rows, size = -(-batch.rows(world_size) // world_size), getattr(batch, name)
    if name == "generator_chunk_size":
        rows *= config.retrieval.k
    while size != "auto" and size < 2 * rows:
        changed = batch.model_copy(update={name: size})
        yield f"batch.{name}", size, config.model_copy(update={"batch": changed})
        size *= 2


def _tried(config: JobConfig, cluster: Cluster, lengths: Lengths) -> Alternative:
    return Alternative(config, predict(config, cluster.world_size, lengths, cluster.device))
