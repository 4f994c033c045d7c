"""The matrix: which engines, models and batches the gradient equivalence is checked over."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

ENGINES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")
FLOAT64_ENGINES = ("ddp", "fsdp2")  # DeepSpeed keeps its masters in fp32
MODALITIES = ("text", "images", "images on one rank")
WHOLE = 1_000_000  # a chunk that holds any batch

# Every option of the loss at once, and what a batch has for them; beside plain InfoNCE.
OPTIONS: dict[str, Any] = {
    "hardness_alpha": 2.0,
    "label_smoothing": 0.1,
    "bidirectional": True,
    "matryoshka": ((8, 0.5),),
    "mask_margin": 0.1,
    "tile_size": 3,
}

# fp32: the reference is float64, so this is the rounding of the whole fp32 computation.
BARS = {"fp32": 1e-5, "fp64": 1e-10}


@dataclass(frozen=True, slots=True)
class Case:
    """One step of GradCache on one engine, compared with one float64 process."""

    engine: str
    precision: str  # fp32 or fp64
    training: str  # full, lora, dora or lora and unfrozen
    dropout: bool
    chunk_size: int
    negatives: str  # "0", "2" or "ragged"
    modality: str
    loss: str = "plain"  # or "options": `OPTIONS`, several positives, equal documents, a ring
    kept: int = 0  # leading forwards whose graph is kept instead of replayed

    @property
    def model(self) -> tuple[str, str, bool]:
        """What two cases must share to use one built engine."""
        return self.precision, self.training, self.dropout

    def label(self) -> str:
        """One line that names the case."""
        chunk = "whole" if self.chunk_size == WHOLE else str(self.chunk_size)
        return (
            f"{self.engine:5} {self.precision} {self.training:17} "
            f"{'dropout' if self.dropout else 'plain  '} chunk {chunk:5} "
            f"negatives {self.negatives:6} {self.modality:18} {self.loss:7} "
            f"{'replayed' if not self.kept else 'kept' if self.kept == WHOLE else 'mixed':8}"
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a case measured; ``problems`` is empty when it holds.

    Errors are relative L2 errors; that of the temperature is relative to the sum of the absolute
    shares of all queries, which bounds its rounding. ``num_reductions`` counts gradient reductions
    in the backward passes, ``num_collectives`` all collectives of the step on one rank, agreements
    and embedding exchange included.
    """

    case: Case
    relative_error: float
    norm_ratio: float
    temperature_error: float
    loss_error: float
    num_reductions: int
    num_collectives: int
    num_chunks: int
    problems: tuple[str, ...]

    def to_json(self) -> dict:
        """The outcome as one flat JSON object."""
        flat = asdict(self)
        return flat.pop("case") | flat | {"passed": not self.problems}


def build_matrix(engines: Sequence[str] = ENGINES, *, quick: bool = False) -> list[Case]:
    """All cases of the given engines, grouped by engine and by model.

    Args:
        engines: names out of ``ENGINES``.
        quick: only the chunk size that divides nothing and ragged negatives, fp32.
    """
    cases = []
    for engine in engines:
        precisions = ["fp32"]
        if engine in FLOAT64_ENGINES and not quick:
            precisions.append("fp64")
        for precision, training, dropout in itertools.product(
            precisions, ("full", "lora"), (False, True)
        ):
            # In float64 one chunk size and one kind of batch tell an error from rounding.
            small = quick or precision == "fp64"
            chunks = (2,) if small else (1, 2, WHOLE)
            negatives = ("ragged",) if small else ("0", "2", "ragged")
            for modality, chunk_size, kind in itertools.product(MODALITIES, chunks, negatives):
                cases.append(Case(engine, precision, training, dropout, chunk_size, kind, modality))
        some = [
            case
            for case in cases
            if (case.engine, case.precision) == (engine, "fp32")
            and (case.chunk_size, case.negatives) == (2, "ragged")
        ]
        for like, change in (
            # Beside the adapters' dropout: what is kept and what runs again draw from one stream.
            (("lora", True), {"kept": 3}),
            (("lora", True), {"kept": WHOLE}),
            (("full", False), {"loss": "options"}),
            (("full", False), {"training": "lora and unfrozen"}),
            (("lora", True), {"training": "dora"}),
        ):
            cases += [replace(c, **change) for c in some if (c.training, c.dropout) == like]
    return cases
