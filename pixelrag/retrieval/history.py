"""What a run's index went through, step by step, and what a replay makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a replay repeats.

    Attributes:
        step: when.
        kind: `start` of a refresh, `switch` to its generation, or its end as `failed`.
        generation: of which; for a start 0, its number is not yet agreed upon.
    """

    step: int
    kind: Literal["start", "switch", "failed"]
    generation: int = 0


class Replay:
    """The steps of an earlier run's refreshes, without those that came to nothing."""

    def __init__(self, history: Sequence[Event]) -> None:
        self.starts: set[int] = set()
        self.switches: set[int] = set()
        begun: int | None = None
        for event in history:
            if event.kind == "start":
                begun = event.step
            elif event.kind == "failed":
                begun = None
            else:
                self.switches.add(event.step)
                if begun is not None:
                    self.starts.add(begun)
                begun = None
