"""The contrastive job's configuration, and the rules that span its sections."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from pixelrag.config.base import JobConfig
from pixelrag.config.ds_file import read_deepspeed_file
from pixelrag.config.parts import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
)
from pixelrag.config.problems import Conflict
from pixelrag.config.section import Section

IN_BATCH_METRICS = ("eval/loss", "eval/accuracy")
RETRIEVAL_METRICS = ("eval/recall@1", "eval/recall@5", "eval/recall@10", "eval/mrr", "eval/ndcg@10")


class LossConfig(Section):
    temperature: float = Field(0.07, gt=0)
    """Temperature of the softmax, to begin with."""
    learnable_temperature: bool = True
    """Train the temperature, held between 0.01 and 1."""


class BatchConfig(Section):
    per_device_batch_size: int = Field(128, ge=1)
    """Rows a rank contributes to one global batch."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Global batches (each with its own negatives) to an optimizer step."""
    chunk_size: int = Field(16, ge=1)
    """Rows that go through the model at once: sets the memory, never the gradient (GradCache)."""


class EvalConfig(Section):
    every_steps: int | None = Field(None, ge=1)
    """Evaluate every so many steps; null = only at the end."""
    batch_size: int = Field(32, ge=1)
    """Rows a rank encodes at once."""
    corpus: str | None = None
    """JSONL corpus to search; null = all documents of data.eval."""
    retrieval: bool = True
    """Measure recall, MRR and nDCG, beside loss and in-batch accuracy."""
    max_rows: int | None = Field(None, ge=1)
    """Use the first so many rows of data.eval; null = all."""


class ContrastiveConfig(JobConfig):
    """Everything `pixelrag contrastive` can be told."""

    output_dir: str = Field("runs/contrastive", min_length=1)
    """Folder of the run: metrics, checkpoints, exported models."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of data order, dropout and fresh weights."""
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    data: DataConfig
    loss: LossConfig = LossConfig()
    batch: BatchConfig = BatchConfig()
    optim: OptimConfig = OptimConfig()
    engine: EngineConfig = EngineConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    def conflicts(self) -> Iterator[Conflict]:
        """Yield every pair of settings that cannot stand together, with what mends it."""
        yield from _length_conflicts(self.optim)
        yield from _engine_conflicts(self.engine)
        yield from _evaluation_conflicts(self)
        if self.lora.vision and not self.lora.enabled:
            yield Conflict(
                ("lora.vision", "lora.enabled"),
                got="lora.vision true while lora.enabled is false",
                remedy="set lora.enabled true, or lora.vision false",
            )
        temperature = self.loss.temperature
        if self.loss.learnable_temperature and not 0.01 <= temperature <= 1:
            yield Conflict(
                ("loss.temperature", "loss.learnable_temperature"),
                got=f"loss.temperature {temperature}, and a learnable one stays within 0.01 to 1",
                remedy="start it within 0.01 to 1, or set loss.learnable_temperature false",
            )
        yield from _resume_conflicts(self.checkpoint.resume)


def _length_conflicts(optim: OptimConfig) -> Iterator[Conflict]:
    both = ("optim.max_steps", "optim.num_epochs")
    if optim.max_steps is None and optim.num_epochs is None:
        yield Conflict(
            both,
            got="neither optim.max_steps nor optim.num_epochs",
            remedy="say how long to train: --optim.max_steps N or --optim.num_epochs X",
        )
    if optim.max_steps is not None and optim.num_epochs is not None:
        yield Conflict(
            both,
            got=f"optim.max_steps {optim.max_steps} and optim.num_epochs {optim.num_epochs}",
            remedy="give one of them and set the other to null",
        )
    warmup, steps = optim.warmup_steps, optim.max_steps
    if warmup is not None and steps is not None and warmup >= steps:
        yield Conflict(
            ("optim.warmup_steps", "optim.max_steps"),
            got=f"optim.warmup_steps {warmup} with optim.max_steps {steps}",
            remedy="warm up for fewer steps than are trained",
        )


