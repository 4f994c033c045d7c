"""Tokens a second of whole distillation steps, packed rows against one chat a row.

    python -m benchmarks.packing --output benchmarks/results/packing.jsonl

The job is `pixelrag distill` itself, from chats to optimizer step: SmolLM2-135M-Instruct teaches
a student of its own layers, on chats about the standard library. A chat has one turn or several,
their number drawn from a log-normal distribution: many short ones and a long tail, with a mean
under a third of a row. Both ways take the same number of rows at once; unpacked ones are padded to
the longest of a micro-batch, as usual. Only real tokens count, padding does not. Every run is a
process of its own, in an order that reverses from round to round, and a ratio is that of a round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import common
from pixelrag.demo.chats import build_chats
from pixelrag.demo.distill import GGUF, PACKAGE

WAYS = {"packed": "true", "unpacked": "false"}
FIGURES = {
    "tokens_per_second": "perf/tokens_per_second",
    "supervised_tokens_per_second": "perf/supervised_tokens_per_second",
    "step_seconds": "perf/step_seconds",
    "peak_gib": "mem/peak_gib",
    "fill": "data/fill",
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row-length", type=int, default=1024, help="tokens of a row (1024)")
    parser.add_argument("--rows", type=int, default=8, help="rows at once (8)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step (1)")
    parser.add_argument("--steps", type=int, default=4, help="packed steps, two to warm up (4)")
    parser.add_argument("--unpacked-steps", type=int, default=10, help="unpacked ones (10)")
    parser.add_argument("--layers", type=int, default=6, help="the student's layers (6)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way (2)")
    parser.add_argument("--threads", type=int, default=2, help="of the process (2)")
    parser.add_argument("--output", type=Path, help="JSONL file to write")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    options = parse(argv)
    command = ["benchmarks.packing", *(sys.argv[1:] if argv is None else argv)]
    results = common.Results(options.output, options.threads, command)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        train = Path(folder) / "train.jsonl"
        turns = long_tailed(build_chats(Path(folder) / "chats").train_path, train)
        results.add({"kind": "data", "chats": len(turns), "turns": Counter(turns)})
        for turn in range(options.rounds):
            names = list(WAYS) if turn % 2 == 0 else list(reversed(WAYS))
            for name in names:
                figures = _run(Path(folder) / f"{name}-{turn}", train, name, options)
                found[name].append(figures)
                results.add({"kind": "run", "round": turn, "way": name, **figures})
    rates = {name: [run["tokens_per_second"] for run in runs] for name, runs in found.items()}
    ratios = [a / b for a, b in zip(rates["packed"], rates["unpacked"], strict=True)]
    results.add(
        {
            "kind": "summary",
            "row_length": options.row_length,
            "rows": options.rows,
            **{f"{name}_tokens_per_second": statistics.median(rates[name]) for name in WAYS},
            "packed_over_unpacked": round(statistics.median(ratios), 3),
        }
    )
    return 0


def long_tailed(source: Path, target: Path) -> list[int]:
    """Join single questions and answers to chats of one turn or more; return their turns.

    Args:
        source: chats of one turn.
        target: the file to write.
    """
    draw = random.Random(25)
    rows = [json.loads(line)["messages"] for line in source.read_text("utf-8").splitlines()]
    turns: list[int] = []
    with target.open("w", encoding="utf-8") as file:
        while rows:
            taken = rows[: max(1, min(12, round(draw.lognormvariate(0.0, 1.2))))]
            del rows[: len(taken)]
            turns.append(len(taken))
            file.write(json.dumps({"messages": [m for turn in taken for m in turn]}) + "\n")
    return turns


def _run(output: Path, train: Path, way: str, options: argparse.Namespace) -> dict[str, Any]:
    model = {"name_or_path": f"package:{PACKAGE}", "gguf_file": GGUF}
    flags = [
        f"--{part}.{key}={value}" for part in ("student", "teacher") for key, value in model.items()
    ]
    flags += [
        f"--output_dir={output}", f"--student.num_layers={options.layers}",
        f"--data.train={train}", "--data.bad_rows=skip", f"--packing.enabled={WAYS[way]}",
        f"--packing.length={options.row_length}", "--loss.chunk_size=256",
        f"--batch.per_device_batch_size={options.rows}",
        f"--batch.gradient_accumulation_steps={options.accumulate}",
        f"--optim.max_steps={options.steps if way == 'packed' else options.unpacked_steps}",
        "--logging.every_steps=1",
        "--checkpoint.save_optimizer=false", "--engine.device=cpu",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pixelrag", "distill", *flags],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=common.environment_with_threads(options.threads),
    )
    if done.returncode != 0:
        raise RuntimeError(f"{way} ended with code {done.returncode}:\n{done.stderr[-4000:]}")
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    last = next(row for row in reversed(rows) if FIGURES["tokens_per_second"] in row)
    return {name: last[key] for name, key in FIGURES.items()}


if __name__ == "__main__":
    raise SystemExit(main())
