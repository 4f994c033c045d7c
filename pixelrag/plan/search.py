"""Compares the engines for a job, and finds the largest chunk or micro-batch that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.distill import DistillConfig
from pixelrag.config.rag import RagConfig
from pixelrag.plan.hardware import Cluster
from pixelrag.plan.jobs import PlannedConfig
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

    config: PlannedConfig
    prediction: Prediction

    @property
    def name(self) -> str:
        """Engine and modes."""
        name, found = self.config.engine.name, self.prediction
        params = f", {found.params}" if name in ("zero3", "fsdp2") else ""
        return f"{name}, {found.grad_sync}{params}"

    def rate(self, cluster: Cluster, mfu: float) -> float:
        """Tokens a second of all ranks, at most."""
        return self.prediction.rate(cluster, self.config.engine.precision, mfu)

    def flags(self) -> list[str]:
        """What makes a run of it."""
        engine, found, batch = self.config.engine, self.prediction, self.config.batch
        flags = [f"--engine.name={engine.name}", f"--engine.grad_sync={found.grad_sync}"]
        if engine.name in ("zero3", "fsdp2"):
            flags.append(f"--engine.params={found.params}")
        for name in ("per_device_batch_size", "gradient_accumulation_steps"):
            flags.append(f"--batch.{name}={getattr(batch, name)}")
        if (size := size_option(self.config)) != "per_device_batch_size":
            flags.append(f"--batch.{size}={getattr(batch, size)}")
        return flags


def engines(
    config: PlannedConfig, cluster: Cluster, lengths: Lengths, mfu: float
) -> list[Alternative]:
    """The job on every engine that its configuration can have: what fits and is fastest first."""
    names: Sequence[str] = ENGINES
    if config.engine.deepspeed is not None:  # a file is of one stage
        names = (config.engine.name,)
    found = []
    for name in names:
        update: dict[str, str] = {"name": name}
        if name not in ("zero3", "fsdp2"):
            update["params"] = "auto"
        engine = config.engine.model_copy(update=update)
        found.append(_tried(config.model_copy(update={"engine": engine}), cluster, lengths))

    def order(one: Alternative) -> tuple[bool, float, int]:
        fits = one.prediction.fits(cluster.device.memory)
        return not fits, -one.rate(cluster, mfu), one.prediction.peak

    return sorted(found, key=order)


def size_option(config: PlannedConfig) -> str:
    """What sets the memory and leaves the gradient alone, in `batch`."""
    if isinstance(config, DistillConfig):
        return "per_device_batch_size"
    return "chunk_size" if isinstance(config, ContrastiveConfig) else "generator_chunk_size"


def is_whole(config: PlannedConfig, world_size: int) -> bool:
    """Whether the chunk or micro-batch is all that a rank has in a step: none can be larger."""
    return _now(config) >= _rows(config, world_size)


def largest(config: PlannedConfig, cluster: Cluster, lengths: Lengths) -> Alternative | None:
    """The job with the largest chunk or micro-batch that fits; None where not even one row does.

    The configured size is doubled until it no longer fits, or halved until it does. A chunk size
    of `auto` stays as it is.
    """
    sizes = _sizes(config, cluster.world_size)
    place = next((i for i, (size, _) in enumerate(sizes) if size >= _now(config)), 0)
    best = None
    for _, candidate in sizes[place:]:
        tried = _tried(candidate, cluster, lengths)
        if not tried.prediction.fits(cluster.device.memory):
            break
        best = tried
    for _, candidate in reversed(sizes[:place]):
        if best is not None:
            break
        tried = _tried(candidate, cluster, lengths)
        best = tried if tried.prediction.fits(cluster.device.memory) else None
    return best


def _now(config: PlannedConfig) -> int:
    value = getattr(config.batch, size_option(config))
    return 1 if value == "auto" else value


def _rows(config: PlannedConfig, world_size: int) -> int:
    """What a rank has in a step: rows, or prompts of a RAG job."""
    rows = -(-config.batch.rows(world_size) // world_size)
    return rows * (config.retrieval.k if isinstance(config, RagConfig) else 1)


def _sizes(config: PlannedConfig, world_size: int) -> Sequence[tuple[int, PlannedConfig]]:
    """The configured size, its halves, and its doubles up to all that a rank has in a step."""
    batch, option, now = config.batch, size_option(config), _now(config)
    if getattr(batch, option) == "auto":
        return [(now, config)]
    rows = _rows(config, world_size)
    if isinstance(config, DistillConfig):
        sizes = [size for size in range(1, rows + 1) if rows % size == 0]
        updates = [{option: n, "gradient_accumulation_steps": rows // n} for n in sizes]
    else:
        halves = [now >> i for i in range(now.bit_length()) if now >> i]
        doubles = [now << i for i in range(1, 32) if now << i < 2 * rows]
        sizes = sorted([*halves, *doubles])
        updates = [{option: n} for n in sizes]
    changed = [batch.model_copy(update=update) for update in updates]
    return [
        (n, config.model_copy(update={"batch": b})) for n, b in zip(sizes, changed, strict=True)
    ]


def _tried(config: PlannedConfig, cluster: Cluster, lengths: Lengths) -> Alternative:
    return Alternative(config, predict(config, cluster.world_size, lengths, cluster.device))
