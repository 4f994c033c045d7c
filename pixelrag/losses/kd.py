"""Distillation over the full vocabulary without a (tokens x vocabulary) tensor.

    total = ce_weight * CE + (1 - ce_weight) * T^2 * D(teacher, student)

CE is the cross entropy of the labels at temperature 1 and D a divergence at temperature T (Hinton
et al. 2015), both summed over the supervised tokens of this rank and divided by their number over
the whole global batch: what ranks and accumulation steps return adds up to the loss of one
process, however the tokens are packed and split.

Tokens without a label are dropped first. The rest goes through both lm_heads chunk by chunk, and
the forward pass forms the gradient of each chunk at once, so that a chunk's logits are all that
is ever held; the backward pass multiplies by the gradient from above. Nothing is computed for what
needs no gradient. The student's weights are not saved for the backward pass, so a sharded head may
be released after the forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.autograd.function import once_differentiable

from pixelrag.errors import DataError, ModelError
from pixelrag.losses.kd_blocks import Blocks, scratch_bytes_per_token
from pixelrag.losses.kd_chunk import choose_chunk_size
from pixelrag.losses.kd_head import Head, Lora
from pixelrag.losses.kd_kernel import BlockSpec, Form, TopKRows
from pixelrag.losses.kd_objective import Objective
from pixelrag.losses.kd_source import (
    Logits,
    LogitsStudent,
    Projected,
    ProjectedStudent,
    Rows,
    TopK,
    check_ids,
    fill_teacher,
    top_k_rows,
)

IGNORE_INDEX = -100

Precision = Literal["exact", "fast"]
Teacher = Projected | Logits | TopK

__all__ = [
    "IGNORE_INDEX", "DistillLoss", "Head", "Logits", "Lora", "Objective", "Precision", "Projected",
    "Teacher", "TopK", "distill_loss",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class DistillLoss:
    """What one rank contributes; tensors are scalars that sum over ranks and steps.

    Args:
        total: the loss, fp32 (fp64 for fp64 inputs); the only one with a gradient.
        ce: cross entropy, unweighted.
        kd: T^2 times the divergence, unweighted; 0 without a teacher.
        num_top1_equal: tokens whose likeliest token is the same in both models; 0 unless counted.
        num_supervised: this rank's tokens with a label.
        chunk_size: tokens that were worked on at a time.
    """

    total: torch.Tensor
    ce: torch.Tensor
    kd: torch.Tensor
    num_top1_equal: torch.Tensor
    num_supervised: int
    chunk_size: int


def distill_loss(
    student: Projected | Logits,
    teacher: Teacher | None,
    labels_T: torch.Tensor,
    objective: Objective,
    *,
    num_tokens: int | float | torch.Tensor,
    chunk_size: int | Literal["auto"] = "auto",
    precision: Precision = "exact",
    vocab_size: int | None = None,
    compile_kernel: bool = False,
    count_top1: bool = False,
) -> DistillLoss:
    """Compute this rank's share of the distillation loss, and its gradient along with it.

    Without gradient mode no gradient is formed: the same call evaluates.

    Args:
        student: `Projected` (hidden states and head), or `Logits` where the head is unusual.
        teacher: likewise, or `TopK`; no gradient flows to it. None is allowed if ``ce_weight``
            is 1.
        labels_T: [T] int64, the token that each position predicts (already shifted), -100 where
            there is none.
        objective: kind of divergence, temperature and weights.
        num_tokens: supervised tokens of the global batch, over all ranks and accumulation steps:
            the divisor.
        chunk_size: tokens worked on at a time, or `auto`: as free memory allows.
        precision: `exact` keeps logits in at least fp32; `fast` in the hidden states' dtype.
        vocab_size: real tokens, the first rows of both heads; rows after them get neither
            probability nor gradient. None = all, where both models have the same number.
        compile_kernel: run the part between the matrix products through `torch.compile`.
        count_top1: also count the tokens on which both models agree.

    Raises:
        DataError: a label, or an id of a top-k teacher, outside the vocabulary.
        ModelError: shapes or vocabularies that do not fit.
        ValueError: another argument out of range, e.g. fewer ``num_tokens`` than this rank has.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision: got {precision!r}, expected exact or fast")
    if teacher is None and objective.ce_weight != 1:
        raise ValueError(f"ce_weight is {objective.ce_weight}, but there is no teacher")
    columns = _vocabulary(student, teacher, vocab_size)
    supervised = (labels_T != IGNORE_INDEX).nonzero().flatten()
    count = len(supervised)
    _check_tokens(student, teacher, labels_T, count)
    divisor = float(num_tokens)
    if divisor < count:
        raise ValueError(
            f"num_tokens: got {divisor:g}, but this rank alone has {count} supervised tokens; "
            "expected the number over the whole global batch"
        )
    labels_N = labels_T.index_select(0, supervised)
    _check_labels(labels_N, supervised, columns)
    if isinstance(teacher, TopK):
        check_ids(teacher, columns)

    tensors = student.tensors()
    needs = tuple(x is not None and x.requires_grad and torch.is_grad_enabled() for x in tensors)
    first = student.first
    wide = torch.promote_types(first.dtype, torch.float32)
    dtype = first.dtype if precision == "fast" else wide
    if dtype == torch.float16 or (any(needs) and first.dtype == torch.float16):
        raise ValueError("student in fp16: its gradient would underflow; use bf16 or fp32")
    buffers = 1 if teacher is None or isinstance(teacher, TopK) else 2
    chunk = choose_chunk_size(
        chunk_size,
        num_tokens=count,
        bytes_per_token=columns * dtype.itemsize * buffers
        + scratch_bytes_per_token(columns, dtype, first.device),
        device=first.device,
    )
    divisor = max(divisor, 1.0)
    ce_weight, kd_weight = objective.ce_weight, 1 - objective.ce_weight
    # A label's share of the gradient is close to -ce_scale. Where the products round it, it had
    # better be -1: bf16 has no 0.3, and all labels would be off alike. A compiled kernel is made
    # for its numbers, which therefore must not depend on the number of tokens.
    if isinstance(student, Projected) or compile_kernel:
        scale = ce_weight or kd_weight
        unit = scale / divisor
    else:
        scale, unit = divisor, 1.0
    spec = BlockSpec(
        objective,
        ce_scale=ce_weight / scale,
        kd_scale=kd_weight / scale,
        student=_form(student, columns),
        teacher=_form(teacher, columns),
        want_grad=any(needs),
        count_top1=count_top1,
    )
    whole = count == len(labels_T)
    call = _Call(
        student, teacher, labels_N, None if whole else supervised, spec, unit, divisor, columns,
        chunk, dtype, needs, compile_kernel,
    )  # fmt: skip
    total, ce, kd, top1 = _Distill.apply(call, *tensors)
    return DistillLoss(total, ce, kd, top1, count, chunk)


