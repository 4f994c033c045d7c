"""What a job gives the training loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pixelrag.engine.base import Engine


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one accumulated batch did; equal on all ranks but for ``suspects``."""

    loss: float
    rows: int
    tokens: int
    figures: dict[str, float] = field(default_factory=dict)
    # What to log per second, by the name of that figure.
    amounts: dict[str, float] = field(default_factory=dict)
    # Sample ids of this rank that explain a loss which is not finite.
    suspects: list[str] = field(default_factory=list)


class Task(Protocol):
    """A training job: everything but the loop.

    Attributes:
        engine: holds the container module.
        batches_per_step: how often the loop fetches and accumulates before it steps.
    """

    engine: Engine
    batches_per_step: int

    def before_step(self) -> None:
        """What is due between two steps; a collective, and may end at a `stop_point`."""

    def next_batch(self) -> Any:
        """Fetch this rank's part of the next global batch."""

    def sample_ids(self, batch: Any) -> list[str]:
        """Name the rows of a batch, for messages."""

    def accumulate(self, batch: Any, *, weight: float, last: bool) -> StepReport:
        """Forward and backward of one global batch; a collective."""

    def step_figures(self) -> dict[str, float]:
        """Figures to log after a step (the temperature, say)."""

    def evaluate(self) -> dict[str, float]:
        """Held-out figures, or an empty dict where there is nothing held out; a collective."""

    def position(self) -> dict[str, Any]:
        """Where the data stand, as JSON."""

    def export(self, folder: Path) -> None:
        """Write the model in a form that other tools load; a collective."""
