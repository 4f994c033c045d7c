"""Distillation: student, teacher and packed micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from pixelrag.config.distill import DistillConfig
from pixelrag.config.distill_parts import StudentConfig, TeacherConfig
from pixelrag.distributed.collectives import sum_over_ranks
from pixelrag.engine import Engine
from pixelrag.errors import ConfigError
from pixelrag.losses.kd import Projected, TopK
from pixelrag.models.causal import CausalLM
from pixelrag.models.causal_load import outline
from pixelrag.models.distill import DistillModel
from pixelrag.models.rows import Rows
from pixelrag.models.teacher import Answer, LiveTeacher, TeacherRequest
from pixelrag.models.teacher_memory import shard_frozen
from pixelrag.plan.workload import Lengths, without_content
from pixelrag.train.distill_batch import Lesson

CPU = torch.device("cpu")
# What `pixelrag cache-logits` keeps of a token unless it is told otherwise.
_CACHED = 64


class DistillWorkload:
    """See `plan.workload.Workload`.

    Args:
        config: the job's configuration.
        lengths: `document` is the length of every document of a packed row.
        world_size: ranks that share a step's rows.

    Raises:
        ConfigError: a teacher that is not planned.
    """

    part_of = None
    index_bytes: ClassVar[dict[str, int]] = {}

    def __init__(self, config: DistillConfig, lengths: Lengths, world_size: int) -> None:
        lengths.only("distill", "document", "supervised")
        self._config = config
        half = config.engine.precision == "bf16"
        student = outline(config.student, config.lora, attention=_attention(config.student))
        without_content(student, half_precision=half)
        if config.student.gradient_checkpointing:
            student.enable_gradient_checkpointing()
        columns = config.loss.vocab_size or student.vocab_rows
        # Compiled code is planned as it is written.
        loss = config.loss.model_copy(update={"compile": False})
        self.container: nn.Module = DistillModel(
            student, loss, vocab_size=columns, half_precision=half
        ).train()
        self.blocks: Sequence[nn.Module] = student.blocks()
        self.vocab_sizes = frozenset((columns, student.vocab_rows))
        self._teacher = _teacher_of(config)
        self.frozen: Sequence[nn.Module] = self._teacher.modules
        rows = -(-config.batch.rows(world_size) // world_size)
        self._rows = min(config.batch.per_device_batch_size, rows)
        self._num_micro_batches = -(-rows // self._rows)
        packing = config.packing
        self._document = min(lengths.document or packing.length, packing.length)
        self._length = packing.length if packing.enabled else self._document
        if packing.enabled and packing.attention == "concatenated":
            self._document = self._length
        self._share = lengths.supervised or 1.0

    @property
    def tokens(self) -> int:
        return self._num_micro_batches * self._rows * self._length

    def begin(self) -> None:
        """Place the teacher."""
        self._teacher.place()

    def step(self, engine: Engine) -> None:
        positions_T = torch.arange(self._length) % self._document
        shape = (self._rows, self._length)
        rows = Rows.of(torch.zeros(shape, dtype=torch.int64), positions_T.expand(shape))
        supervised_N = torch.arange(max(1, int(self._rows * self._length * self._share)))
        lesson = Lesson(rows, supervised_N, torch.zeros_like(supervised_N), squares=0)
        num_tokens = len(supervised_N) * self._num_micro_batches * engine.world_size
        for number in range(self._num_micro_batches):
            inputs = lesson.taught(self._teacher, num_tokens, engine.device)
            terms = engine("student", **inputs)
            engine.backward(terms.total, last=number == self._num_micro_batches - 1)
        sum_over_ranks(torch.zeros(5, dtype=torch.float64))


class _Cached:
    """A teacher whose answers come from elsewhere: from a folder, or from another process."""

    def __init__(self, config: DistillConfig, model: CausalLM | None, *, half: bool) -> None:
        self.modules: list[nn.Module] = []
        self._head = None
        if model is not None:
            head = model.base_model.get_output_embeddings().requires_grad_(False)
            self.modules = [without_content(head, half_precision=half)]
            self._model = model
            self._dtype = torch.bfloat16 if half else torch.float32

    def place(self) -> None:
        """It lies where it lies."""

    def answer(self, request: TeacherRequest) -> Answer:
        """States, or the likeliest tokens."""
        count = len(request.supervised_N)
        if not self.modules:
            ids_NK = torch.arange(_CACHED).expand(count, _CACHED)
            return TopK(ids_NK, torch.zeros(count, _CACHED))
        states_NH = torch.zeros(count, self._model.hidden_size, dtype=self._dtype)
        head = self._model.with_head(states_NH, lambda _, head: head)
        return Projected(states_NH, head)

    def close(self) -> None:
        """Nothing is open."""


class _Live(LiveTeacher):
    """A teacher beside the student, whole or sharded."""

    def __init__(self, config: DistillConfig, model: CausalLM, *, half: bool) -> None:
        logits = config.loss.implementation == "logits"
        without_content(model, half_precision=half)
        super().__init__(model, device=CPU, student_device=CPU, whole_logits=logits)
        self.modules: list[nn.Module] = [model]
        self._is_sharded = config.teacher.placement == "sharded"

    def place(self) -> None:
        """Shard it, if that is wanted."""
        if self._is_sharded:
            head = self.model.base_model.get_output_embeddings().parameters()
            shard_frozen(self.model.body, self.model.blocks(), head, CPU)


def _teacher_of(config: DistillConfig) -> _Cached | _Live:
    teacher = config.teacher
    if teacher.source == "cache":
        return _Cached(config, None, half=False)
    for name, value in (("offload", teacher.offload), ("device cpu", teacher.device == "cpu")):
        if value and config.engine.device != "cpu":
            raise ConfigError(
                f"teacher.{name}: the plan knows no memory but the device's; leave it out, or "
                "plan with teacher.source cache"
            )
    if teacher.name_or_path is None:
        raise ConfigError(
            "teacher.name_or_path: the plan needs to know how wide the teacher is; name the model"
        )
    model = outline(teacher, attention=_attention(teacher)).requires_grad_(False)
    wanted = config.engine.precision if teacher.precision == "auto" else teacher.precision
    kind = _Live if teacher.source == "live" else _Cached
    return kind(config, model, half=wanted == "bf16")


def _attention(section: StudentConfig | TeacherConfig) -> str:
    """Flash attention is planned as the document-wise one, which keeps as little."""
    return "auto" if section.attention == "flash_attention_2" else section.attention
