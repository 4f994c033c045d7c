"""The teacher: final hidden states of a batch's supervised tokens, and the head that reads them.

Any object with the form of `TeacherSource` can teach. The one here runs the model beside the
student; `answer_cache.py` reads states from disk, `teacher_channel.py` asks another process.
States and head (8 KB a token at a width of 4,096 in bf16) say the same as logits (304 KB a token
at 151,936 rows), and the loss makes logits of them chunk by chunk.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from pixelrag.config.distill_parts import TeacherConfig
from pixelrag.distributed.env import World
from pixelrag.distributed.together import together
from pixelrag.losses.kd import Head, Logits, Projected, TopK
from pixelrag.models.causal import CausalLM, head_logits
from pixelrag.models.causal_load import load_frozen
from pixelrag.models.isolation import check_head, check_isolation, sample_rows
from pixelrag.models.rows import Rows
from pixelrag.models.teacher_memory import offload_blocks, shard_frozen, share_on_node

logger = logging.getLogger("pixelrag")

Answer = Projected | Logits | TopK


@dataclass(frozen=True, slots=True)
class TeacherRequest:
    """What the student is about to learn from.

    Attributes:
        rows: the tokens, on the CPU.
        supervised_N: flattened positions whose next token counts, ascending, int64 on the CPU.
    """

    rows: Rows
    supervised_N: torch.Tensor


class TeacherSource(Protocol):
    """Something that knows the teacher's answer to a batch."""

    def answer(self, request: TeacherRequest) -> Answer:
        """The teacher at the supervised tokens, in their order, on the student's device."""

    def close(self) -> None:
        """Let go of files and connections."""


class LiveTeacher:
    """Runs the model in this process, in eval mode, without gradients.

    Args:
        model: from `load_frozen`, where it shall compute.
        device: where it computes.
        student_device: where answers are needed.
        whole_logits: answer with logits, for a head that cannot be used apart.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        device: torch.device,
        student_device: torch.device,
        whole_logits: bool = False,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.device = device
        self._student_device = student_device
        self._whole_logits = whole_logits
        self._head: Head | None = None

    @property
    def head(self) -> Head:
        """Its head, on the student's device."""
        if self._head is None:
            self._head = self._lent_head()
        return self._head

    def _lent_head(self) -> Head:
        # Any state will do: only the head is wanted, which stays whole (see `shard_frozen`).
        state_1H = torch.zeros(
            1, self.model.hidden_size, dtype=self.model.dtype, device=self.device
        )
        with torch.no_grad():
            _, head = self.model.with_head(state_1H, lambda hidden, head: (hidden, head))
        return head_to(head, self._student_device)

    @torch.no_grad()
    def answer(self, request: TeacherRequest) -> Projected | Logits:
        """Run the rows; keep the supervised tokens."""
        rows = request.rows.to(self.device)
        supervised_N = request.supervised_N.to(self.device)
        if self._whole_logits:
            logits_TV = self.model.logits(rows).flatten(0, 1)
            return Logits(logits_TV.index_select(0, supervised_N).to(self._student_device))
        hidden_TH = self.model.hidden(rows).flatten(0, 1)
        hidden_NH = hidden_TH.index_select(0, supervised_N)
        return Projected(hidden_NH.to(self._student_device), self.head)

    def self_test(self, vocab_size: int, *, isolated: bool) -> None:
        """Try head and isolation on this machine; a teacher with an unusual head gives logits.

        Raises:
            ModelError: documents that share a row see each other.
        """
        rows = sample_rows(vocab_size).to(self.device)
        with torch.no_grad():
            whole = self.model.logits(rows)
        if not self._whole_logits:
            check_head(self._logits(rows), whole, name="teacher", precision=self.model.dtype)
        if isolated:
            check_isolation(
                self._logits,
                name="teacher",
                vocab_size=vocab_size,
                precision=self.model.dtype,
                device=self.device,
                setting="teacher.attention",
            )

    @torch.no_grad()
    def _logits(self, rows: Rows) -> torch.Tensor:
        if self._whole_logits:
            return self.model.logits(rows)
        hidden_BTH = self.model.hidden(rows)
        logits_TV = self.model.with_head(hidden_BTH.flatten(0, 1), head_logits)
        return logits_TV.unflatten(0, hidden_BTH.shape[:2])

    def close(self) -> None:
        """Nothing to let go of."""


def load_teacher(
    config: TeacherConfig, world: World, *, precision: str, whole_logits: bool = False
) -> LiveTeacher:
    """Load and place the teacher that a configuration describes; a collective.

    Args:
        config: its `teacher` section.
        world: this process's place; the student's device is that of the world.
        precision: `engine.precision`, which `teacher.precision: auto` follows.
        whole_logits: `loss.implementation` is `logits`.

    Raises:
        ModelError: the model is not there, lacks weights, or does not fit what is asked of it.
    """
    wanted = precision if config.precision == "auto" else config.precision
    dtype = torch.bfloat16 if wanted == "bf16" else torch.float32
    device = world.device if config.device == "auto" else torch.device(config.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", world.local_rank)
    with together():
        model = load_frozen(config, dtype=dtype, cuda=device.type == "cuda")
    if config.placement == "sharded":
        shard_frozen(model.body, model.blocks(), _head_parameters(model), device)
    elif config.offload:
        share_on_node(model, world)
        offload_blocks(model, model.blocks(), device)
    elif device.type == "cpu":
        share_on_node(model, world)
    else:
        model.to(device)
    return LiveTeacher(model, device=device, student_device=world.device, whole_logits=whole_logits)


def head_to(head: Head, device: torch.device) -> Head:
    """A head without its adapter's dropout or gradients, on another device."""
    return Head(
        head.weight_VH.detach().to(device),
        None if head.bias_V is None else head.bias_V.detach().to(device),
        None,
        logit_scale=head.logit_scale,
        soft_cap=head.soft_cap,
    )


def _head_parameters(model: CausalLM) -> list[torch.nn.Parameter]:
    return list(model.base_model.get_output_embeddings().parameters())
