"""The distillation loss and its gradients by chunk size, from final states and heads.

A step is 0.3 CE + 0.7 T^2 KL at T = 2, forward and backward, with the gradients of the student's
states and head. `fused` takes states and heads apart, `logits` whole logits of both, whose product
and backward belong to the step. Needed operations are three products with the student's head and
one with the teacher's; bytes, both heads read once and the student's gradient written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch

from pixelrag.bench.cases import Ready, Skipped, measure_in_turns
from pixelrag.bench.models import DTYPES
from pixelrag.bench.rows import Case, Row, Value
from pixelrag.config.bench import KDChunkConfig, KDChunkWork
from pixelrag.losses.kd import (
    DistillLoss,
    Head,
    Logits,
    Objective,
    Projected,
    distill_loss,
)

SUITE = "kd-chunk"
OBJECTIVE = Objective("forward_kl", 2.0, 0.3)
# Standard deviation of the difference of the models' logits.
_DISTANCE = 0.6
Inputs = dict[str, torch.Tensor]


def groups(config: KDChunkConfig) -> list[list[Case]]:
    """Losses and chunks by vocabulary and dtype."""
    work = config.work
    return [
        [
            {"vocab": vocab, "dtype": dtype, "loss": loss, "chunk": chunk}
            for loss, chunk in product(work.losses, work.chunk_sizes)
        ]
        for vocab, dtype in product(work.vocabularies, work.dtypes)
    ]


def measure(config: KDChunkConfig, cases: Sequence[Case]) -> Iterator[Row]:
    """Times in turns, memory alone."""
    return measure_in_turns(SUITE, prepare, config, cases)


def make_inputs(
    work: KDChunkWork,
    vocab: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    distance: float = _DISTANCE,
) -> Inputs:
    """Final states and heads of two models whose logits differ by noise.

    The first part of the teacher's width repeats the student's, the rest is the noise.

    Args:
        work: sizes.
        vocab: rows of the heads.
        dtype: of all.
        device: where they lie.
        distance: standard deviation of the difference of the logits; 0 where the teacher is no
            wider than the student.
    """
    draw = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device=device)

    width, noise = work.student_width, work.teacher_width - work.student_width
    h = normal(work.tokens, width)
    w = normal(vocab, width).mul_(3 / width**0.5)
    labels = torch.randint(0, vocab, (work.tokens,), generator=draw, device=device)
    labels[torch.rand(work.tokens, generator=draw, device=device) >= work.supervised] = -100
    ht, wt = h[:, : work.teacher_width], w[:, : work.teacher_width]
    if noise > 0:
        ht = torch.cat([h, normal(work.tokens, noise)], 1)
        wt = torch.cat([w, normal(vocab, noise).mul_(distance / noise**0.5)], 1)
    return {
        "h": h.to(dtype).requires_grad_(), "w": w.to(dtype).requires_grad_(),
        "ht": ht.to(dtype), "wt": wt.to(dtype), "labels": labels,
    }  # fmt: skip


def prepare(
    config: KDChunkConfig, cases: Sequence[Case], device: torch.device
) -> list[Ready | Skipped]:
    """Inputs are made once for cases of one vocabulary and dtype."""
    work, first = config.work, cases[0]
    x = make_inputs(work, int(first["vocab"]), DTYPES[str(first["dtype"])], device)
    supervised = int((x["labels"] != -100).sum())
    columns, rows = int(first["vocab"]), supervised
    flops = 2.0 * rows * columns * (3 * work.student_width + work.teacher_width)
    moved = columns * (3 * work.student_width + work.teacher_width) * x["w"].element_size()

    def ready(case: Case) -> Ready:
        step, figures = _step(x, case)
        return Ready(step, work.tokens, supervised, flops, moved, str(case["dtype"]), figures)

    return [ready(case) for case in cases]


def _step(x: Inputs, case: Case) -> tuple[Callable[[], None], Callable[[], dict[str, float]]]:
    found: list[DistillLoss] = []

    def step() -> None:
        x["h"].grad = x["w"].grad = None
        loss = loss_of(x, str(case["loss"]), case["chunk"])
        loss.total.backward()
        found[:] = [loss]

    return step, lambda: {"chunk_size": found[0].chunk_size}


def loss_of(x: Inputs, implementation: str, chunk: Value) -> DistillLoss:
    """This project's loss of the inputs, as `loss.implementation` says."""
    student: Projected | Logits
    teacher: Projected | Logits
    if implementation == "fused":
        student, teacher = Projected(x["h"], Head(x["w"])), Projected(x["ht"], Head(x["wt"]))
    else:
        with torch.no_grad():
            teacher = Logits(x["ht"] @ x["wt"].t())
        student = Logits(x["h"] @ x["w"].t())
    return distill_loss(
        student, teacher, x["labels"], OBJECTIVE,
        num_tokens=int((x["labels"] != -100).sum()),
        chunk_size="auto" if chunk == "auto" else int(chunk),
    )  # fmt: skip
