"""Where a model's logits come from, and where the student's gradient goes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pixelrag.errors import DataError, ModelError
from pixelrag.losses.kd_head import Head, HeadGradient, project
from pixelrag.losses.kd_kernel import TopKRows

Rows = torch.Tensor | slice


@dataclass(frozen=True, slots=True)
class Projected:
    """A model as its final hidden states and its lm_head.

    Args:
        hidden_TH: [T, H] after the final norm, any float dtype. A teacher may send the rows of the
            supervised tokens alone, in their order.
        head: see `Head`.

    Raises:
        ModelError: widths differ.
    """

    hidden_TH: torch.Tensor
    head: Head

    def __post_init__(self) -> None:
        width = self.head.weight_VH.shape[1]
        if self.hidden_TH.dim() != 2 or self.hidden_TH.shape[1] != width:
            raise ModelError(
                f"hidden states: got shape {list(self.hidden_TH.shape)}, expected [tokens, {width}]"
                f", the width of an lm_head of shape {list(self.head.weight_VH.shape)}"
            )

    @property
    def num_tokens(self) -> int:
        """Rows of hidden states."""
        return len(self.hidden_TH)

    @property
    def num_columns(self) -> int:
        """Vocabulary rows of the head, padding included."""
        return self.head.num_rows

    @property
    def first(self) -> torch.Tensor:
        """What tells device and dtype."""
        return self.hidden_TH

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What gradients may flow to, in the order of a student's `gradients`."""
        lora = self.head.lora
        adapter = (None, None) if lora is None else (lora.a_RH, lora.b_VR)
        return (self.hidden_TH, self.head.weight_VH, self.head.bias_V, *adapter)


@dataclass(frozen=True, slots=True)
class Logits:
    """A model as its logits, [T, columns], for heads of a form that `Head` does not know."""

    logits_TV: torch.Tensor

    def __post_init__(self) -> None:
        if self.logits_TV.dim() != 2:
            raise ModelError(
                f"logits: got shape {list(self.logits_TV.shape)}, expected [tokens, vocabulary]"
            )

    @property
    def num_tokens(self) -> int:
        """Rows of logits."""
        return len(self.logits_TV)

    @property
    def num_columns(self) -> int:
        """Columns of the logits, padding included."""
        return self.logits_TV.shape[1]

    @property
    def first(self) -> torch.Tensor:
        """What tells device and dtype."""
        return self.logits_TV

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What gradients may flow to."""
        return (self.logits_TV,)


@dataclass(frozen=True, slots=True)
class TopK:
    """A teacher as its likeliest tokens, e.g. from a cache on disk.

    The divergence is over these tokens, and all others as one more outcome unless the objective's
    ``tail`` drops them; its ``top_k`` has no say. A cache cannot tell how the teacher's tail is
    shared out among its tokens: with k = 8 of 151,936 that is all it knows of 151,928 of them.

    Args:
        ids_TK: [T, K] int64, distinct in each row.
        log_probs_TK: [T, K] their log-probabilities at the objective's temperature over the whole
            vocabulary, so that 1 - sum(exp) is the probability of all other tokens.

    Raises:
        ModelError: shapes differ.
    """

    ids_TK: torch.Tensor
    log_probs_TK: torch.Tensor

    def __post_init__(self) -> None:
        if self.ids_TK.dim() != 2 or self.ids_TK.shape != self.log_probs_TK.shape:
            raise ModelError(
                f"top-k teacher: got ids {list(self.ids_TK.shape)} and log-probabilities "
                f"{list(self.log_probs_TK.shape)}, expected [tokens, k] twice"
            )

    @property
    def num_tokens(self) -> int:
        """Rows."""
        return len(self.ids_TK)


def take(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Rows of a tensor; a view where they are a slice."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def check_ids(top_k: TopK, vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary.

    Raises:
        DataError: there is one.
    """
    if top_k.ids_TK.numel():
        low, high = (int(x) for x in top_k.ids_TK.aminmax())
        if low < 0 or high >= vocab_size:
            raise DataError(
                f"top-k teacher: token ids run from {low} to {high}, expected 0 to {vocab_size - 1}"
            )


