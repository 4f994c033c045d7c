"""The distillation job's configuration, and the rules that span its sections."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from pixelrag.config.base import JobConfig
from pixelrag.config.distill_parts import (
    AdapterConfig,
    ChatDataConfig,
    DistillBatchConfig,
    DistillCheckpointConfig,
    DistillEvalConfig,
    DistillOptimConfig,
    KDLossConfig,
    PackingConfig,
    StudentConfig,
    TeacherConfig,
    WatchConfig,
)
from pixelrag.config.parts import EmaConfig, EngineConfig, LoggingConfig
from pixelrag.config.problems import Conflict, shown
from pixelrag.config.rules import (
    ema_conflicts,
    engine_conflicts,
    length_conflicts,
    lora_conflicts,
    resume_conflicts,
)

METRICS = ("eval/loss", "eval/ce_loss", "eval/kd_loss", "eval/agreement")


class DistillConfig(JobConfig):
    """Everything `pixelrag distill` can be told."""

    adaptable: ClassVar[tuple[str, ...]] = (
        "student.attention",
        "student.liger",
        "student.gradient_checkpointing",
        "student.compile",
        "teacher.attention",
        "teacher.liger",
        "teacher.device",
        "teacher.placement",
        "teacher.offload",
        "loss.implementation",
        "loss.chunk_size",
        "loss.compile",
        # The sampler insists on the global batch, which stays when the world is another.
        "batch.gradient_accumulation_steps",
        "data.prefetch_factor",
    )

    output_dir: str = Field("runs/distill", min_length=1)
    """Folder of the run: metrics, checkpoints, exported models."""
    seed: int = Field(25, ge=0, lt=2**32)
    """Seed of data order, dropout and fresh weights."""
    student: StudentConfig
    teacher: TeacherConfig = TeacherConfig()
    lora: AdapterConfig = AdapterConfig()
    data: ChatDataConfig
    packing: PackingConfig = PackingConfig()
    loss: KDLossConfig = KDLossConfig()
    batch: DistillBatchConfig = DistillBatchConfig()
    optim: DistillOptimConfig = DistillOptimConfig()
    ema: EmaConfig = EmaConfig()
    engine: EngineConfig = EngineConfig()
    eval: DistillEvalConfig = DistillEvalConfig()
    checkpoint: DistillCheckpointConfig = DistillCheckpointConfig()
    watch: WatchConfig = WatchConfig()
    logging: LoggingConfig = LoggingConfig()

    def conflicts(self) -> Iterator[Conflict]:
        """Yield every pair of settings that cannot stand together, with what mends it."""
        yield from length_conflicts(self.optim)
        yield from engine_conflicts(self.engine)
        yield from ema_conflicts(self.ema, self.optim)
        yield from lora_conflicts(self.lora)
        yield from _student_conflicts(self)
        yield from _teacher_conflicts(self.teacher)
        yield from _placement_conflicts(self.teacher, self.engine)
        yield from _loss_conflicts(self)
        yield from _data_conflicts(self)
        yield from _evaluation_conflicts(self)
        yield from resume_conflicts(self)


def _student_conflicts(config: DistillConfig) -> Iterator[Conflict]:
    student, engine = config.student, config.engine
    if student.random_init and config.lora.enabled:
        yield Conflict(
            ("student.random_init", "lora.enabled"),
            got="student.random_init true with lora.enabled true",
            remedy="an adapter is of no use without the weights it was trained on: drop one",
        )
    if student.attention == "flash_attention_2" and engine.precision == "fp32":
        yield Conflict(
            ("student.attention", "engine.precision"),
            got="student.attention flash_attention_2 with engine.precision fp32",
            remedy="set engine.precision bf16, or student.attention auto",
        )
    for name, what in (("attention", "flash_attention_2"), ("liger", "on")):
        if getattr(student, name) == what and engine.device == "cpu":
            yield Conflict(
                (f"student.{name}", "engine.device"),
                got=f"student.{name} {what} with engine.device cpu",
                remedy=f"set student.{name} to auto: it needs CUDA",
            )


def _teacher_conflicts(teacher: TeacherConfig) -> Iterator[Conflict]:
    source = teacher.source
    if source == "live":
        if teacher.name_or_path is None:
            yield Conflict(
                ("teacher.name_or_path", "teacher.source"),
                got="teacher.source live without teacher.name_or_path",
                remedy="name the teacher: --teacher.name_or_path NAME",
            )
        if teacher.path is not None:
            yield Conflict(
                ("teacher.path", "teacher.source"),
                got=f"teacher.path {teacher.path!r} with teacher.source live",
                remedy="leave the path out, or set teacher.source to what lies there",
            )
        return
    if teacher.path is None:
        yield Conflict(
            ("teacher.path", "teacher.source"),
            got=f"teacher.source {source} without teacher.path",
            remedy="give the socket of the teacher" if source == "remote" else "give its folder",
        )
    defaults = TeacherConfig()
    for name in TeacherConfig.model_fields:
        value = getattr(teacher, name)
        if name not in ("source", "path", "name_or_path") and value != getattr(defaults, name):
            yield Conflict(
                (f"teacher.{name}", "teacher.source"),
                got=f"teacher.{name} {shown(value)} with teacher.source {source}",
                remedy=f"leave teacher.{name} out: no teacher runs in this job",
            )


def _placement_conflicts(teacher: TeacherConfig, engine: EngineConfig) -> Iterator[Conflict]:
    device = engine.device if teacher.device == "auto" else teacher.device
    precision = engine.precision if teacher.precision == "auto" else teacher.precision
    if teacher.placement == "sharded" and teacher.offload:
        yield Conflict(
            ("teacher.placement", "teacher.offload"),
            got="teacher.placement sharded with teacher.offload true",
            remedy="offload a replicated teacher: its ranks share one copy in CPU memory",
        )
    if teacher.offload and device == "cpu":
        yield Conflict(
            ("teacher.offload", "teacher.device", "engine.device"),
            got="teacher.offload true for a teacher on the cpu",
            remedy="leave it off: the layers lie in CPU memory as it is",
        )
    if teacher.placement == "sharded" and teacher.device not in ("auto", engine.device):
        yield Conflict(
            ("teacher.placement", "teacher.device", "engine.device"),
            got=f"teacher.placement sharded with teacher.device {teacher.device} and "
            f"engine.device {engine.device}",
            remedy="shard it on the student's devices (teacher.device auto), or replicate it",
        )
    if teacher.attention == "flash_attention_2" and (device == "cpu" or precision == "fp32"):
        yield Conflict(
            ("teacher.attention", "teacher.device", "teacher.precision"),
            got=f"teacher.attention flash_attention_2 on {device} in {precision}",
            remedy="set teacher.attention to auto: it needs CUDA and bf16",
        )
    if teacher.liger == "on" and device == "cpu":
        yield Conflict(
            ("teacher.liger", "teacher.device", "engine.device"),
            got="teacher.liger on for a teacher on the cpu",
            remedy="set teacher.liger to auto: it needs CUDA",
        )


def _loss_conflicts(config: DistillConfig) -> Iterator[Conflict]:
    loss, cached = config.loss, config.teacher.source == "cache"
    restricted = loss.top_k is not None or cached
    defaults = KDLossConfig()
    users = {
        "beta": loss.kind == "jsd",
        "skew": loss.kind.startswith("skewed"),
        "tail": restricted,
    }
    needs = {"beta": "loss.kind jsd", "skew": "a skewed loss.kind", "tail": "loss.top_k"}
    for name, used in users.items():
        value = getattr(loss, name)
        if not used and value != getattr(defaults, name):
            yield Conflict(
                (f"loss.{name}", "loss.kind"),
                got=f"loss.{name} {value} without {needs[name]}, which alone uses it",
                remedy=f"leave loss.{name} out, or set {needs[name]}",
            )
    if cached and loss.top_k is not None:
        yield Conflict(
            ("loss.top_k", "teacher.source"),
            got=f"loss.top_k {loss.top_k} with teacher.source cache",
            remedy="leave loss.top_k out: the cache was written with its own k",
        )
    if loss.implementation == "logits" and config.teacher.source != "live":
        yield Conflict(
            ("loss.implementation", "teacher.source"),
            got=f"loss.implementation logits with teacher.source {config.teacher.source}",
            remedy="set teacher.source live, or loss.implementation fused",
        )


def _data_conflicts(config: DistillConfig) -> Iterator[Conflict]:
    data, packing = config.data, config.packing
    if data.streaming and data.max_samples is None:
        yield Conflict(
            ("data.streaming", "data.max_samples"),
            got="data.streaming true without data.max_samples",
            remedy="say how many samples to take: rows are packed from all of them",
        )
    if packing.attention != "concatenated" and packing.mask_first_token:
        yield Conflict(
            ("packing.mask_first_token", "packing.attention"),
            got=f"packing.mask_first_token true with packing.attention {packing.attention}",
            remedy="leave it out: isolated samples never learn from the one before them",
        )
    if packing.attention == "concatenated" and not packing.enabled:
        yield Conflict(
            ("packing.attention", "packing.enabled"),
            got="packing.attention concatenated while packing.enabled is false",
            remedy="set packing.enabled true, or leave packing.attention out",
        )
    if packing.attention == "concatenated" and config.teacher.source in ("hidden_states", "cache"):
        yield Conflict(
            ("packing.attention", "teacher.source"),
            got=f"packing.attention concatenated with teacher.source {config.teacher.source}",
            remedy="set packing.attention isolated: the cache holds each sample seen by itself",
        )


def _evaluation_conflicts(config: DistillConfig) -> Iterator[Conflict]:
    data, metric = config.data, config.checkpoint.best_metric
    if metric not in METRICS:
        yield Conflict(
            ("checkpoint.best_metric",),
            got=f"checkpoint.best_metric {metric!r}",
            remedy=f"one of {', '.join(METRICS)}",
        )
    if data.eval and data.eval_samples is not None:
        yield Conflict(
            ("data.eval_samples", "data.eval"),
            got=f"data.eval_samples {data.eval_samples} beside data.eval",
            remedy="hold samples out, or name held-out files",
        )
    if (
        data.max_samples is not None
        and data.eval_samples is not None
        and data.eval_samples >= data.max_samples
    ):
        yield Conflict(
            ("data.eval_samples", "data.max_samples"),
            got=f"data.eval_samples {data.eval_samples} of data.max_samples {data.max_samples}",
            remedy="hold out fewer samples than there are",
        )
    if data.eval or data.eval_samples is not None:
        return
    for name in ("every_steps", "on_start", "max_samples"):
        value = getattr(config.eval, name)
        if value not in (None, False):
            yield Conflict(
                (f"eval.{name}", "data.eval", "data.eval_samples"),
                got=f"eval.{name} {shown(value)} without anything held out",
                remedy="name held-out files in data.eval, or set data.eval_samples",
            )
