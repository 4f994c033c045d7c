"""FAISS indexes by factory string; the one file that imports faiss.

Inner product throughout, on vectors as they are. Files are opened memory-mapped with
`IO_FLAG_MMAP_IFC`, which maps flat, HNSW, IVF and quantised indexes alike (plain `IO_FLAG_MMAP`
reads all but IVF into memory), so an old and a new index are page cache that processes share.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pixelrag.errors import IndexError_
from pixelrag.retrieval.hits import Hits, check_queries

logger = logging.getLogger("pixelrag")

_BLOCK_ROWS = 16_384
_TRAIN_ROWS = 65_536
_ROWS_A_CELL = 64
_SEED = 1234
_GPU_SCRATCH_BYTES = 64 << 20
# "Error in <function> at <file>:<line>: [Error: '<condition>' failed: ]<what is wrong>"
_FAISS_PREFIX = re.compile(r"^Error in .*?\.(?:cpp|h|cu|cuh):\d+: (?:Error: '.*?' failed: )?", re.S)


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """How to build and search an index; see `pixelrag.config.rag_parts.IndexConfig`."""

    factory: str = "HNSW32"
    train_rows: int | None = None
    ef_construction: int = 80
    ef_search: int = 64
    nprobe: int = 16
    refine_factor: int = 4


class Index:
    """An opened index.

    Args:
        index: a faiss index.
        settings: `ef_search`, `nprobe` and `refine_factor` act, each where the index knows it.
        threads: CPU threads of a search.
        fallback: why it is not on the GPU where it was wanted; empty where all is as wanted.
    """

    def __init__(
        self, index: Any, settings: IndexSettings, *, threads: int = 1, fallback: str = ""
    ) -> None:
        self._index = index
        self._threads = threads
        self.fallback = fallback
        _apply(
            index,
            efSearch=settings.ef_search,
            nprobe=settings.nprobe,
            k_factor_rf=settings.refine_factor,
        )

    @property
    def num_rows(self) -> int:
        """N, vectors in the index."""
        return self._index.ntotal

    @property
    def dim(self) -> int:
        """D of its vectors."""
        return self._index.d

    def search(self, queries_QD: np.ndarray, k: int) -> Hits:
        """The ``k`` rows of the largest inner product, as far as the index finds them.

        Args:
            queries_QD: float32, finite.
            k: hits a query.

        Returns:
            Scores float32 and rows int64, both [Q, k], best first; see `Hits` for what stands
            where the index finds fewer.

        Raises:
            IndexError_: the queries do not fit.
        """
        queries_QD = check_queries(queries_QD, self.dim, k)
        with _threads(self._threads), _as_index_error("search"):
            scores_Qk, rows_Qk = self._index.search(queries_QD, k)
        return Hits.of(scores_Qk, rows_Qk)

    def write(self, path: Path) -> None:
        """Write the index; as FAISS does it, so see `durable.put`.

        Raises:
            OSError: it cannot be written; a full disk too, which FAISS reports in its own way.
        """
        import faiss

        try:
            faiss.write_index(self._index, os.fspath(path))
        except RuntimeError as error:
            raise OSError(f"{path}: {_plain(error)}") from error


def open_index(
    path: Path, settings: IndexSettings, *, threads: int = 1, device: str = "cpu"
) -> Index:
    """Map a file that `Index.write` wrote. Altered bytes go unnoticed: check its hash.

    Args:
        path: the file.
        settings: see `Index`.
        threads: CPU threads of a search.
        device: "cuda:1" and the like copy it into that GPU's memory, where faiss-gpu and the kind
            allow it.

    Raises:
        IndexError_: missing, truncated, or not an index of inner products.
    """
    import faiss

    if not path.is_file():
        raise IndexError_(f"{path}: no such index")
    with _as_index_error(str(path)), _no_larger_than(path.stat().st_size):
        index = faiss.read_index(os.fspath(path), faiss.IO_FLAG_MMAP_IFC)
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise IndexError_(f"{path}: an index of another metric than the inner product")
    opened = Index(index, settings, threads=threads)  # a copy takes the settings along
    moved, opened.fallback = _on_gpu(index, device)
    return opened if moved is index else Index(moved, settings, threads=threads)


def build_index(
    vectors_ND: np.ndarray,
    settings: IndexSettings,
    *,
    threads: int = 1,
    device: str = "cpu",
    progress: Callable[[], None] = lambda: None,
) -> Index:
    """Train where the kind needs it, then add all rows block by block.

    With one thread the result is a function of the vectors; several build another, equally good
    HNSW graph every time.

    Args:
        vectors_ND: float32, may be a memory map.
        settings: factory string of FAISS ("Flat", "HNSW32", "IVF1024,PQ48x4fs") and the rest.
        threads: CPU threads.
        device: "cuda:1" and the like train and add there where faiss-gpu and the kind allow it.
        progress: called after training and after each block.

    Raises:
        IndexError_: the factory string is not understood or does not fit the vectors.
    """
    import faiss

    num_rows, dim = vectors_ND.shape
    what = f"index.factory {settings.factory!r} for {num_rows} vectors of {dim}"
    with _as_index_error(what, f"; {_FACTORIES}"):
        index = faiss.index_factory(dim, settings.factory, faiss.METRIC_INNER_PRODUCT)
        if isinstance(index, faiss.IndexIDMap):
            raise IndexError_(f"index.factory {settings.factory!r}: leave out IDMap")
        _apply(index, efConstruction=settings.ef_construction)
        with _threads(threads):
            on_cpu, train_rows = index, settings.train_rows or _enough_rows(index)
            index, fallback = _on_gpu(index, device)
            moved = index is not on_cpu
            if not index.is_trained:
                index.train(_training_rows(vectors_ND, train_rows))
                progress()
            for start in range(0, num_rows, _BLOCK_ROWS):
                block = vectors_ND[start : start + _BLOCK_ROWS]
                index.add(np.ascontiguousarray(block, dtype=np.float32))
                progress()
            if moved:
                index = faiss.index_gpu_to_cpu(index)
    return Index(index, settings, threads=threads, fallback=fallback)


def bytes_of_index(settings: IndexSettings, num_rows: int, dim: int) -> int:
    """Memory of an index that need not be built, about: centroids, codes, ids and links.

    Raises:
        IndexError_: the factory string is not understood or does not fit the vectors.
    """
    import faiss

    with _as_index_error(f"index.factory {settings.factory!r} for {num_rows} vectors of {dim}"):
        index = faiss.index_factory(dim, settings.factory, faiss.METRIC_INNER_PRODUCT)
        ivf = faiss.try_extract_index_ivf(index)
        centroids = 0 if ivf is None else 4 * ivf.nlist * dim
        return centroids + round(num_rows * _bytes_of_row(index))


def _bytes_of_row(index: Any) -> float:
    import faiss

    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        return _bytes_of_row(index.index)
    if isinstance(index, faiss.IndexRefine):
        return _bytes_of_row(index.base_index) + _bytes_of_row(index.refine_index)
    if isinstance(index, faiss.IndexHNSW):
        # Links of level 0; a row in M has M more of them a level up, and so on. Level and offset.
        hnsw: Any = index.hnsw  # faiss' stubs leave methods out
        links, above = hnsw.nb_neighbors(0), hnsw.nb_neighbors(1)
        return _bytes_of_row(index.storage) + 4 * (links + above / (above - 1)) + 12
    if isinstance(index, faiss.IndexIVF):
        return index.code_size + 8
    return index.sa_code_size()


def _enough_rows(index: Any) -> int:
    """Rows to train an index of this kind on; asked on the CPU, where it knows its cells."""
    import faiss

    ivf = faiss.try_extract_index_ivf(index)
    return max(_TRAIN_ROWS, _ROWS_A_CELL * ivf.nlist if ivf is not None else 0)


def _training_rows(vectors_ND: np.ndarray, train_rows: int) -> np.ndarray:
    if train_rows >= len(vectors_ND):
        return np.ascontiguousarray(vectors_ND, dtype=np.float32)
    chosen = np.random.default_rng(_SEED).choice(len(vectors_ND), train_rows, replace=False)
    return np.ascontiguousarray(vectors_ND[np.sort(chosen)], dtype=np.float32)


def _on_gpu(index: Any, device: str) -> tuple[Any, str]:
    """The index copied to ``device``; or as it is, and why."""
    import faiss

    kind, _, number = device.partition(":")
    if kind != "cuda":
        return index, ""
    count = faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else 0
    if count <= int(number or 0):
        return index, f"faiss sees {count} GPUs"
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(_GPU_SCRATCH_BYTES)  # it would take 1.5 GB
    try:
        return faiss.index_cpu_to_gpu(resources, int(number or 0), index), ""
    except RuntimeError as error:  # not every kind exists there
        return index, _plain(error)


def _apply(index: Any, **values: int) -> None:
    """Set those of FAISS' parameters that this kind of index has."""
    import faiss

    space = faiss.ParameterSpace()
    space.initialize(index)
    known = {space.parameter_ranges.at(i).name for i in range(space.parameter_ranges.size())}
    if "efSearch" in known:
        known.add("efConstruction")
    for name, value in values.items():
        if name in known:
            space.set_index_parameter(index, name, value)


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    """Limit FAISS' threads; left alone it takes every core (facebookresearch/faiss#1035)."""
    import faiss

    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(number)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


@contextlib.contextmanager
def _no_larger_than(num_bytes: int) -> Iterator[None]:
    """Have FAISS refuse a vector larger than the whole file before it allocates it.

    Only IVF with PQ makes more of a file than it holds: a table for its searches, which FAISS
    leaves out itself above 2 GiB.
    """
    import faiss

    before = faiss.get_deserialization_vector_byte_limit()
    faiss.set_deserialization_vector_byte_limit(max(num_bytes, _LARGEST_TABLE))
    try:
        yield
    finally:
        faiss.set_deserialization_vector_byte_limit(before)


_LARGEST_TABLE = 2**31

_FACTORIES = "name a FAISS factory string that fits them, such as Flat, HNSW32 or IVF1024,PQ48x4fs"


@contextlib.contextmanager
def _as_index_error(what: str, remedy: str = "") -> Iterator[None]:
    try:
        yield
    except (RuntimeError, AssertionError, MemoryError) as error:  # the last of a wrong length
        raise IndexError_(f"{what}: {_plain(error)}{remedy}") from error


def _plain(error: Exception) -> str:
    """FAISS' message without the C++ function that it comes from."""
    return _FAISS_PREFIX.sub("", str(error)).strip() or type(error).__name__
