"""Tokens a second of whole distillation steps, packed rows against one chat a row.

    python -m benchmarks.packing --title 4x1536 --output benchmarks/results

The job is `pixelrag distill` itself, from chats to optimizer step: SmolLM2-135M-Instruct teaches
a student of its own layers, on chats about the standard library. A chat has one turn or several,
their number drawn from a log-normal distribution: many short ones and a long tail, with a mean
under a third of a row. Of these a sample is taken, evenly over their lengths, and every way trains
on all of it once, with as many rows at once:

packed       rows filled with chats
unpacked     a chat a row, padded to the longest of its micro-batch; otherwise as packed: no head
             sees padding
plain        the same rows as scripts without packing compute them: attention over whole rows, all
             of the logits of both models
plain-full   plain, with every row padded to the row length (`padding="max_length"`); a few steps
             only, as each costs the same

Only real tokens count, padding does not. Every run is a process of its own, and a second is one of
its processor seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import common
from benchmarks.packing_job import FULL_ROWS
from pixelrag.demo.chats import build_chats
from pixelrag.demo.distill import GGUF, PACKAGE

_UNPACKED = ["--packing.enabled=false"]
_PLAIN = [
    *_UNPACKED, "--loss.implementation=logits", "--student.attention=sdpa",
    "--teacher.attention=sdpa",
]  # fmt: skip
WAYS = {
    "packed": [],
    "unpacked": _UNPACKED,
    "plain": _PLAIN,
    "plain-full": [FULL_ROWS, *_PLAIN],
}
FIGURES = {
    "tokens_per_second": "perf/tokens_per_second",
    "step_seconds": "perf/step_seconds",
    "peak_gib": "mem/peak_gib",
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row-length", type=int, default=1536, help="tokens of a row (1536)")
    parser.add_argument("--rows", type=int, default=4, help="rows at once (4)")
    parser.add_argument("--chats", type=int, default=40, help="chats to train on (40)")
    parser.add_argument("--full-steps", type=int, default=1, help="steps of plain-full (1)")
    parser.add_argument("--layers", type=int, default=6, help="the student's layers (6)")
    parser.add_argument("--threads", type=int, default=1, help="of the process (1)")
    common.add_output(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    options = parse(argv)
    results = common.Results("packing", options, options.threads, suite="packing_chats")
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        train = Path(folder) / "train.jsonl"
        long_tailed(build_chats(Path(folder) / "chats").train_path, train)
        spread(train, options.chats)
        for way in WAYS:
            figures = found[way] = _run(Path(folder) / way, train, way, options)
            if way == "plain-full":
                # Its few steps cost what all would cost; the tokens are those of all steps.
                tokens = found["unpacked"]["tokens_per_second"] * found["unpacked"]["step_seconds"]
                figures["tokens_per_second"] = tokens / figures["step_seconds"]
    packed = found["packed"]["tokens_per_second"]
    for way, figures in found.items():
        rate, peak = figures.pop("tokens_per_second"), figures.pop("peak_gib")
        case = {"way": way, "rows": options.rows, "row_length": options.row_length}
        results.add(
            case, figures={**figures, "packed_over_this": round(packed / rate, 3)},
            tokens_per_second=float(f"{rate:.4g}"), peak_mib=round(1024 * peak),
        )  # fmt: skip
    return 0


def spread(path: Path, number: int) -> int:
    """Keep so many of a file's rows, evenly over their lengths; return how many there were."""
    rows = sorted(path.read_text("utf-8").splitlines(), key=lambda row: (len(row), row))
    middles = [(2 * i + 1) * len(rows) // (2 * number) for i in range(number)]
    path.write_text("".join(rows[i] + "\n" for i in middles), encoding="utf-8")
    return len(rows)


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


def _run(output: Path, train: Path, way: str, options: argparse.Namespace) -> dict[str, float]:
    model = {"name_or_path": f"package:{PACKAGE}", "gguf_file": GGUF}
    flags = [
        f"--{part}.{key}={value}" for part in ("student", "teacher") for key, value in model.items()
    ]
    full = way == "plain-full"
    flags += [
        f"--output_dir={output}", f"--student.num_layers={options.layers}",
        f"--data.train={train}", "--data.bad_rows=skip", f"--packing.length={options.row_length}",
        "--loss.chunk_size=256", f"--batch.per_device_batch_size={options.rows}",
        "--batch.gradient_accumulation_steps=1", "--logging.every_steps=1",
        "--checkpoint.save_optimizer=false", "--engine.device=cpu",
        f"--optim.max_steps={options.full_steps}" if full else "--optim.num_epochs=1",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.packing_job", *WAYS[way], *flags],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=common.environment_with_threads(options.threads),
    )
    if done.returncode != 0:
        raise RuntimeError(f"{way} ended with code {done.returncode}:\n{done.stderr[-4000:]}")
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    last = next(row for row in reversed(rows) if "perf/tokens_per_second" in row)
    return {name: last[key] for name, key in FIGURES.items()}


if __name__ == "__main__":
    raise SystemExit(main())