def _engine_conflicts(engine: EngineConfig) -> Iterator[Conflict]:
    if engine.params == "sharded" and engine.name not in ("zero3", "fsdp2"):
        yield Conflict(
            ("engine.params", "engine.name"),
            got=f"engine.params sharded on {engine.name}, which keeps whole parameters",
            remedy="set engine.name to zero3 or fsdp2, or engine.params to auto",
        )
    if engine.offload_optimizer:
        if engine.name in ("ddp", "zero0"):
            yield Conflict(
                ("engine.offload_optimizer", "engine.name"),
                got=f"engine.offload_optimizer on {engine.name}, which does not shard its state",
                remedy="set engine.name to zero1, zero2, zero3 or fsdp2",
            )
        if engine.name == "fsdp2" and engine.device == "cpu":
            yield Conflict(
                ("engine.offload_optimizer", "engine.name", "engine.device"),
                got="engine.offload_optimizer on fsdp2 with engine.device cpu",
                remedy="leave it off (the state lies in CPU memory as it is), or use zero1 to 3",
            )
    if engine.deepspeed is None:
        return
    file = read_deepspeed_file(Path(engine.deepspeed))
    if not engine.name.startswith("zero"):
        yield Conflict(
            ("engine.name", "engine.deepspeed"),
            got=f"engine.name {engine.name} with engine.deepspeed {engine.deepspeed}",
            remedy="set engine.name to one of zero0 to zero3, or engine.deepspeed to null",
        )
    elif file.stage is not None and engine.name != f"zero{file.stage}":
        yield Conflict(
            ("engine.name", "engine.deepspeed"),
            got=f"engine.name {engine.name} with {engine.deepspeed}, a file of stage {file.stage}",
            remedy=f"set engine.name to zero{file.stage}, or give another file or none",
        )
    if file.offload_optimizer not in (None, engine.offload_optimizer):
        says = "with" if file.offload_optimizer else "without"
        yield Conflict(
            ("engine.offload_optimizer", "engine.deepspeed"),
            got=f"engine.offload_optimizer {str(engine.offload_optimizer).lower()} with "
            f"{engine.deepspeed}, a file {says} it",
            remedy="leave engine.offload_optimizer to the file, or give another file",
        )


def _evaluation_conflicts(config: ContrastiveConfig) -> Iterator[Conflict]:
    metric = config.checkpoint.best_metric
    if metric not in IN_BATCH_METRICS + RETRIEVAL_METRICS:
        names = ", ".join(IN_BATCH_METRICS + RETRIEVAL_METRICS)
        yield Conflict(
            ("checkpoint.best_metric",),
            got=f"checkpoint.best_metric {metric!r}",
            remedy=f"one of {names}",
        )
    elif metric in RETRIEVAL_METRICS and not config.eval.retrieval and config.data.eval:
        yield Conflict(
            ("checkpoint.best_metric", "eval.retrieval"),
            got=f"checkpoint.best_metric {metric} while eval.retrieval is false",
            remedy="set checkpoint.best_metric to eval/loss or eval/accuracy, or "
            "eval.retrieval true",
        )
    if config.eval.corpus is not None and not config.eval.retrieval:
        yield Conflict(
            ("eval.corpus", "eval.retrieval"),
            got="eval.corpus while eval.retrieval is false",
            remedy="set eval.retrieval true, or eval.corpus null",
        )
    if config.data.eval:
        return
    for name in ("every_steps", "corpus", "max_rows"):
        value = getattr(config.eval, name)
        if value is not None:
            yield Conflict(
                (f"eval.{name}", "data.eval"),
                got=f"eval.{name} {value} without data.eval",
                remedy="name held-out rows in data.eval",
            )
    if metric != CheckpointConfig().best_metric and metric in IN_BATCH_METRICS + RETRIEVAL_METRICS:
        yield Conflict(
            ("checkpoint.best_metric", "data.eval"),
            got=f"checkpoint.best_metric {metric} without data.eval",
            remedy="name held-out rows in data.eval, or leave checkpoint.best_metric out",
        )


def _resume_conflicts(resume: str) -> Iterator[Conflict]:
    # Only a slip of the pen is caught here: a run's config.yaml must load after its checkpoints are
    # gone, and a folder that is named but missing is reported by what reads checkpoints.
    if resume not in ("auto", "never") and "/" not in resume and not Path(resume).exists():
        yield Conflict(
            ("checkpoint.resume",),
            got=f"checkpoint.resume {resume!r}, and there is no such folder",
            remedy="auto, never, or the folder of a checkpoint",
        )