@dataclass(frozen=True, slots=True)
class _Call:
    student: Projected | Logits
    teacher: Teacher | None
    labels_N: torch.Tensor
    supervised_N: torch.Tensor | None  # None = all tokens are
    spec: BlockSpec
    unit: float  # what the blocks' gradients are multiplied by
    divisor: float
    num_columns: int
    chunk_size: int
    dtype: torch.dtype  # of the chunks' logits
    needs: tuple[bool, ...]
    compiled: bool

    def rows(self, start: int, stop: int, *, of: Projected | Logits | TopK) -> Rows:
        """Where the start-th to stop-th supervised tokens stand in a model's rows."""
        if self.supervised_N is None or of.num_tokens == len(self.labels_N):
            return slice(start, stop)
        return self.supervised_N[start:stop]


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        first = call.student.first
        with torch.autocast(first.device.type, enabled=False):
            blocks, gradients = _run(call)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if x is None else x.dtype for x in tensors]
        objective = call.spec.objective
        wide = torch.promote_types(first.dtype, torch.float32)
        ce, kd = blocks.ce / call.divisor, blocks.kd * objective.temperature**2 / call.divisor
        total = objective.ce_weight * ce + (1 - objective.ce_weight) * kd
        outputs = tuple(x.to(wide) for x in (total, ce, kd, blocks.top1))
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        return (
            None,
            *(
                None if gradient is None else _scaled(gradient, scale, dtype)
                for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
            ),
        )