def fill_teacher(teacher: Projected | Logits, rows: Rows, out_CV: torch.Tensor) -> None:
    """Write a teacher's products or logits of some tokens into ``out_CV``."""
    if isinstance(teacher, Projected):
        project(teacher.head, take(teacher.hidden_TH, rows), out_CV)
    else:
        out_CV.copy_(take(teacher.logits_TV[:, : out_CV.shape[1]], rows))


def top_k_rows(teacher: TopK, rows: Rows) -> TopKRows:
    """The teacher's rows of some tokens."""
    return TopKRows(take(teacher.ids_TK, rows), take(teacher.log_probs_TK, rows))


class ProjectedStudent:
    """Computes the student's logits chunk by chunk and carries their gradient back.

    Args:
        student: hidden states and head.
        num_supervised: tokens with a label.
        needs: which of the student's `tensors` need a gradient.
        unit: a factor of all gradients that `back` takes.
    """

    def __init__(
        self, student: Projected, num_supervised: int, needs: tuple[bool, ...], unit: float
    ) -> None:
        self._student = student
        self._gradient = HeadGradient(student.head, student.hidden_TH, needs, unit)
        self._kept_NH = None
        lora = student.head.lora
        if lora is not None and lora.dropout > 0:
            # Drawn for all tokens at once: the chunk size must not change what is dropped.
            keep = 1 - lora.dropout
            width = student.hidden_TH.shape[1]
            self._kept_NH = torch.empty(
                (num_supervised, width), dtype=torch.bool, device=student.hidden_TH.device
            ).bernoulli_(keep)

    def fill(self, rows: Rows, start: int, out_CV: torch.Tensor) -> None:
        """Write the products of a chunk that starts at the ``start``-th supervised token."""
        head = self._student.head
        hidden_CH = take(self._student.hidden_TH, rows)
        kept_CH = None
        if self._kept_NH is not None and head.lora is not None:
            kept = self._kept_NH[start : start + len(out_CV)]
            kept_CH = kept.to(out_CV.dtype).div_(1 - head.lora.dropout)
        self._filled = hidden_CH, project(head, hidden_CH, out_CV, kept_CH)

    def back(self, rows: Rows, gradient_CV: torch.Tensor) -> None:
        """Take the gradient in what `fill` wrote last."""
        hidden_CH, adapter = self._filled
        self._gradient.add(gradient_CV, hidden_CH, rows, adapter)

    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """In the order of the student's `tensors`; weights' in at least fp32."""
        g = self._gradient
        return (g.hidden_TH, g.weight_VH, g.bias_V, g.a_RH, g.b_VR)


class LogitsStudent:
    """The same for logits that are there already; their gradient has their shape and dtype.

    Args:
        student: the logits.
        needs: whether the logits need a gradient.
        unit: see `ProjectedStudent`.
    """

    def __init__(self, student: Logits, needs: tuple[bool, ...], unit: float) -> None:
        self._unit = unit
        self._logits_TV = student.logits_TV
        self._gradient_TV = torch.zeros_like(student.logits_TV) if needs[0] else None

    def fill(self, rows: Rows, start: int, out_CV: torch.Tensor) -> None:
        """Copy a chunk's logits."""
        out_CV.copy_(take(self._logits_TV[:, : out_CV.shape[1]], rows))

    def back(self, rows: Rows, gradient_CV: torch.Tensor) -> None:
        """Write a chunk's gradient."""
        if self._gradient_TV is not None:
            columns = self._gradient_TV[:, : gradient_CV.shape[1]]
            columns[rows] = (gradient_CV * self._unit).to(columns.dtype)

    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """In the order of the student's `tensors`."""
        return (self._gradient_TV,)
