"""Joins a Ray cluster for the training: ``python -m ... SEARCH FILES ADDRESS ACTORS THREADS``.

SEARCH and FILES are sockets that it inherits. On the one it answers searches, on the other it takes
new generations meanwhile. It ends when the training hangs up.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pixelrag.models.wire import receive, send
from pixelrag.retrieval.background import settle_down
from pixelrag.retrieval.ray_cluster import Holders, joined

Answer = tuple[dict[str, Any], dict[str, torch.Tensor]]
Reply = Callable[[Mapping[str, Any], Mapping[str, torch.Tensor]], Answer]


def main(arguments: Sequence[str]) -> int:
    """Serve until the training hangs up."""
    settle_down()
    asked, files = (socket.socket(fileno=int(number)) for number in arguments[:2])
    address, count, threads = arguments[2], int(arguments[3]), int(arguments[4])
    try:
        with joined(address):
            holders = Holders(count, threads)

            def search(header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Answer:
                queries_QD = tensors["queries"].numpy()
                hits = holders.search(header["generation"], queries_QD, header["k"])
                scores, rows = map(torch.from_numpy, hits)
                return {}, {"scores": scores, "rows": rows}

            def hold(header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Answer:
                holders.hold(Path(header["folder"]), header["keep"])
                return {}, {}

            threading.Thread(target=_answer, args=(files, hold), daemon=True).start()
            _answer(asked, search)
    except ConnectionError as error:
        print(error, flush=True)  # noqa: T201 - the training reads it
        return 1
    # A file may be on its way: its thread must not see Ray go.
    os._exit(0)


def _answer(connection: socket.socket, reply: Reply) -> None:
    while (question := receive(connection)) is not None:
        try:
            answer = reply(*question)
        except Exception as error:  # noqa: BLE001 - told to the training, which does without
            answer = {"error": f"{type(error).__name__}: {error}"}, {}
        send(connection, *answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
