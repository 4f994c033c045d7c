"""Refreshes and index files on a Ray cluster; the one file that imports ray.

Bytes travel over Ray, not over a shared disk: weights and index files go there, vectors and hits
come back. What every host must have for itself is this package, the encoder's base model and the
passages; their fingerprint is compared before anything is encoded.

Only processes of their own join the cluster, never the training: Ray ends a driver whose cluster is
lost. When such a process ends, whatever ends it, Ray ends its actors.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

import pixelrag
from pixelrag.errors import PixelragError
from pixelrag.retrieval.background import THREAD_VARIABLES
from pixelrag.retrieval.generation import Manifest, shard_bounds
from pixelrag.retrieval.hits import Hits, merge_top_k
from pixelrag.retrieval.ray_actors import EncoderActor, HolderActor
from pixelrag.retrieval.refresh_spec import WEIGHTS, RefreshSpec

_TICK_SECONDS = 0.2
_PULSE_SECONDS = 1.0
_KNOCK_SECONDS = 20.0
_CHUNK_BYTES = 64 << 20
# Its stubs know no groups.
_remote: Any = ray.remote


@contextlib.contextmanager
def joined(address: str) -> Iterator[None]:
    """Be a driver of a running cluster.

    Args:
        address: `auto`, or host:port of its head.

    Raises:
        ConnectionError: there is none, or none that can be joined.
    """
    host, colon, port = address.rpartition(":")
    try:
        if colon:  # where nothing listens, Ray itself would knock for a minute
            socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        message = f"no Ray cluster can be joined at {address} ({_brief(error)})"
        raise ConnectionError(message) from error
    try:
        yield
    finally:
        ray.shutdown()


def encode_shards(
    work: Path, spec: RefreshSpec, shards: Sequence[int], beat: Callable[[], None]
) -> Iterator[tuple[int, np.ndarray]]:
    """Have shards encoded by actors; yields them with their vectors as they come.

    An actor gets its next shard when it has given back one: fast hosts do more, and an actor for
    which the cluster has no room yet is not waited for.

    Args:
        work: folder of the snapshot.
        spec: with `ray`.
        shards: what to encode.
        beat: called when any actor has got on.

    Raises:
        OSError: an actor died or hung, or the cluster was lost.
        PixelragError: what an actor raised.
    """
    assert spec.ray is not None  # its workers are Ray's
    with joined(spec.ray.address):
        weights = ray.put(np.fromfile(work / WEIGHTS, np.uint8))
        encoders = [_Encoder(spec, device, weights) for device in spec.ray.devices]
        todo, missing = deque(shards), set(shards)
        running: dict[Any, tuple[_Encoder, int | None]] = {e.prepared: (e, None) for e in encoders}
        while missing:
            done, _ = ray.wait(list(running), timeout=_TICK_SECONDS)
            for call in done:
                encoder, shard = running.pop(call)
                vectors_MD = encoder.result(call)
                if shard is not None:
                    missing.discard(shard)
                    yield shard, vectors_MD
                if todo:
                    shard = todo.popleft()
                    running[encoder.encode(shard)] = (encoder, shard)
            alive = [encoder.got_on(spec.timeout_seconds) for encoder in encoders]
            if any(alive):
                beat()


class _Encoder:
    """An actor that encodes, and whether it gets on."""

    def __init__(self, spec: RefreshSpec, device: str, weights: Any) -> None:
        actor = _remote(concurrency_groups={"pulse": 1})(EncoderActor)
        self._actor = actor.options(**_place(spec.threads, gpu=device == "cuda")).remote()
        self.prepared = self._actor.prepare.remote(
            spec.to_json(), device, weights, pixelrag.__version__
        )
        self._working = True
        self._host = "?"
        self._pulse = -1
        self._asked: Any = None
        self._asked_at = 0.0
        self._since: float | None = None  # None: Ray has not started it yet

    def encode(self, shard: int) -> Any:
        """Give it a shard."""
        self._working, self._since = True, time.monotonic()
        return self._actor.encode.remote(shard)

    def result(self, call: Any) -> Any:
        """What a call gave."""
        self._working = False
        return _get(call, self._name)

    def got_on(self, timeout_seconds: float) -> bool:
        """Whether it has since the last look.

        Raises:
            TimeoutError: it works, and has been silent for longer than ``timeout_seconds``.
        """
        now = time.monotonic()
        if self._asked is None and now - self._asked_at > _PULSE_SECONDS:
            self._asked = self._actor.pulse.options(concurrency_group="pulse").remote()
            self._asked_at = now
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            self._host, pulse = _get(self._asked, self._name)
            self._asked = None
            if pulse != self._pulse:
                self._pulse, self._since = pulse, now
                return True
        if self._working and self._since is not None and now - self._since > timeout_seconds:
            silent = now - self._since
            raise TimeoutError(f"{self._name}: no sign of life for {silent:.0f} s")
        return False

    @property
    def _name(self) -> str:
        return f"encoder on host {self._host}"


class Holders:
    """Actors that hold index files and search them: the i-th file of every generation is with i.

    Args:
        count: actors.
        threads: CPU threads of a search.
    """

    def __init__(self, count: int, threads: int) -> None:
        actor = _remote(concurrency_groups={"files": 1})(HolderActor)
        self._actors = [actor.options(**_place(threads)).remote() for _ in range(count)]
        self._threads = threads
        self._num_files: dict[int, int] = {}

    def hold(self, folder: Path, keep: Collection[int]) -> None:
        """Send a generation's index files there, where their hashes are compared.

        Args:
            folder: of the generation.
            keep: other generations that go on being held.

        Raises:
            OSError: an actor is lost.
            PixelragError: a file is not what its manifest says.
        """
        manifest = Manifest.read(folder)
        bounds = shard_bounds(manifest.num_passages, len(manifest.index_files))
        for number, name in enumerate(manifest.index_files):
            key = (manifest.generation, number)
            actor = self._actors[number % len(self._actors)]
            with open(folder / name, "rb") as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    self._ask(actor.take, key, np.frombuffer(chunk, np.uint8))
            sha256 = manifest.files[name]["sha256"]
            self._ask(actor.open, key, sha256, manifest.index, bounds[number], self._threads)
        for actor in self._actors:
            self._ask(actor.keep, [manifest.generation, *keep])
        self._num_files[manifest.generation] = len(manifest.index_files)

    def search(self, generation: int, queries_QD: np.ndarray, k: int) -> Hits:
        """The best ``k`` over all files of a generation that is held.

        Raises:
            OSError: an actor is lost, or no longer holds what it held.
        """
        calls = [actor.search.remote(generation, queries_QD, k) for actor in self._actors]
        parts = [Hits(*part) for found in _get(calls, "index holder") for part in found]
        if len(parts) != self._num_files.get(generation):
            raise OSError(f"generation {generation} is not held whole")
        return merge_top_k(parts, k, num_queries=len(queries_QD))

    def _ask(self, method: Any, *arguments: Any) -> None:
        _get(method.options(concurrency_group="files").remote(*arguments), "index holder")


def _place(threads: int, *, gpu: bool = False) -> dict[str, Any]:
    """Options of an actor: room for it, and hosts in turn."""
    return {
        "num_cpus": threads,
        "num_gpus": int(gpu),
        "scheduling_strategy": "SPREAD",
        "runtime_env": {"env_vars": dict.fromkeys(THREAD_VARIABLES, str(threads))},
    }


def _get(calls: Any, who: str) -> Any:
    """`ray.get`, with errors in this package's terms."""
    try:
        return ray.get(calls)
    except RayTaskError as error:
        if isinstance(error.cause, PixelragError | OSError):
            raise error.cause from None
        raise
    except RayActorError as error:
        raise OSError(f"{who} died ({_brief(error)})") from error
    except RayError as error:
        raise OSError(f"{who}: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def main(arguments: Sequence[str]) -> int:
    """Print what the hosts of a cluster have, or why it cannot be joined; for `elsewhere`."""
    try:
        with joined(arguments[0]):
            hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    except ConnectionError as error:
        print(error)  # noqa: T201
        return 1
    print(json.dumps(hosts))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
