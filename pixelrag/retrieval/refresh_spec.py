"""What a refresh is to do, as the trainer writes it and the workers read it.

Files in `gen-<n>.part/work/`:

spec.json                this, by the trainer, when the snapshot is whole; gone before the next one
weights.safetensors      the document encoder's snapshot, by the trainer
training.npz             some passages' rows, and their vectors as the training makes them
sealed.json              hash of the two, by the coordinator; what is made belongs to this hash
sealed-before.json       that of an earlier snapshot, whose shards may still be of use
shard-<i>.npy            vectors of `shard_rows` passages, by encoding workers
built.json               why the index was not built on the GPU; whose vectors were used again
validation.json          figures, by the validating worker
state.json               where the coordinator is; failed.json: why it gave up
alive-<job>, <job>.log   signs of life, and what a process printed
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pixelrag.errors import IndexError_
from pixelrag.json_text import read_json as read_any
from pixelrag.retrieval.durable import put_text, sha256

SPEC = "spec.json"
WEIGHTS = "weights.safetensors"
TRAINING = "training.npz"
SEALED = "sealed.json"
SEALED_BEFORE = "sealed-before.json"
STATE = "state.json"
FAILED = "failed.json"
BUILT = "built.json"
VALIDATION = "validation.json"
_FORMAT = 1
# What the result does not depend on.
_CIRCUMSTANCES = ("generation", "step", "witness", "devices", "ray", "nice", "timeout_seconds")


@dataclass(frozen=True, slots=True)
class Call:
    """A function to call in another process.

    Attributes:
        target: ``package.module:function``.
        arguments: keyword arguments, JSON.
    """

    target: str
    arguments: dict[str, Any]

    def __call__(self, **more: Any) -> Any:
        """Import the function and call it with `arguments` and ``more``."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)(**self.arguments, **more)


@dataclass(frozen=True, slots=True)
class OnRay:
    """Encoding on a Ray cluster.

    Attributes:
        address: `auto`, or host:port of its head.
        devices: one actor each, `cpu` or `cuda`; Ray chooses the host and the GPU.
    """

    address: str
    devices: list[str]


@dataclass(frozen=True, slots=True)
class RefreshSpec:
    """One refresh.

    Attributes:
        generation: number of the generation to make.
        step: optimizer step of the snapshot.
        witness: SHA-256 of `training.npz`; None = there is none.
        passages: returns the passage store (`pixelrag.retrieval.reopen.passages`).
        encoder: called with `weights` (a path), `device` and `progress` (to call now and then) as
            well, returns a function from a list of passages to float32 [n, D]
            (`pixelrag.retrieval.document_encoder.embedder`).
        num_passages, dim: N and D.
        fingerprints: of passages, tokenizer, template, pooling, max_length, dtype.
        index: the fields of `IndexSettings`.
        num_index_shards: index files to build.
        shard_rows: passages a worker encodes before it writes them down.
        devices: one encoding worker each; a device may be named several times. The first also
            builds the index and validates it.
        ray: where to encode instead of on these, if anywhere.
        threads: CPU threads of each worker.
        nice: see `background.launch`.
        timeout_seconds: a worker without a sign of life for so long is killed.
        min_recall, recall_k: the index must find so much of the true best k.
        parity_tolerance: largest relative difference between a vector and the same passage
            encoded once more, alone.
        seed: of the rows that are validated.
    """

    generation: int
    step: int
    passages: Call
    encoder: Call
    num_passages: int
    dim: int
    fingerprints: dict[str, str]
    index: dict[str, Any]
    witness: str | None = None
    num_index_shards: int = 1
    shard_rows: int = 8192
    devices: list[str] = field(default_factory=lambda: ["cpu"])
    ray: OnRay | None = None
    threads: int = 1
    nice: int = 19
    timeout_seconds: float = 1800.0
    min_recall: float = 0.9
    recall_k: int = 10
    parity_tolerance: float = 1e-3
    seed: int = 0

    @property
    def num_shards(self) -> int:
        """Shards of passages, the last one maybe shorter."""
        return -(-self.num_passages // self.shard_rows)

    def rows_of(self, shard: int) -> range:
        """Rows of one shard."""
        start = shard * self.shard_rows
        return range(start, min(start + self.shard_rows, self.num_passages))

    def write(self, work: Path) -> None:
        """Write it to a work folder."""
        put_text(work / SPEC, json.dumps({"format": _FORMAT, **self.to_json()}, indent=1) + "\n")

    def to_json(self) -> dict[str, Any]:
        """As plain values, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RefreshSpec:
        """From what `to_json` gave.

        Raises:
            KeyError, TypeError: it is something else.
        """
        nested: dict[str, Any] = {n: Call(**content[n]) for n in ("passages", "encoder")}
        nested["ray"] = OnRay(**content["ray"]) if content["ray"] is not None else None
        return cls(**{**content, **nested})

    @classmethod
    def read(cls, work: Path) -> RefreshSpec:
        """Read what `write` wrote.

        Raises:
            IndexError_: it is missing or cannot be read.
        """
        path = work / SPEC
        try:
            content = read_any(path, finite=False)
            if content.pop("format") != _FORMAT:
                raise ValueError(f"expected format {_FORMAT}")
            return cls.from_json(content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise IndexError_(f"{path}: cannot be read ({error})") from error

    def seal(self, weights_sha256: str) -> str:
        """Hash of all that decides the vectors and the index."""
        content = {k: v for k, v in self.to_json().items() if k not in _CIRCUMSTANCES}
        text = json.dumps(content | {"weights": weights_sha256}, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()


def shard_name(shard: int) -> str:
    """File of a shard's vectors."""
    return f"shard-{shard:05d}.npy"


def weights_hash(work: Path) -> str:
    """SHA-256 of the snapshot.

    Raises:
        IndexError_: there is none.
    """
    try:
        return sha256(work / WEIGHTS)
    except OSError as error:
        raise IndexError_(f"{work / WEIGHTS}: the snapshot cannot be read ({error})") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a small file; None where there is none, or no whole one."""
    try:
        content = read_any(path, finite=False)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Put an object into a small file."""
    put_text(path, json.dumps(content) + "\n")
