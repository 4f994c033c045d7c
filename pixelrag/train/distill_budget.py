"""What a distillation run asks of a machine, from the models' configurations alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pixelrag.config.distill import DistillConfig
from pixelrag.data.pack_plan import EpochRows, PackPlan
from pixelrag.distributed.free_memory import GIB
from pixelrag.models.causal import CausalLM
from pixelrag.models.causal_load import outline
from pixelrag.train.flops import ModelShape

# fp32 weights, gradients and AdamW's two moments; in bf16 the weights that the layers use as well.
_TRAINED_BYTES = {"fp32": 16, "bf16": 18}
_FROZEN_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Budget:
    """Sizes of both models and of the loss, in bytes; activations are not among them.

    Attributes:
        student, teacher: "name: so many parameters"; the teacher's is None where none runs.
        vocab_size: tokens that both models share.
        state_bytes: the student's weights, gradients and optimizer state, before sharding.
        teacher_bytes: the teacher's weights, before sharding.
        loss_bytes: what the fused loss holds at its height; None for whole logits.
        logits_bytes: fp32 logits of both models over all tokens of a micro-batch.
        shapes: what a step computes: of the student, and of the teacher if there is one.
        passes: forward passes that a training step of the student is worth.
    """

    student: str
    teacher: str | None
    vocab_size: int
    state_bytes: int
    teacher_bytes: int
    loss_bytes: int | None
    logits_bytes: int
    shapes: tuple[ModelShape, ModelShape | None]
    passes: int

    def lines(self) -> list[str]:
        """The budget in words."""
        teacher = "" if self.teacher is None else f"; teacher {self.teacher}"
        whole = f"whole logits of both models: {self.logits_bytes / GIB:,.2f} GiB"
        loss = "" if self.loss_bytes is None else f"; the loss {self.loss_bytes / GIB:,.2f} GiB"
        held = "" if not self.teacher_bytes else f"; teacher {self.teacher_bytes / GIB:,.2f} GiB"
        return [
            f"student {self.student}{teacher}",
            f"vocabulary: {self.vocab_size:,} shared tokens",
            f"memory of a rank before sharding: student, gradients and AdamW "
            f"{self.state_bytes / GIB:,.2f} GiB{held}{loss} ({whole}); activations come on top",
        ]

    def operations(self, num_tokens: int, squares: int, num_supervised: int) -> float:
        """Floating-point operations of training on so many tokens; see `ModelShape.forward`."""
        student, teacher = self.shapes
        done = self.passes * student.forward(num_tokens, squares, num_supervised)
        return (
            done if teacher is None else done + teacher.forward(num_tokens, squares, num_supervised)
        )

    @staticmethod
    def squares(plan: PackPlan, rows: EpochRows) -> int:
        """Sum of the squared lengths of what attends to itself, over an epoch's rows."""
        isolated = plan.settings.attention == "isolated"
        lengths = plan.pieces.lengths[rows.pieces] if isolated else rows.tokens
        return int((lengths.astype(np.float64) ** 2).sum())


def budget_of(config: DistillConfig, vocab_size: int) -> Budget:
    """Measure both models' outlines; loads no weights.

    Args:
        config: the job's configuration.
        vocab_size: tokens that both models share.

    Raises:
        ModelError: a model's configuration is not there, or asks for what it does not have.
    """
    bf16 = config.engine.precision == "bf16"
    student = outline(config.student, config.lora)
    trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
    frozen = _count(student) - trained
    teacher = outline(config.teacher) if config.teacher.source == "live" else None
    precision = config.teacher.precision
    if precision == "auto":
        precision = config.engine.precision
    loss, tokens = None, config.batch.per_device_batch_size * config.packing.length
    if config.loss.implementation == "fused":
        chunk = min(2048 if config.loss.chunk_size == "auto" else config.loss.chunk_size, tokens)
        # Logits of both models (a cache has none), their gradient as the products take it where
        # that is not their dtype, and the head's gradient.
        size = 2 if bf16 and config.loss.precision == "fast" else 4
        loss = chunk * vocab_size * size * (1 if config.teacher.source == "cache" else 2)
        if bf16 and size == 4:
            loss += 2 * chunk * vocab_size
        head = student.base_model.get_output_embeddings()
        if any(p.requires_grad for p in head.parameters()) and not config.lora.enabled:
            loss += 4 * student.vocab_rows * student.hidden_size
    return Budget(
        student=_described(config.student.name_or_path, student),
        teacher=None if teacher is None else _described(config.teacher.name_or_path or "", teacher),
        vocab_size=vocab_size,
        state_bytes=trained
        * (_TRAINED_BYTES[config.engine.precision] + (4 if config.ema.decay is not None else 0))
        + frozen * _FROZEN_BYTES[config.engine.precision],
        teacher_bytes=0 if teacher is None else _count(teacher) * _FROZEN_BYTES[precision],
        loss_bytes=loss,
        logits_bytes=8 * tokens * vocab_size,
        shapes=(
            ModelShape.of(student, vocab_size),
            None if teacher is None else ModelShape.of(teacher, vocab_size),
        ),
        passes=2 if config.lora.enabled else 3,
    )


def _count(model: CausalLM) -> int:
    return sum(p.numel() for p in model.parameters())


def _described(name: str, model: CausalLM) -> str:
    return (
        f"{name}: {_count(model):,} parameters, {len(model.blocks())} layers, "
        f"{model.vocab_rows:,} vocabulary rows"
    )
