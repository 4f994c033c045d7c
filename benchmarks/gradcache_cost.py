"""What GradCache costs in time, and what memory it saves, beside the plain full-batch step.

    python -m benchmarks.gradcache_cost

Five ways to compute a gradient, each followed by clipping and AdamW:

plain       the whole batch at once: one forward with graph, one backward
gradcache   the same gradient in chunks: forward without graph, forward with graph, backward
half-kept   the same with `batch.replay`'s kept graphs: half of the chunks run forward once only
kept        the same where every chunk does (`batch.replay: none`)
chunks      forward and backward chunk by chunk from a gradient given at the start; not a training
            step, but GradCache's work without its first pass

With a backward as dear as two forwards, GradCache over `chunks` is (1 + 1 + 2) / (1 + 2) = 4/3 in
theory. All rows have the same number of tokens, so that no way pads more than another. Times are
taken in turns in one process; each memory figure is the peak of a fresh process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from pixelrag.distributed.env import process_group
from pixelrag.engine import Engine
from pixelrag.gradcache import gradcache_step, split_batch
from pixelrag.gradcache.keep import Keeper
from pixelrag.losses.contrastive import Objective, contrastive_loss, whole_batch
from pixelrag.losses.temperature import scale_from_log
from pixelrag.models.biencoder import BiEncoder

WAYS = ("plain", "gradcache", "half-kept", "kept", "chunks")
Batch = dict[str, torch.Tensor]


def equal_rows(module: BiEncoder, num_rows: int, tokens: int) -> Batch:
    """Rows of ``tokens`` random tokens each, int64 [num_rows, tokens]."""
    vocabulary = module.encoder.base_model.config.vocab_size
    generator = torch.Generator().manual_seed(num_rows)
    shape = (num_rows, tokens)
    return {
        "input_ids": torch.randint(vocabulary, shape, generator=generator),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
    }


def step_of(way: str, engine: Engine, batch: int, chunk: int, tokens: int) -> Callable[[], None]:
    """One whole step of the given way over ``batch`` queries and as many documents."""
    half = -(-batch // chunk)  # of the queries' and documents' chunks together
    run = {
        "plain": _plain,
        "gradcache": _gradcache,
        "half-kept": partial(_gradcache, keeper=Keeper(half)),
        "kept": partial(_gradcache, keeper=Keeper("none")),
        "chunks": _chunks,
    }[way]
    queries, documents = (equal_rows(engine.module, batch, tokens) for _ in range(2))

    def step() -> None:
        run(engine, queries, documents, chunk)
        engine.step(common.MAX_NORM)

    return step


def _gradcache(
    engine: Engine, queries: Batch, documents: Batch, chunk: int, keeper: Keeper | None = None
) -> None:
    positive_B = torch.arange(len(queries["attention_mask"]))
    chunks = split_batch(queries, chunk), split_batch(documents, chunk)
    gradcache_step(engine, *chunks, positive_B, keeper=keeper)


def _plain(engine: Engine, queries: Batch, documents: Batch, chunk: int) -> None:
    query_BD, _ = engine("query", **queries)
    document_BD, log_scale = engine("document", **documents)
    rows = len(query_BD)
    batch = whole_batch(query_BD, document_BD, torch.arange(rows))
    result = contrastive_loss(Objective(), batch, scale_from_log(log_scale), num_queries=rows)
    engine.backward(result.loss, last=True)


def _chunks(engine: Engine, queries: Batch, documents: Batch, chunk: int) -> None:
    sides = [("query", part) for part in split_batch(queries, chunk)]
    sides += [("document", part) for part in split_batch(documents, chunk)]
    for index, (role, part) in enumerate(sides):
        embedding_BD, _ = engine(role, **part)
        engine.backward(embedding_BD.sum(), last=index == len(sides) - 1)


def measure_memory(way: str, batch: int, chunk: int, tokens: int, model: str) -> dict[str, Any]:
    """Peak of this process over a step, above what it held when it was ready to begin."""
    module, _ = common.load_biencoder(tokens, model)
    engine = common.ddp_engine(module)
    base = common.resident_mib()
    # A step over one chunk makes AdamW's state, which every later step has beside its batch.
    step_of(way, engine, chunk, chunk, tokens)()
    common.reset_peak()
    step_of(way, engine, batch, chunk, tokens)()
    peak = common.peak_mib()
    return {
        "kind": "memory",
        "way": way,
        "batch": batch,
        "base_mib": round(base),
        "peak_mib": round(peak),
        "above_base_mib": round(peak - base),
    }


def measure_time(
    batch: int, chunk: int, tokens: int, model: str, *, rounds: int, warmup: int
) -> list[dict[str, Any]]:
    """Times of all ways in turns, GradCache's ratio to each, and each one's to the plain step."""
    module, _ = common.load_biencoder(tokens, model)
    engine = common.ddp_engine(module)
    taken = common.interleaved(
        {way: step_of(way, engine, batch, chunk, tokens) for way in WAYS},
        rounds=rounds,
        warmup=warmup,
    )
    return [
        {
            "kind": "time",
            "way": way,
            "batch": batch,
            "seconds": common.spread(took.wall),
            "cpu_seconds": common.spread(took.cpu),
            "gradcache_over_this": common.ratios(taken["gradcache"], took),
            "over_plain": common.ratios(took, taken["plain"]),
            "rounds": rounds,
        }
        for way, took in taken.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the measurement and write it down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradcache_cost")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument(
        "--plain-up-to", type=int, default=256, help="largest batch that keeps graphs"
    )
    parser.add_argument("--time-batch", type=int, default=64, help="batch whose steps are timed")
    parser.add_argument("--chunk", type=int, default=16, help="rows of a chunk")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of every row")
    parser.add_argument("--rounds", type=int, default=7, help="measured steps of each way")
    parser.add_argument("--warmup", type=int, default=1, help="steps before those")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--model", default=common.MODEL, help="as model.name_or_path")
    parser.add_argument("--output", type=Path, help="JSONL file to write")
    parser.add_argument("--memory-of", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    fixed = arguments.chunk, arguments.tokens, arguments.model
    with process_group("cpu"):
        if arguments.memory_of:
            print(json.dumps(measure_memory(arguments.memory_of, arguments.batches[0], *fixed)))
            return
        command = ["benchmarks.gradcache_cost", *sys.argv[1:]]
        results = common.Results(arguments.output, arguments.threads, command)
        results.add({"kind": "workload", "chunk": arguments.chunk, "tokens": arguments.tokens})
        for row in measure_time(
            arguments.time_batch, *fixed, rounds=arguments.rounds, warmup=arguments.warmup
        ):
            results.add(row)
    for way in ("gradcache", "half-kept", "kept", "plain"):
        for batch in arguments.batches:
            if way != "gradcache" and batch > arguments.plain_up_to:
                continue
            options = ["--memory-of", way, "--batches", batch, "--chunk", arguments.chunk]
            options += ["--tokens", arguments.tokens, "--threads", arguments.threads]
            options += ["--model", arguments.model]
            results.add(common.fresh_process("benchmarks.gradcache_cost", options))


if __name__ == "__main__":
    main()
