"""The RAG job's container: question encoder, document encoder, generator and temperature."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any, Literal, overload

import torch
from torch import nn

from pixelrag.losses.rag_objective import Vocabulary
from pixelrag.losses.temperature import LogitScale
from pixelrag.models.embedder import Embedder
from pixelrag.models.generator import Generator

PARTS = ("question", "document", "generator")
"""What `train` may name."""

# Role of a forward pass -> the part that it runs through.
_PART_OF = {
    "query": "question",
    "document": "document",
    "generator": "generator",
    "reading": "generator",
    "attention": "generator",
    "write": "generator",
}
# What a loss takes gradients of; the other roles are read as constants.
_LEARNS = ("query", "document", "generator")


class RagModel(nn.Module):
    """Everything that the RAG job trains, in one module.

    Parts that are not trained are frozen and stay in eval mode: their dropout would be noise that
    nothing learns from, and the index knows their documents without it.

    Args:
        question_encoder: ``encoder(touch_vision=bool, **inputs) -> [B, D]``.
        document_encoder: the same; None = one encoder serves questions and documents.
        generator: a `pixelrag.models.generator.Generator`.
        train: parts of `PARTS` to train; with one shared encoder, both of its names or neither.
        temperature: initial temperature of the scores.
        learnable_temperature: whether it is trained.
        vocabulary: what the role ``generator`` tells beside the targets' log-probabilities, see
            `pixelrag.models.token_scores`.

    Attributes:
        trained: roles whose forward passes have something to train.

    Raises:
        ValueError: an unknown part, or one name alone of a shared encoder.
    """

    def __init__(
        self,
        question_encoder: Embedder,
        document_encoder: Embedder | None,
        generator: Generator,
        *,
        train: Collection[str] = PARTS,
        temperature: float = 1.0,
        learnable_temperature: bool = False,
        vocabulary: Vocabulary = "none",
    ) -> None:
        super().__init__()
        unknown = set(train) - set(PARTS)
        if unknown:
            raise ValueError(f"train: got {sorted(unknown)}, expected some of {', '.join(PARTS)}")
        if document_encoder is None and ("question" in train) != ("document" in train):
            raise ValueError("train: question and document share one encoder: name both or neither")
        self.question_encoder = question_encoder
        self.document_encoder = document_encoder
        self.generator = generator
        self.logit_scale = LogitScale(temperature, learnable=learnable_temperature)
        self._vocabulary = vocabulary
        self._frozen = [self.part(name) for name in PARTS if name not in train]
        for part in self._frozen:
            part.requires_grad_(False)
        self.trained = tuple(
            role
            for role in _LEARNS
            if any(p.requires_grad for p in self.part(_PART_OF[role]).parameters())
        )
        self.train()

    @overload
    def part(self, name: Literal["question", "document"]) -> Embedder: ...

    @overload
    def part(self, name: Literal["generator"]) -> Generator: ...

    @overload
    def part(self, name: str) -> Embedder | Generator: ...

    def part(self, name: str) -> Embedder | Generator:
        """The module of one of `PARTS`."""
        if name == "generator":
            return self.generator
        if name == "document" and self.document_encoder is not None:
            return self.document_encoder
        return self.question_encoder

    @property
    def document_prefix(self) -> str:
        """What the document encoder's parameters are called by in this module."""
        shared = self.document_encoder is None
        return "question_encoder." if shared else "document_encoder."

    def train(self, mode: bool = True) -> RagModel:
        """As `nn.Module.train`; frozen parts stay in eval mode."""
        super().train(mode)
        for part in self._frozen:
            part.eval()
        return self

    def forward(
        self, role: str, *, touch_vision: bool = False, **inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(output, log_scale_1)``.

        The scale is part of every output because sharded parameters may only be used inside a
        forward pass.

        Args:
            role: ``query`` and ``document`` give [B, D]; ``generator`` gives the log-probabilities
                [N, T] of answers, and what `vocabulary` adds to them; ``reading`` the former alone,
                in eval mode; ``attention`` how much each passage is looked at meanwhile, [N, K] or
                [N, 1], see `Generator.attend`; ``write`` token ids of answers, see
                `Generator.write` for its arguments.
            touch_vision: see `pixelrag.models.vision_touch`.
            inputs: of the part that the role runs through.
        """
        if role not in _PART_OF:
            raise ValueError(f"role: got {role!r}, expected one of {', '.join(_PART_OF)}")
        part = self.part(_PART_OF[role])
        if role == "write":
            return self.generator.write(touch_vision=touch_vision, **inputs), self.logit_scale()
        if role in ("reading", "attention"):
            look = part if role == "reading" else self.generator.attend
            with _evaluating(part):
                return look(touch_vision=touch_vision, **inputs), self.logit_scale()
        if role == "generator" and self._vocabulary != "none":
            inputs["vocabulary"] = self._vocabulary
        return part(touch_vision=touch_vision, **inputs), self.logit_scale()

    def blocks(self) -> list[nn.Module]:
        """The units to shard, of all parts."""
        parts = [self.question_encoder, self.document_encoder, self.generator]
        return [block for part in parts if part is not None for block in part.blocks()]


@contextlib.contextmanager
def _evaluating(part: nn.Module) -> Iterator[None]:
    was_training = part.training
    part.eval()
    try:
        yield
    finally:
        part.train(was_training)
