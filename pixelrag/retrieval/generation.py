"""One published generation of the knowledge base: what lies in its folder, and searching it.

vectors.npy              float32 [N, D], row i is passage i; mapped
index.faiss              or index-<i>-of-<n>.faiss, each over an equal range of rows; mapped
ids.npz                  the passages' ids: their UTF-8 bytes, and where each ends
metadata.npz             with index.faiss and summary.json what PixelRAG's server mounts (it reads
summary.json             one file: StarTrail-org/PixelRAG, serve/src/pixelrag_serve/backends.py)
manifest.json            sizes and SHA-256 of all these, and what they were made from
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pixelrag.data.array_file import map_array, read_arrays
from pixelrag.errors import IndexError_, ProvenanceError
from pixelrag.json_text import is_beside, read_json
from pixelrag.retrieval.durable import put, put_text, sha256
from pixelrag.retrieval.hits import Hits, check_queries, merge_top_k
from pixelrag.retrieval.index import Index, IndexSettings, open_index

logger = logging.getLogger("pixelrag")

MANIFEST = "manifest.json"
VECTORS = "vectors.npy"
IDS = "ids.npz"
METADATA = "metadata.npz"
SUMMARY = "summary.json"
FORMAT = 1
METRIC = "inner_product"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a generation holds, and of what.

    Attributes:
        generation: its number, from 1.
        step: optimizer step whose document encoder made the vectors.
        num_passages, dim: N and D.
        metric: `inner_product`.
        index: the fields of `IndexSettings`.
        index_files: names of the index files, in the order of their rows.
        fingerprints: of passages, weights, tokenizer, template, pooling, max_length, dtype.
        validation: measured before publication: recall, parity, norms.
        files: size and SHA-256 by name.
    """

    generation: int
    step: int
    num_passages: int
    dim: int
    metric: str
    index: dict[str, Any]
    index_files: list[str]
    fingerprints: dict[str, str]
    validation: dict[str, Any]
    files: dict[str, dict[str, Any]]

    def write(self, folder: Path) -> None:
        """Write it, as the last file of a generation."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        put_text(folder / MANIFEST, text + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a generation's manifest.

        Raises:
            IndexError_: there is none, or it is not one.
        """
        path = folder / MANIFEST
        try:
            content = read_json(path)
            if content.pop("format") != FORMAT:
                raise ValueError(f"expected format {FORMAT}")
            manifest = cls(**content)
            for file in fields(cls):
                expected = {"int": int, "str": str, "list": list, "dict": dict}
                kind = expected[str(file.type).partition("[")[0]]
                if not isinstance(getattr(manifest, file.name), kind):
                    raise ValueError(f"{file.name} is not a {kind.__name__}")
            manifest._check_files()
            return manifest
        except FileNotFoundError:
            raise IndexError_(f"{folder}: no {MANIFEST}; not a whole generation") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise IndexError_(f"{path}: cannot be read ({error})") from error

    def _check_files(self) -> None:
        for name in [*self.files, *self.index_files]:
            if not is_beside(name):
                raise ValueError(f"{name!r} is no name of a file beside it")
        for name, entry in self.files.items():
            found = entry if isinstance(entry, dict) else {}
            if [type(found.get(key)) for key in ("size", "sha256")] != [int, str]:
                raise ValueError(f"{name} has no size and sha256")

    def check(
        self,
        folder: Path,
        expected: Mapping[str, str],
        remedy: str = "Restore the passages and settings it was made with, or give the run another "
        "output_dir so that the passages are encoded anew",
    ) -> None:
        """Refuse a generation that was made from something else.

        Args:
            folder: for messages.
            expected: fingerprints by name; those that are not named may be anything.
            remedy: what the message ends with.

        Raises:
            ProvenanceError: names every difference.
        """
        differing = [
            f"  {name}: it has {self.fingerprints.get(name, 'none')}, the run {wanted}\n"
            for name, wanted in expected.items()
            if self.fingerprints.get(name) != wanted
        ]
        if differing:
            told = "".join(differing)
            raise ProvenanceError(f"{folder} does not belong to this run:\n{told}{remedy}")


class Elsewhere(Protocol):
    """Searches a generation in other processes; see `pixelrag.retrieval.elsewhere`."""

    def search(self, generation: Generation, queries_QD: np.ndarray, k: int) -> Hits: ...


