"""Where a refresh is, as `Refresher.poll` tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal[
    "idle", "snapshot", "encoding", "building", "validating", "waiting", "published", "failed"
]


@dataclass(frozen=True, slots=True)
class Status:
    """Where a refresh is.

    Attributes:
        state: see the module; `published` and `failed` stay until the next one begins.
        generation, step: of the refresh in flight, or the last one; 0 and -1 before any.
        done, of: encoded shards.
        attempt: from 1.
        reason: of the last failure, also while a further attempt is made.
        seconds: since it began.
    """

    state: State = "idle"
    generation: int = 0
    step: int = -1
    done: int = 0
    of: int = 0
    attempt: int = 0
    reason: str = ""
    seconds: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether a refresh is in flight."""
        return self.state not in ("idle", "published", "failed")
