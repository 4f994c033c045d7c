"""Joins a Ray cluster for the training: ``python -m ... SEARCH FILES ADDRESS ACTORS THREADS``.

SEARCH and FILES are sockets that it inherits. On the one it answers searches, on the other it takes
new generations meanwhile. It ends when the training hangs up.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pixelrag.retrieval.background import settle_down
from pixelrag.retrieval.pipe import Pipe
from pixelrag.retrieval.ray_cluster import Holders, joined


def main(arguments: Sequence[str]) -> int:
    """Serve until the training hangs up."""
    settle_down()
    searches, files = (Pipe(socket.socket(fileno=int(number))) for number in arguments[:2])
    address, count, threads = arguments[2], int(arguments[3]), int(arguments[4])
    try:
        with joined(address):
            holders = Holders(count, threads)

            def search(queries_QD: np.ndarray, *, generation: int, k: int) -> Sequence[np.ndarray]:
                return holders.search(generation, queries_QD, k)

            def hold(*, folder: str, keep: list[int]) -> Sequence[np.ndarray]:
                holders.hold(Path(folder), keep)
                return ()

            threading.Thread(target=_answer, args=(files, hold), daemon=True).start()
            _answer(searches, search)
    except ConnectionError as error:
        print(error, flush=True)  # noqa: T201 - the training reads it
        return 1
    # A file may be on its way: its thread must not see Ray go.
    os._exit(0)


def _answer(pipe: Pipe, reply: Callable[..., Sequence[np.ndarray]]) -> None:
    while True:
        try:
            options, arrays = pipe.receive()
        except OSError:  # hung up
            return
        answer: tuple[dict[str, Any], Sequence[np.ndarray]]
        try:
            answer = {}, reply(*arrays, **options)
        except Exception as error:  # noqa: BLE001 - told to the training, which does without
            answer = {"error": f"{type(error).__name__}: {error}"}, ()
        pipe.send(answer[0], *answer[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
