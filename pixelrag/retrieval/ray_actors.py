"""What runs on the hosts of a Ray cluster. Without Ray itself: see `ray_cluster`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import pixelrag
from pixelrag.errors import DataError, ProvenanceError
from pixelrag.retrieval.index import Index, IndexSettings, open_index
from pixelrag.retrieval.refresh_encode import ShardEncoder
from pixelrag.retrieval.refresh_spec import WEIGHTS, RefreshSpec

Key = tuple[int, int]  # generation, number of an index file


class EncoderActor:
    """Encodes shards; `pulse` is called beside the other methods, which wait for one another."""

    def __init__(self) -> None:
        self._pulse = 0
        self._encoder: ShardEncoder | None = None

    def prepare(
        self, spec: Mapping[str, Any], device: str, weights: np.ndarray, version: str
    ) -> None:
        """Build the encoder; its weights lie on this host's disk only meanwhile.

        Args:
            spec: of `RefreshSpec.to_json`.
            device: `cpu` or `cuda`.
            weights: uint8, the bytes of the snapshot.
            version: the trainer's own.

        Raises:
            PixelragError: this host lacks something, or has something else.
        """
        require_version(version)
        made = RefreshSpec.from_json(spec)
        os.setpriority(os.PRIO_PROCESS, 0, max(made.nice, os.getpriority(os.PRIO_PROCESS, 0)))
        with _may_pass(), tempfile.TemporaryDirectory(prefix="pixelrag-") as folder:
            weights.tofile(Path(folder) / WEIGHTS)
            self._encoder = ShardEncoder(Path(folder), made, device, self._beat, images=True)

    def encode(self, shard: int) -> np.ndarray:
        """Vectors of one shard, float32 [rows, D].

        Raises:
            PixelragError: a passage cannot be encoded.
        """
        assert self._encoder is not None  # it was told of the work first
        with _may_pass():
            return self._encoder(shard)

    def pulse(self) -> tuple[str, int]:
        """The host's name, and a number that grows while the encoder gets on."""
        return socket.gethostname(), self._pulse

    def _beat(self) -> None:
        self._pulse += 1


class HolderActor:
    """Holds index files of one generation or two; `search` is called beside the other methods."""

    def __init__(self) -> None:
        self._coming: dict[Key, tuple[Any, Any]] = {}
        self._held: dict[Key, tuple[int, Index]] = {}

    def take(self, key: Key, chunk: np.ndarray) -> None:
        """The next bytes of a file, uint8."""
        if key not in self._coming:
            file = tempfile.NamedTemporaryFile(prefix="pixelrag-")  # noqa: SIM115 - `open` closes it
            self._coming[key] = (file, hashlib.sha256())
        file, digest = self._coming[key]
        file.write(chunk)
        digest.update(chunk)

    def open(
        self, key: Key, sha256: str, settings: Mapping[str, Any], first_row: int, threads: int
    ) -> None:
        """Map a file that has come whole; its name goes at once, its bytes with this process.

        Raises:
            ProvenanceError: it is not the file that was sent.
            IndexError_: it is no index.
        """
        file, digest = self._coming.pop(key)
        with file:
            file.flush()
            if digest.hexdigest() != sha256:
                raise ProvenanceError(f"index file {key[1]} of generation {key[0]} came altered")
            index = open_index(Path(file.name), IndexSettings(**settings), threads=threads)
        self._held = {**self._held, key: (first_row, index)}

    def keep(self, generations: Collection[int]) -> None:
        """Let go of all other generations."""
        self._held = {key: held for key, held in self._held.items() if key[0] in generations}

    def search(
        self, generation: int, queries_QD: np.ndarray, k: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Scores and rows, as in `Hits`, of each file of the generation."""
        found = []
        for (number, _), (first_row, index) in self._held.items():
            if number == generation:
                hits = index.search(queries_QD, k)
                found.append((hits.scores_Qk, hits.rows_Qk + first_row))
        return found


def require_version(version: str) -> None:
    """Refuse to work for another version of this package.

    Raises:
        ProvenanceError: this host has another.
    """
    if version != pixelrag.__version__:
        raise ProvenanceError(
            f"host {socket.gethostname()} has pixelrag {pixelrag.__version__}, the training "
            f"{version}; install the same everywhere"
        )


@contextlib.contextmanager
def _may_pass() -> Iterator[None]:
    """Say so where another attempt may go well: an error's cause does not travel with it."""
    try:
        yield
    except DataError as error:
        if isinstance(error.__cause__, OSError):
            raise OSError(str(error)) from None
        raise