class Generation:
    """An opened generation; nothing in its folder is ever written to.

    Args:
        path: its folder.
        shards: which of so many index files to open.
        threads: CPU threads of a search.
        device: where to search. "cuda:1" and the like copy the index files there.
        device_bytes: leave them on the CPU where they are larger, or the GPU cannot have them, and
            say so once. None: raise.

    Attributes:
        path: its folder.
        manifest: what it says of itself.
        vectors_ND: float32, mapped, read-only.
        elsewhere: what searches it, if not this process.

    Raises:
        IndexError_: a file is missing, or of another size than the manifest says, or the files
            do not fit together. Bytes are compared by `verify`.
    """

    def __init__(
        self,
        path: Path,
        *,
        shards: Callable[[int], Iterable[int]] = range,
        threads: int = 1,
        device: str = "cpu",
        device_bytes: int | None = None,
    ) -> None:
        self.path = path
        self.elsewhere: Elsewhere | None = None
        self.manifest = Manifest.read(path)
        _raise_first(path, self._size_problems())
        manifest = self.manifest
        try:
            self.vectors_ND = map_array(path / VECTORS)
        except (OSError, ValueError) as error:
            raise IndexError_(f"{path / VECTORS}: cannot be read ({error})") from error
        shape = (manifest.num_passages, manifest.dim)
        if self.vectors_ND.shape != shape or self.vectors_ND.dtype != np.float32:
            raise IndexError_(
                f"{path / VECTORS}: {self.vectors_ND.dtype} {list(self.vectors_ND.shape)}, "
                f"expected float32 {list(shape)}"
            )
        bounds = shard_bounds(manifest.num_passages, len(manifest.index_files))
        try:
            self._settings = IndexSettings(**manifest.index)
        except TypeError as error:
            raise IndexError_(f"{path / MANIFEST}: index: {error}") from error
        self._indexes: list[tuple[int, Index]] = []
        chosen = list(shards(len(manifest.index_files)))
        size = sum(manifest.files[manifest.index_files[shard]]["size"] for shard in chosen)
        too_large = device_bytes is not None and size > device_bytes
        for shard in chosen:
            file = path / manifest.index_files[shard]
            where = "cpu" if too_large else device
            index = open_index(file, self._settings, threads=threads, device=where)
            if index.fallback and device_bytes is None:
                raise IndexError_(
                    f"index.device {device} for index.factory {self._settings.factory!r}: "
                    f"{index.fallback}. Set index.device cpu or auto"
                )
            if index.fallback or too_large:
                say_once(f"index: searched on the CPU ({index.fallback or _too_large(size)})")
            expected = bounds[shard + 1] - bounds[shard]
            if (index.num_rows, index.dim) != (expected, manifest.dim):
                raise IndexError_(
                    f"{file}: {index.num_rows} vectors of {index.dim}, expected {expected} of "
                    f"{manifest.dim}"
                )
            self._indexes.append((bounds[shard], index))
        self._ids: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def number(self) -> int:
        """Generations are numbered from 1 in the order of their snapshots."""
        return self.manifest.generation

    @property
    def step(self) -> int:
        """Optimizer step of the encoder that made it."""
        return self.manifest.step

    def __len__(self) -> int:
        return self.manifest.num_passages

    def search(self, queries_QD: np.ndarray, k: int) -> Hits:
        """The best ``k`` passages of the opened index files; see `Index.search`.

        Raises:
            IndexError_: the queries do not fit.
        """
        if self.elsewhere is not None:
            return self.elsewhere.search(self, queries_QD, k)
        return self.search_here(queries_QD, k)

    def search_here(self, queries_QD: np.ndarray, k: int) -> Hits:
        """The same by this process."""
        parts = []
        for first_row, index in self._indexes:
            hits = index.search(queries_QD, k)
            parts.append(Hits(hits.scores_Qk, hits.rows_Qk + first_row))
        if len(parts) == 1:
            return parts[0]
        return merge_top_k(parts, k, num_queries=len(queries_QD))

    def check_queries(self, queries_QD: np.ndarray, k: int) -> np.ndarray:
        """The queries as contiguous float32.

        Raises:
            IndexError_: they do not fit this generation.
        """
        return check_queries(queries_QD, self.manifest.dim, k)

    def ids(self, rows: Iterable[int]) -> list[str]:
        """The ids of passages, by row.

        Raises:
            IndexError_: a row that is not there; -1 is not the last one.
        """
        if self._ids is None:
            self._ids = _read_ids(self.path / IDS, self.manifest.num_passages)
        utf8, ends = self._ids
        found = []
        for row in rows:
            if not 0 <= row < len(ends):
                raise IndexError_(f"{self.path}: no row {row}, it has {len(ends)}")
            start = ends[row - 1] if row > 0 else 0
            found.append(bytes(utf8[start : ends[row]]).decode("utf-8"))
        return found

    def verify(self) -> None:
        """Read every byte and compare the hashes; FAISS itself takes flipped bytes for scores.

        Raises:
            IndexError_: names the first file that is not as it was written.
        """
        files = self.manifest.files
        with ThreadPoolExecutor(max_workers=4) as pool:
            hashes = list(pool.map(lambda name: sha256(self.path / name), files))
        _raise_first(
            self.path,
            [
                f"{name} is altered (SHA-256 {got[:12]}..., expected {entry['sha256'][:12]}...)"
                for (name, entry), got in zip(files.items(), hashes, strict=True)
                if got != entry["sha256"]
            ],
        )

    def _size_problems(self) -> list[str]:
        problems = []
        named = {VECTORS, IDS, *self.manifest.index_files}
        problems += [f"{name} is not in its manifest" for name in named - set(self.manifest.files)]
        for name, entry in self.manifest.files.items():
            try:
                size = (self.path / name).stat().st_size
            except OSError as error:
                problems.append(f"{name}: {error.strerror}")
                continue
            if size != entry["size"]:
                problems.append(f"{name} has {size} bytes, expected {entry['size']}")
        return problems