def _scaled(gradient: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if gradient.dtype == dtype:
        # On CUDA the comparison would wait for the device, and the product costs nothing.
        unscaled = scale.device.type == "cpu" and float(scale) == 1
        return gradient if unscaled else gradient * scale
    # Not in place: a second backward must find what the first one found. In blocks, because on the
    # CPU the product is made in the wider dtype first.
    scaled = torch.empty_like(gradient, dtype=dtype)
    for part, source in zip(scaled.split(1024), gradient.split(1024), strict=True):
        part.copy_(source * scale)
    return scaled


def _run(call: _Call) -> tuple[Blocks, tuple[torch.Tensor | None, ...]]:
    count, columns, device = len(call.labels_N), call.num_columns, call.labels_N.device
    student: ProjectedStudent | LogitsStudent
    if isinstance(call.student, Projected):
        student = ProjectedStudent(call.student, count, call.needs, call.unit)
    else:
        student = LogitsStudent(call.student, call.needs, call.unit)
    teacher = call.teacher
    size = (min(call.chunk_size, count), columns)
    student_CV = torch.empty(size, dtype=call.dtype, device=device)
    two = isinstance(teacher, Projected | Logits)
    teacher_CV = torch.empty(size if two else 0, dtype=call.dtype, device=device)
    blocks = Blocks(
        call.spec, num_columns=columns, chunk_size=call.chunk_size, dtype=call.dtype, device=device,
        compiled=call.compiled,
    )  # fmt: skip
    for start in range(0, count, call.chunk_size):
        stop = min(start + call.chunk_size, count)
        rows = call.rows(start, stop, of=call.student)
        z_CV = student_CV[: stop - start]
        student.fill(rows, start, z_CV)
        y: torch.Tensor | TopKRows | None = None
        if isinstance(teacher, Projected | Logits):
            y = teacher_CV[: stop - start]
            fill_teacher(teacher, call.rows(start, stop, of=teacher), y)
        elif isinstance(teacher, TopK):
            y = top_k_rows(teacher, call.rows(start, stop, of=teacher))
        blocks.run(z_CV, y, call.labels_N[start:stop])
        if call.spec.want_grad:
            student.back(rows, z_CV)
    return blocks, student.gradients()


def _form(model: Projected | Logits | TopK | None, columns: int) -> Form:
    if not isinstance(model, Projected):
        return Form()
    head = model.head
    bias_V = None if head.bias_V is None else head.bias_V[:columns]
    return Form(bias_V, head.logit_scale, head.soft_cap)


def _vocabulary(
    student: Projected | Logits, teacher: Teacher | None, vocab_size: int | None
) -> int:
    sizes = {"student": student.num_columns}
    if isinstance(teacher, Projected | Logits):
        sizes["teacher"] = teacher.num_columns
    if vocab_size is None and len(set(sizes.values())) == 1:
        return sizes["student"]
    described = " and ".join(f"{name} {size}" for name, size in sizes.items())
    if vocab_size is None:
        raise ModelError(
            f"vocabulary rows: {described}; say how many are real tokens of both with vocab_size"
        )
    if not 1 <= vocab_size <= min(sizes.values()):
        raise ModelError(f"vocab_size: got {vocab_size}, expected 1 to the rows of {described}")
    return vocab_size


def _check_tokens(
    student: Projected | Logits, teacher: Teacher | None, labels_T: torch.Tensor, count: int
) -> None:
    if labels_T.shape != (student.num_tokens,):
        raise ModelError(
            f"labels: got shape {list(labels_T.shape)}, expected [{student.num_tokens}], one for "
            "each of the student's tokens"
        )
    if teacher is not None and teacher.num_tokens not in (len(labels_T), count):
        raise ModelError(
            f"teacher: got {teacher.num_tokens} tokens, expected {len(labels_T)}, or the {count} "
            "supervised ones"
        )


def _check_labels(labels_N: torch.Tensor, supervised_N: torch.Tensor, columns: int) -> None:
    wrong = (labels_N < 0) | (labels_N >= columns)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise DataError(
            f"label {int(labels_N[first])} of token {int(supervised_N[first])}: expected 0 to "
            f"{columns - 1}, the real vocabulary, or {IGNORE_INDEX} for a token without a label"
        )
