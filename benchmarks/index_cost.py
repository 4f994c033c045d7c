"""What indexes cost, by type: building, searching, and two generations open at once.

    python -m benchmarks.index_cost --output benchmarks/results

Building and searching on clustered unit vectors, one thread. Memory: an old and a new index opened
and searched by one process, what is private to it, and what is page cache that the processes of a
host share. What a refresh costs the steps beside it: `pixelrag bench rag-refresh`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import common
from pixelrag.bench.memory import MIB
from pixelrag.retrieval.index import Index, IndexSettings, build_index, open_index

NUM_QUERIES = 200
K = 10
# Of each index type its factory string, for so many vectors.
FACTORIES = {
    "flat": lambda count: "Flat",
    "hnsw": lambda count: "HNSW32",
    "ivf flat": lambda count: f"IVF{_cells(count)},Flat",
    "ivf pq": lambda count: f"IVF{_cells(count)},PQ48x4fs",
}


def _cells(count: int) -> int:
    """Cells of an inverted file: four times the root, a usual choice."""
    return int(4 * count**0.5)


def clustered(count: int, dim: int, seed: int) -> np.ndarray:
    """Unit vectors in clusters of about fifty, float32 [count, dim]; seeds share the clusters."""
    centres = np.random.default_rng(0).standard_normal((max(1, count // 50), dim))
    rng = np.random.default_rng(seed)
    vectors = centres[rng.integers(len(centres), size=count)]
    vectors = vectors + 0.5 * rng.standard_normal((count, dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def measure_index(kind: str, count: int, dim: int) -> dict[str, float]:
    """Processor seconds to build, milliseconds a query, recall@10 against exact search."""
    vectors, queries = clustered(count, dim, seed=1), clustered(count, dim, seed=2)[:NUM_QUERIES]
    settings = IndexSettings(factory=FACTORIES[kind](count))
    started = time.process_time()
    index = build_index(vectors, settings)
    built = time.process_time() - started
    started = time.process_time()
    found = index.search(queries, K).rows_Qk
    searched = time.process_time() - started
    exact = np.argsort(-(queries @ vectors.T), axis=1)[:, :K]
    hits = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(found, exact, strict=True))
    return {
        "build_cpu_seconds": round(built, 2),
        "query_cpu_ms": round(1000 * searched / NUM_QUERIES, 3),
        "recall": round(hits / (NUM_QUERIES * K), 3),
    }


def measure_memory(kind: str, count: int, dim: int) -> dict[str, float]:
    """Memory of this process with one index open and searched, and with a second beside it."""
    settings = IndexSettings(factory=FACTORIES[kind](count))
    queries = clustered(count, dim, seed=2)[:NUM_QUERIES]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{name}.faiss" for name in ("old", "new")]
        build_index(clustered(count, dim, seed=1), settings).write(paths[0])
        paths[1].write_bytes(paths[0].read_bytes())
        held: list[Index] = []
        before = _rss()
        grown = []
        for path in paths:
            held.append(open_index(path, settings))
            held[-1].search(queries, K)
            grown.append({name: value - before[name] for name, value in _rss().items()})
        size = paths[0].stat().st_size / MIB
    return {
        "file_mib": round(size, 1),
        "one_private_mib": round(grown[0]["RssAnon"], 1),
        "two_private_mib": round(grown[1]["RssAnon"], 1),
        "two_mapped_mib": round(grown[1]["RssFile"], 1),
    }


def _rss() -> dict[str, float]:
    """Resident MiB of this process: its own (anonymous), and mapped files."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
    return {name: int(value.split()[0]) / 1024 for name, value in fields.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the measurement and write it down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.index_cost")
    parser.add_argument("--vectors", type=int, nargs="+", default=[10_000, 50_000])
    parser.add_argument("--dim", type=int, default=384, help="of the vectors (384)")
    common.add_output(parser)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.memory_of:
        print(json.dumps(measure_memory(options.memory_of, options.vectors[0], options.dim)))
        return
    results = common.Results("index_cost", options, 1)
    for count in options.vectors:
        for kind in FACTORIES:
            case = {"index": kind, "factory": FACTORIES[kind](count), "vectors": count}
            results.add(case, figures=measure_index(kind, count, options.dim))
    for kind in FACTORIES:
        flags = ["--memory-of", kind, "--vectors", options.vectors[-1], "--dim", options.dim]
        found = common.fresh_process("benchmarks.index_cost", flags)
        results.add({"index": kind, "generations": 2}, figures=found)


if __name__ == "__main__":
    main()
