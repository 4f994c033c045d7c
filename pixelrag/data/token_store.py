"""Tokenized samples, one after the other in flat arrays, in memory or mapped from a folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelrag.data.array_file import map_array
from pixelrag.data.text_encoder import Tokens
from pixelrag.errors import DataError
from pixelrag.json_text import read_json

_FORMAT = 1
_ARRAYS = {
    "ids": np.int32,
    "supervised": np.bool_,
    "offsets": np.int64,
    "sources": np.int32,
    "numbers": np.int64,
}
_BLOCK = 1 << 24


@dataclass(frozen=True, slots=True)
class TokenStore:
    """Samples as tokens.

    Attributes:
        ids: tokens of all samples, [T] int32.
        supervised: which of them are learnt from, [T] bool.
        offsets: sample `i` is `ids[offsets[i] : offsets[i + 1]]`, [N + 1] int64.
        sources: index of each sample's source in `labels`, [N] int32.
        numbers: line or row of each sample in its source, [N] int64.
        labels: names of the sources.
        fingerprint: hash of tokens, masks and lengths. It does not depend on the names or places
            of files, and tells whether two ranks, or a run and its resumption, have the same data.
    """

    ids: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    sources: NDArray[np.int32]
    numbers: NDArray[np.int64]
    labels: tuple[str, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, sample: int) -> Tokens:
        """One sample; views, not copies."""
        part = slice(int(self.offsets[sample]), int(self.offsets[sample + 1]))
        return Tokens(self.ids[part], self.supervised[part])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, [N] int64."""
        return np.diff(self.offsets)

    def sample_id(self, sample: int) -> str:
        """Where a sample comes from, such as "train.jsonl:12"."""
        return f"{self.labels[self.sources[sample]]}:{self.numbers[sample]}"

    def save(self, folder: Path) -> None:
        """Write the samples to a folder that appears when it is whole.

        Raises:
            DataError: the folder is there already, or cannot be written.
        """
        aside = folder.with_name(f".{folder.name}.tmp")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            for name in _ARRAYS:
                np.save(aside / f"{name}.npy", getattr(self, name), allow_pickle=False)
            manifest = {
                "format": _FORMAT,
                "fingerprint": self.fingerprint,
                "labels": self.labels,
                "num_samples": len(self),
                "num_tokens": len(self.ids),
            }
            (aside / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            aside.rename(folder)
        except OSError as error:
            raise DataError(f"Tokens cannot be written to {folder}: {error}") from error

    @classmethod
    def load(cls, folder: Path) -> TokenStore:
        """Map the samples of a folder; they are read from the disk where they are used.

        Raises:
            DataError: the folder holds no such samples, or not all of them.
        """
        try:
            manifest = read_json(folder / "manifest.json")
            if manifest["format"] != _FORMAT:
                raise ValueError(f"format {manifest['format']}, expected {_FORMAT}")
            arrays = {name: map_array(folder / f"{name}.npy") for name in _ARRAYS}
            store = cls(
                **arrays, labels=tuple(manifest["labels"]), fingerprint=manifest["fingerprint"]
            )
            for name, dtype in _ARRAYS.items():
                if arrays[name].dtype != dtype:
                    raise ValueError(f"{name}.npy holds {arrays[name].dtype}")
            found = len(store), len(store.ids), int(store.offsets[-1]), len(store.supervised)
            expected = (manifest["num_samples"], *[manifest["num_tokens"]] * 3)
            if found != expected or not len(store.sources) == len(store.numbers) == len(store):
                raise ValueError("its arrays do not fit together")
            if store.offsets[0] or (np.diff(store.offsets) < 0).any():
                raise ValueError("offsets.npy does not ascend from 0")
            if len(store) and not 0 <= store.sources.min() <= store.sources.max() < len(
                store.labels
            ):
                raise ValueError("sources.npy names a source that has no label")
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(
                f"{folder} holds no tokens that can be read ({error}); delete it, and it is "
                "written anew"
            ) from error
        return store


class TokenStoreBuilder:
    """Collects samples for a `TokenStore`."""

    def __init__(self) -> None:
        self._ids: list[NDArray[np.int32]] = []
        self._supervised: list[NDArray[np.bool_]] = []
        self._sources: list[int] = []
        self._numbers: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, tokens: Tokens, source: int, number: int) -> None:
        """Append one sample: row `number` of source `source`."""
        self._ids.append(tokens.ids)
        self._supervised.append(tokens.supervised)
        self._sources.append(source)
        self._numbers.append(number)

    def build(self, labels: Sequence[str]) -> TokenStore:
        """The samples so far."""
        ids = _joined(self._ids, np.int32)
        supervised = _joined(self._supervised, np.bool_)
        offsets = np.zeros(len(self._ids) + 1, np.int64)
        np.cumsum([len(sample) for sample in self._ids], out=offsets[1:])
        return TokenStore(
            ids,
            supervised,
            offsets,
            np.asarray(self._sources, np.int32),
            np.asarray(self._numbers, np.int64),
            tuple(labels),
            _fingerprint(ids, supervised, offsets),
        )


def hold_out(
    store: TokenStore, num_samples: int, seed: int = 25
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split the samples in two; equal samples stay together, so nothing held out is trained on.

    Which samples are held out depends on their tokens and the seed alone, not on their order.

    Args:
        store: the samples.
        num_samples: how many to hold out, or a few more where the last one occurs repeatedly.
        seed: of the draw.

    Returns:
        Samples to train on and samples held out, each in ascending order, int64.

    Raises:
        DataError: nothing would be left to train on.
    """
    salt = seed.to_bytes(8, "little")
    digests = [
        hashlib.blake2b(store[i].ids.data, digest_size=16, salt=salt).digest()
        for i in range(len(store))
    ]
    order = np.array(sorted(range(len(store)), key=lambda i: (digests[i], i)), np.int64)
    stop = num_samples
    while 0 < stop < len(order) and digests[order[stop]] == digests[order[stop - 1]]:
        stop += 1
    if stop >= len(order):
        raise DataError(
            f"{num_samples} samples are to be held out of {len(store)} (equal ones together), "
            "which leaves none to train on; lower data.eval_samples"
        )
    return np.sort(order[stop:]), np.sort(order[:stop])


def _joined(parts: Iterable[NDArray[Any]], dtype: type) -> NDArray[Any]:
    parts = list(parts)
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _fingerprint(
    ids: NDArray[np.int32], supervised: NDArray[np.bool_], offsets: NDArray[np.int64]
) -> str:
    digest = hashlib.sha256()
    for array, kind in ((ids, "<i4"), (supervised, "u1"), (offsets, "<i8")):
        for block in _blocks(array):
            digest.update(np.ascontiguousarray(block.astype(kind, copy=False)).data)
        digest.update(b"\x00")
    return digest.hexdigest()


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    return (array[start : start + _BLOCK] for start in range(0, len(array), _BLOCK))
