"""Index files that Ray actors hold, as the training sees them.

A process of its own joins the cluster (`index_server`). Whatever becomes of it or of the actors,
the files lie on this host's disk as well: until the actors are back they are searched here, with
the same hits.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pixelrag.retrieval.background import end, last_words, launch
from pixelrag.retrieval.generation import Generation
from pixelrag.retrieval.hits import Hits
from pixelrag.retrieval.pipe import Pipe

logger = logging.getLogger("pixelrag")

_SEARCH_SECONDS = 60.0
_HOLD_SECONDS = 1800.0


class IndexElsewhere:
    """Searches generations on a Ray cluster; on the one rank that searches.

    Args:
        address: of the cluster.
        num_actors: among which the index files of a generation are dealt out.
        threads: CPU threads of a search, on each.
        log: file for what the process prints.
        retries: attempts to get lost actors back, one after another, before it is given up.
        retry_seconds: pause before the first of them, doubled for each further one.
        clock: seconds, monotonic; tests pass their own.
    """

    def __init__(
        self,
        address: str,
        num_actors: int,
        *,
        threads: int,
        log: Path,
        retries: int = 2,
        retry_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arguments = (address, str(num_actors), str(threads))
        self._log = log
        self._retries = retries
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._lost = 0  # times in a row
        self._retry_at = 0.0
        self._mending: threading.Thread | None = None
        self._in_use = 0
        self._server: _Server | None = _Server(self._arguments, log)

    def hold(self, generation: Generation) -> None:
        """Hand a generation to the actors and have it search there; may take minutes."""
        self._hand_over(self._server, generation)
        generation.elsewhere = self

    def search(self, generation: Generation, queries_QD: np.ndarray, k: int) -> Hits:
        """As `Generation.search_here`, by the actors where they can; from the main thread."""
        queries_QD = generation.check_queries(queries_QD, k)
        self._in_use = generation.number
        server = self._server
        if server is not None and generation.number in server.held:
            try:
                return server.search(generation.number, queries_QD, k)
            except OSError as error:
                self._give_up(server, error)
        self._mend(generation)
        return generation.search_here(queries_QD, k)

    def close(self) -> None:
        """End the process, and with it the actors."""
        server, self._server = self._server, None
        if server is not None:
            server.end()
        if self._mending is not None:
            self._mending.join()

    def _mend(self, generation: Generation) -> None:
        """Get the actors back beside the training, if it is time to."""
        busy = self._mending is not None and self._mending.is_alive()
        if busy or self._lost > self._retries or self._clock() < self._retry_at:
            return
        if self._server is None:  # here, because a process dies with the thread that starts it
            self._server = _Server(self._arguments, self._log)
        self._mending = threading.Thread(
            target=self._hand_over, args=(self._server, generation), name="index-elsewhere"
        )
        self._mending.start()

    def _hand_over(self, server: _Server | None, generation: Generation) -> None:
        if server is None:
            return
        try:
            server.hold(generation, self._in_use)
        except OSError as error:
            self._give_up(server, error)
            return
        if self._lost:
            logger.info("index: actors hold generation %d again", generation.number)
        self._lost = 0

    def _give_up(self, server: _Server, error: OSError) -> None:
        with self._lock:
            if self._server is not server:
                return  # closed, or told already
            self._server = None
            self._lost += 1
            pause = self._retry_seconds * 2 ** (self._lost - 1)
            self._retry_at = self._clock() + pause
        server.end()
        then = f"the next attempt in {pause:.3g} s" if self._lost <= self._retries else "given up"
        gone = isinstance(error, ConnectionError)  # what it printed says why
        reason = (gone and last_words(self._log)) or error
        logger.warning("index actors are lost: %s; searching here (%s)", reason, then)


class _Server:
    """The process, its two pipes, and what it holds."""

    def __init__(self, arguments: tuple[str, ...], log: Path) -> None:
        self.held: set[int] = set()
        self._turn = threading.Lock()
        searches, asked = socket.socketpair()
        files, taken = socket.socketpair()
        searches.settimeout(_SEARCH_SECONDS)
        files.settimeout(_HOLD_SECONDS)
        self._searches, self._files = Pipe(searches), Pipe(files)
        log.unlink(missing_ok=True)
        with asked, taken:
            passed = (asked.fileno(), taken.fileno())
            self._process: subprocess.Popen[bytes] = launch(
                "pixelrag.retrieval.index_server", *map(str, passed), *arguments,
                log=log, nice=0, threads=1, pass_fds=passed,
            )  # fmt: skip

    def search(self, generation: int, queries_QD: np.ndarray, k: int) -> Hits:
        return Hits(*_ask(self._searches, {"generation": generation, "k": k}, queries_QD))

    def hold(self, generation: Generation, in_use: int) -> None:
        with self._turn:
            keep = {number for number in self.held if number >= in_use}
            folder = str(generation.path.resolve())
            _ask(self._files, {"folder": folder, "keep": sorted(keep)})
            self.held = {*keep, generation.number}

    def end(self) -> None:
        end(self._process)  # first, so that who waits for an answer learns that none will come
        self._searches.close()
        self._files.close()


def _ask(pipe: Pipe, options: dict[str, Any], *arrays: np.ndarray) -> list[np.ndarray]:
    pipe.send(options, *arrays)
    header, answer = pipe.receive()
    if "error" in header:
        raise OSError(header["error"])
    return answer
