"""What the knowledge base costs the training: steps beside a refresh, indexes, two generations.

    python -m benchmarks.rag_refresh --output benchmarks/results/rag_refresh.jsonl

steps    the RAG job itself, on generated passages and tiny models. Refreshes start and end while it
         trains, so steps beside one and steps alone alternate in one run. With one rank the second
         core is free for the refresh; with two lockstep ranks none is, and the refresh runs at the
         lowest priority of the scheduler.
index    building and searching, by index type, on clustered unit vectors, one thread
memory   an old and a new index opened and searched by one process: what is private to it, and what
         is page cache that the processes of a host share
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
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


def measure_index(kind: str, count: int, dim: int) -> dict[str, Any]:
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
        "kind": "index",
        "type": kind,
        "factory": settings.factory,
        "vectors": count,
        "build_cpu_seconds": round(built, 2),
        "query_cpu_ms": round(1000 * searched / NUM_QUERIES, 3),
        "recall": round(hits / (NUM_QUERIES * K), 3),
    }


def measure_memory(kind: str, count: int, dim: int) -> dict[str, Any]:
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
        size = paths[0].stat().st_size / common.MIB
    return {
        "kind": "memory",
        "type": kind,
        "vectors": count,
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


def make_material(folder: Path, passages: int) -> None:
    """A catalogue, an encoder that is large enough to be busy, and a reader."""
    from pixelrag.demo.rag_shift import all_words, write_catalogue
    from pixelrag.models.tiny import save_tiny_bert
    from pixelrag.models.tiny_seq2seq import save_tiny_seq2seq

    words = all_words()
    write_catalogue(folder / "new", "new", num_passages=passages, num_held_out=50, seed=0)
    save_tiny_bert(folder / "encoder", texts=[" ".join(words)], vocab_size=700, hidden_size=64)
    save_tiny_seq2seq(
        folder / "reader", "t5", texts=[" ".join(words)] * 4 + words, vocab_size=3000,
        hidden_size=64,
    )  # fmt: skip


def timed_run(world, payload: dict[str, Any]) -> list[tuple[float, bool]]:
    """Train; seconds of each step, and whether a refresh was under way at its beginning and end."""
    import torch

    from pixelrag.config.base import load
    from pixelrag.config.rag import RagConfig
    from pixelrag.train import loop, rag

    torch.set_num_threads(1)
    folder = Path(payload["folder"])
    taken: list[tuple[float, bool]] = []
    step = loop.Loop._step

    def timed(self, number: int):
        switch = self._task._knowledge.switch
        begun = switch.in_flight
        started = time.perf_counter()
        figures = step(self, number)
        seconds = time.perf_counter() - started
        if begun == switch.in_flight and number >= payload["warmup"]:
            taken.append((seconds, begun is not None))
        return figures

    loop.Loop._step = timed
    flags = [
        f"--output_dir={folder / 'run'}",
        f"--question_encoder.name_or_path={folder / 'encoder'}",
        f"--generator.name_or_path={folder / 'reader'}",
        f"--knowledge_base.source={folder / 'new' / 'passages.jsonl'}",
        f"--data.train={folder / 'new' / 'train.jsonl'}",
        "--generator.target_max_length=4",
        "--retrieval.k=8",
        f"--batch.per_device_batch_size={16 // world.world_size}",
        f"--optim.max_steps={payload['steps']}",
        f"--refresh.every_steps={payload['every']}",
        "--refresh.final_refresh=skip",
        f"--refresh.nice={payload['nice']}",
        "--index.factory=HNSW32",
        "--engine.device=cpu",
        f"--engine.name={payload['engine']}",
        "--logging.every_steps=1000",
        "--checkpoint.save_optimizer=false",
    ]
    rag.train(load(RagConfig, flags)[0], world)
    return taken


def measure_steps(ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Step times beside a refresh and alone, and their ratio."""
    from pixelrag.distributed.spawn import run_workers

    with tempfile.TemporaryDirectory() as folder:
        make_material(Path(folder), arguments.passages)
        payload = {
            "folder": folder, "steps": arguments.steps, "every": arguments.every, "nice": 19,
            "warmup": 5, "engine": "ddp" if ranks == 1 else "fsdp2",
        }  # fmt: skip
        taken = run_workers(
            "benchmarks.rag_refresh:timed_run", payload, nproc=ranks, timeout_seconds=1800
        )[0]
    beside, alone = ([s for s, refreshing in taken if refreshing is flag] for flag in (True, False))
    row = {"kind": "steps", "ranks": ranks, "beside": len(beside), "alone": len(alone)}
    if not beside or not alone:
        return row | {"problem": "no refresh overlapped, or none ended: change --steps or --every"}
    return row | {
        "beside_seconds": common.spread(beside),
        "alone_seconds": common.spread(alone),
        "ratio": round(float(np.median(beside) / np.median(alone)), 3),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the measurement and write it down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rag_refresh")
    parser.add_argument("--vectors", type=int, nargs="+", default=[10_000, 50_000])
    parser.add_argument("--dim", type=int, default=384, help="of the vectors (384)")
    parser.add_argument(
        "--ranks", type=int, nargs="*", default=[1, 2], help="runs to time steps of"
    )
    parser.add_argument("--steps", type=int, default=150, help="steps of a run (150)")
    parser.add_argument("--every", type=int, default=50, help="steps from refresh to refresh (50)")
    parser.add_argument("--passages", type=int, default=3000, help="in the knowledge base (3000)")
    parser.add_argument("--output", type=Path, help="JSONL file to write")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.memory_of:
        print(json.dumps(measure_memory(arguments.memory_of, arguments.vectors[0], arguments.dim)))
        return
    results = common.Results(arguments.output, 1, ["benchmarks.rag_refresh", *sys.argv[1:]])
    for ranks in arguments.ranks:
        results.add(measure_steps(ranks, arguments))
    for count in arguments.vectors:
        for kind in FACTORIES:
            results.add(measure_index(kind, count, arguments.dim))
    for kind in FACTORIES:
        flags = ["--memory-of", kind, "--vectors", arguments.vectors[-1], "--dim", arguments.dim]
        results.add(common.fresh_process("benchmarks.rag_refresh", flags))


if __name__ == "__main__":
    main()
