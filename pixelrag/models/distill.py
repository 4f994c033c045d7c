"""The student inside the engine's container: its loss is computed where its weights are whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from pixelrag.config.distill_parts import KDLossConfig
from pixelrag.losses.kd import Head, Logits, Lora, Objective, Projected, distill_loss
from pixelrag.models.causal import CausalLM, head_logits
from pixelrag.models.greedy import write_greedily
from pixelrag.models.rows import Rows
from pixelrag.models.teacher import Answer


class LossTerms(NamedTuple):
    """A rank's partial sums, scalars; only ``total`` carries a gradient.

    Attributes:
        total: the loss.
        ce, kd: its parts, unweighted (``kd`` with its factor T^2).
        num_top1_equal: tokens on which teacher and student agree; 0 unless counted.
    """

    total: torch.Tensor
    ce: torch.Tensor
    kd: torch.Tensor
    num_top1_equal: torch.Tensor


@dataclass(frozen=True, slots=True)
class Supervision:
    """What a batch of rows is to learn.

    Attributes:
        supervised_N: flattened positions whose next token counts, int64.
        labels_N: that token, int64.
        teacher: the teacher at these positions, in the same order.
        num_tokens: supervised tokens of the global batch, over ranks and accumulation steps.
    """

    supervised_N: torch.Tensor
    labels_N: torch.Tensor
    teacher: Answer
    num_tokens: int


class DistillModel(nn.Module):
    """Everything that the distillation job trains, in one module.

    Args:
        student: the model.
        config: the configuration's `loss` section.
        vocab_size: real tokens of both models.
        half_precision: the engine computes in bf16; weights may be fp32 masters all the same.
    """

    def __init__(
        self, student: CausalLM, config: KDLossConfig, *, vocab_size: int, half_precision: bool
    ) -> None:
        super().__init__()
        self.student = student
        self.objective = objective_of(config)
        self._config = config
        self._vocab_size = vocab_size
        self._half_precision = half_precision

    def forward(
        self,
        role: str,
        *,
        rows: Rows | None = None,
        supervision: Supervision | None = None,
        count_top1: bool = False,
        writing: Mapping[str, Any] | None = None,
    ) -> LossTerms | torch.Tensor | list[list[int]]:
        """Run one pass.

        Args:
            role: `student`: the loss; `logits`: logits [B, T, V] by the lent head; `whole`: by the
                model's own forward; `write`: tokens behind prompts, by `write_greedily`.
            rows: the tokens, on the student's device.
            supervision: what is to be learned; for `student`. It is no tensor, so that engines
                leave the teacher's precision as it is.
            count_top1: count the tokens on which both models agree.
            writing: arguments of `write_greedily`, for `write`.

        Returns:
            `LossTerms`, logits, or tokens.
        """
        if role == "write" and writing is not None:
            return write_greedily(self.student, **writing)
        if rows is None:
            raise ValueError(f"role {role}: got no rows")
        if role == "whole":
            return self.student.logits(rows)
        if role == "logits":
            return self._logits(rows)
        if role != "student" or supervision is None:
            raise ValueError(
                f"role: got {role!r}, expected student (with supervision), logits, whole, write"
            )
        if self._config.implementation == "logits":
            logits_TV = self.student.logits(rows).flatten(0, 1)
            picked = Logits(logits_TV.index_select(0, supervision.supervised_N))
            return self._loss(picked, supervision, count_top1)
        hidden_TH = self.student.hidden(rows).flatten(0, 1)
        # Tokens that teach nothing never reach the head.
        hidden_NH = hidden_TH.index_select(0, supervision.supervised_N)
        return self.student.with_head(
            hidden_NH,
            lambda hidden, head: self._loss(self._projected(hidden, head), supervision, count_top1),
        )

    def _projected(self, hidden_NH: torch.Tensor, head: Head) -> Projected:
        if self._half_precision:
            # Under autocast states and masters are fp32; the head is computed as all the rest.
            hidden_NH = hidden_NH.bfloat16()
            head = _as_bf16(head)
        return Projected(hidden_NH, head)

    def _loss(
        self, student: Projected | Logits, supervision: Supervision, count_top1: bool
    ) -> LossTerms:
        config = self._config
        loss = distill_loss(
            student,
            supervision.teacher,
            supervision.labels_N,
            self.objective,
            num_tokens=supervision.num_tokens,
            chunk_size=config.chunk_size,
            precision=config.precision,
            vocab_size=self._vocab_size,
            compile_kernel=config.compile,
            count_top1=count_top1,
        )
        return LossTerms(loss.total, loss.ce, loss.kd, loss.num_top1_equal)

    def _logits(self, rows: Rows) -> torch.Tensor:
        if self._config.implementation == "logits":
            return self.student.logits(rows)
        hidden_BTH = self.student.hidden(rows)
        logits_TV = self.student.with_head(hidden_BTH.flatten(0, 1), head_logits)
        return logits_TV.unflatten(0, hidden_BTH.shape[:2])


def objective_of(config: KDLossConfig) -> Objective:
    """The loss' objective as the configuration says it."""
    return Objective(
        kind=config.kind,
        temperature=config.temperature,
        ce_weight=config.ce_weight,
        beta=config.beta,
        skew=config.skew,
        top_k=config.top_k,
        tail=config.tail,
    )


def _as_bf16(head: Head) -> Head:
    def low(tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else tensor.bfloat16()

    lora = head.lora
    if lora is not None:
        lora = Lora(low(lora.a_RH), low(lora.b_VR), lora.scaling, lora.dropout)
    return Head(
        low(head.weight_VH),
        low(head.bias_V),
        lora,
        logit_scale=head.logit_scale,
        soft_cap=head.soft_cap,
    )
