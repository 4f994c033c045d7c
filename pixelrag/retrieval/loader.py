"""Opens a generation in a thread beside the training."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pixelrag.retrieval.generation import Generation


class Loader(threading.Thread):
    """Opens one generation.

    Args:
        number: of the generation.
        open_it: opens it.

    Attributes:
        generation, error: one of the two, once the thread has ended.
    """

    def __init__(self, number: int, open_it: Callable[[], Generation]) -> None:
        super().__init__(name=f"generation-{number}")
        self.number = number
        self.generation: Generation | None = None
        self.error: Exception | None = None
        self._open_it = open_it

    def run(self) -> None:
        try:
            self.generation = self._open_it()
        except Exception as error:  # noqa: BLE001 - told by the switch; the training goes on
            self.error = error
