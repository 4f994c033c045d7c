"""Messages between the training and a process that it has started: a line of JSON, then arrays.

Nothing is pickled, and nothing here needs torch, which takes seconds to load.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

import numpy as np


class Pipe:
    """One end of a pair of sockets.

    Args:
        connection: the socket; its time limit holds for each message.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._stream = connection.makefile("rwb")

    def send(self, header: Mapping[str, Any], *arrays: np.ndarray) -> None:
        """Send one message.

        Raises:
            OSError: the other side is gone, or does not take it in time.
        """
        text = json.dumps({**header, "arrays": len(arrays)})
        self._stream.write(text.encode("utf-8") + b"\n")
        for array in arrays:
            np.lib.format.write_array(self._stream, np.asarray(array), allow_pickle=False)
        self._stream.flush()

    def receive(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Wait for one message.

        Raises:
            OSError: the other side is gone, or sends none in time.
        """
        line = self._stream.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("the other side has hung up")
        header = json.loads(line)
        try:
            count = range(header.pop("arrays"))
            return header, [np.lib.format.read_array(self._stream) for _ in count]
        except ValueError as error:  # an array that ends early
            raise ConnectionError("the other side has hung up") from error

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