def _read_ids(path: Path, num_passages: int) -> tuple[np.ndarray, np.ndarray]:
    try:
        arrays = read_arrays(path)
        utf8, ends = arrays["utf8"], arrays["ends"]
        if (utf8.dtype, ends.dtype, ends.shape) != (np.uint8, np.int64, (num_passages,)):
            raise ValueError(f"not the ids of {num_passages} passages")
    except (OSError, ValueError, KeyError) as error:
        raise IndexError_(f"{path}: cannot be read ({error})") from error
    return utf8, ends


@functools.cache
def say_once(message: str) -> None:
    """Log what every generation would say again."""
    logger.info("%s", message)


def _too_large(size: int) -> str:
    return f"{size / 2**30:.2f} GiB of index files are too much for the GPU beside the training"


def _raise_first(path: Path, problems: list[str]) -> None:
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise IndexError_(f"{path}: {problems[0]}{more}; the generation is damaged")


def shard_bounds(num_rows: int, num_shards: int) -> list[int]:
    """First rows of near-equal ranges, and the end: `num_shards` + 1 numbers."""
    return [shard * num_rows // num_shards for shard in range(num_shards + 1)]


def index_names(num_shards: int) -> list[str]:
    """The index files of a generation with so many shards."""
    if num_shards == 1:
        return ["index.faiss"]
    return [f"index-{shard}-of-{num_shards}.faiss" for shard in range(num_shards)]


def write_tables(
    folder: Path, ids: Sequence[str], dim: int, settings: IndexSettings, num_shards: int = 1
) -> None:
    """Write `ids.npz`, and, with one index file, what else PixelRAG's server needs.

    To the server each passage is an article of its own, numbered by row, with one tile.
    """
    encoded = [name.encode("utf-8") for name in ids]
    ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    utf8 = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    put(folder / IDS, lambda path: _savez(path, {"utf8": utf8, "ends": ends}))
    if num_shards > 1:
        return
    zeros = np.zeros(len(ids), np.int32)
    names = ("tile_indices", "chunk_indices", "y_offsets", "tile_heights")
    arrays = {"article_ids": np.arange(len(ids), dtype=np.int64), **dict.fromkeys(names, zeros)}
    put(folder / METADATA, lambda path: _savez(path, arrays))
    summary = {
        "backend": "faiss",
        "total_vectors": len(ids),
        "dimension": dim,
        "nlist": 0,
        "nprobe": settings.nprobe,
        "metric": "ip",
        "index_type": settings.factory,
        "index_file": index_names(1)[0],
        "metadata_file": METADATA,
    }
    put_text(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")


def _savez(path: Path, arrays: Mapping[str, Any]) -> None:
    with open(path, "wb") as stream:  # numpy would add .npz to a name
        np.savez(stream, **arrays)
