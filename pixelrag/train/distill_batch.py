"""From a packed micro-batch to what the models and the loss take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pixelrag.data.packed_batch import IGNORE_INDEX, PackedBatch
from pixelrag.models.distill import Supervision
from pixelrag.models.rows import Rows
from pixelrag.models.teacher import TeacherRequest, TeacherSource


@dataclass(frozen=True, slots=True)
class Lesson:
    """A micro-batch, ready for both models; tensors on the CPU.

    Attributes:
        rows: the tokens.
        supervised_N: flattened positions whose next token is learnt from.
        labels_N: that token.
        squares: sum of the documents' squared lengths, padding left out.
    """

    rows: Rows
    supervised_N: torch.Tensor
    labels_N: torch.Tensor
    squares: int

    @classmethod
    def of(cls, batch: PackedBatch) -> Lesson:
        """Shift the labels: position t learns the label at t + 1."""
        rows = Rows(
            batch.input_ids,
            batch.position_ids,
            tuple(batch.cu_seqlens.tolist()),
            batch.cu_seqlens,
            batch.max_seqlen,
        )
        next_BT = torch.full_like(batch.labels, IGNORE_INDEX)
        next_BT[:, :-1] = batch.labels[:, 1:]
        next_T = next_BT.flatten()
        supervised_N = (next_T != IGNORE_INDEX).nonzero().flatten()
        lengths = batch.cu_seqlens.diff().long()
        real = batch.attention_mask.flatten()[batch.cu_seqlens[:-1].long()]
        return cls(rows, supervised_N, next_T[supervised_N], int((lengths[real] ** 2).sum()))

    def request(self) -> TeacherRequest:
        """What the teacher is asked."""
        return TeacherRequest(self.rows, self.supervised_N)

    def taught(
        self, teacher: TeacherSource, num_tokens: int, device: torch.device
    ) -> dict[str, object]:
        """Ask the teacher; what the container's forward takes, on its device.

        Args:
            teacher: whom to ask.
            num_tokens: supervised tokens of the global batch.
            device: the student's.
        """
        answer = teacher.answer(self.request())
        supervision = Supervision(
            self.supervised_N.to(device), self.labels_N.to(device), answer, num_tokens
        )
        return {"rows": self.rows.to(device), "supervision": supervision}
