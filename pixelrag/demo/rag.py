"""`pixelrag demo rag`: why a knowledge base must be encoded anew while its encoders learn.

A question encoder, a passage encoder and a generator learn an old catalogue, then answer questions
on a new one that tells its entries apart by words which the old one had as noise. They learn from
answers alone: with the passage encoder frozen, with the knowledge base renewed while the training
waits, and with it renewed beside the training.
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
from pixelrag.demo.commands import run
from pixelrag.demo.rag_report import Outcome, rag_table, read_run
from pixelrag.demo.rag_shift import ShiftSet, all_words, write_catalogue, write_pairs

STEPS = 300
EVERY_STEPS = 50
PASSAGES = 1600
HELD_OUT = 300
HIDDEN_SIZE = 64
K = 8
OVER_RETRIEVE = 32
PAIR_BATCH = 64
PAIR_STEPS = 300
READER_STEPS = 800
READER_BATCH = 32
READER_PASSAGES = 3200
_PLACES = ("models", "pairs", "old", "run-pairs", "run-reader")

RUNS = {
    "frozen": ["--train", "[question, generator]"],
    "waiting": [
        "--refresh.every_steps", str(EVERY_STEPS), "--refresh.deterministic_lag", "0",
    ],
    "beside": ["--refresh.every_steps", str(EVERY_STEPS)],
}  # fmt: skip
"""Names of the three runs, and what each sets beyond the common configuration."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the demo's own options."""
    parser = argparse.ArgumentParser(prog="pixelrag demo rag", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo-rag"),
        help="folder for data, runs and results; emptied first (default runs/demo-rag)",
    )  # fmt: skip
    numbers = {
        "seeds": (1, "new catalogues, each with its three runs"),
        "nproc": (1, "processes of a run; the rest of the cores is for the refresh"),
        "steps": (STEPS, "steps of each run"),
        "passages": (PASSAGES, "entries of a new catalogue"),
        "held-out": (HELD_OUT, "questions that are not trained on"),
        "pair-steps": (PAIR_STEPS, "steps of the encoders on the old catalogue"),
        "reader-steps": (READER_STEPS, "steps of the generator on the old catalogue"),
    }
    for name, (default, meaning) in numbers.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{meaning} (default {default})"
        )
    options = parser.parse_args(list(argv))
    for name in numbers:
        value = getattr(options, name.replace("-", "_"))
        if value < 1:
            parser.error(f"argument --{name}: got {value}, expected at least 1")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the demo; returns the exit code."""
    options = parse(argv)
    started = time.monotonic()
    # Models this small gain nothing from a second thread, and the refresh beside needs the core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = options.output
    for name in (*_PLACES, *(f"seed-{seed}" for seed in range(options.seeds))):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    say("Encoders and generator move to a catalogue that names things in another way.")
    models = _learn_the_old(options)
    outcomes = [_one_seed(options, models, seed) for seed in range(options.seeds)]
    lines, results = rag_table(outcomes)
    say()
    for line in lines:
        say(line)
    results["seconds"] = round(time.monotonic() - started, 1)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    say()
    say(f"The demo took {results['seconds']:.0f} s. Everything lies in {folder}:")
    say("  results.json   the figures above; *.yaml the configurations")
    say("  seed-*/new     the new catalogue; seed-*/frozen, waiting, beside the three runs:")
    say("                 metrics.jsonl, last/ (the models), index/gen-* (the knowledge base)")
    say("  seed-*/after-*/answers.html   questions, answers and the passages behind them")
    return 0


def _learn_the_old(options: argparse.Namespace) -> dict[str, str]:
    """Train encoder and generator on the old catalogue; return their folders."""
    from pixelrag.models.tiny import tiny_bert_config
    from pixelrag.models.tiny_seq2seq import save_tiny_seq2seq
    from pixelrag.models.tiny_tokenizer import wordpiece_tokenizer

    folder, words = options.output, " ".join(all_words())
    encoder = folder / "models" / "encoder"
    tokenizer = wordpiece_tokenizer([words], vocab_size=700, max_length=32)
    config = tiny_bert_config(vocab_size=len(tokenizer), hidden_size=HIDDEN_SIZE, max_length=32)
    # Learns from random weights, which only small ones do quickly.
    config.initializer_range = 0.02
    config.save_pretrained(encoder)
    tokenizer.save_pretrained(encoder)
    generator = save_tiny_seq2seq(
        folder / "models" / "generator", "t5", texts=[words] * 4 + all_words(), vocab_size=3000,
        hidden_size=HIDDEN_SIZE,
    )  # fmt: skip
    pairs = write_pairs(folder / "pairs", options.pair_steps * PAIR_BATCH, seed=0)
    say("1. On the old catalogue the encoder learns which entry a question is about:")
    run(["contrastive", "--config", _pairs_config(options, encoder, pairs)], nproc=options.nproc)
    trained = {"encoder": folder / "run-pairs" / "last", "generator": generator}
    old = write_catalogue(
        folder / "old", "old", num_passages=READER_PASSAGES, num_held_out=HELD_OUT, seed=0
    )
    say()
    say("2. The generator learns to read the answer out of the entry that was found:")
    values = _config(folder / "run-reader", trained, old)
    # Fewer answers a step, and it learns which words but not their order.
    values["batch"] |= {"per_device_batch_size": -(-READER_BATCH // options.nproc)}
    values |= {
        "train": ["generator"],
        "retrieval": {"k": 1, "batch_size": 256},
        "optim": {"learning_rate": 2e-3, "max_steps": options.reader_steps},
        "logging": {"every_steps": 50},
    }
    run(["rag", "--config", _write(folder / "reader.yaml", values)], nproc=options.nproc)
    generator = folder / "run-reader" / "last" / "generator"
    return {"encoder": str(trained["encoder"]), "generator": str(generator)}


def _one_seed(options: argparse.Namespace, models: dict[str, str], seed: int) -> Outcome:
    """Three runs on one new catalogue."""
    from pixelrag.demo.rag_measure import measure

    folder = options.output / f"seed-{seed}"
    new = write_catalogue(
        folder / "new", "new", num_passages=options.passages, num_held_out=options.held_out,
        seed=seed,
    )  # fmt: skip
    say()
    say(
        f"3. A new catalogue (seed {seed}): {new.num_passages} entries, {new.num_train} questions "
        f"to train on, {new.num_held_out} held out"
    )
    values = _config(folder / "before", models, new) | {
        "seed": seed,
        "optim": {"learning_rate": 5e-4, "max_steps": options.steps},
    }
    config = _write(folder / "rag.yaml", values)
    before = measure(Path(config), folder / "before")
    seconds, after, runs = {}, {}, {}
    for name, flags in RUNS.items():
        say()
        place = folder / name
        words = ["rag", "--config", config, "--output_dir", str(place), *flags]
        seconds[name] = run(words, nproc=options.nproc)
        runs[name] = read_run(place / "metrics.jsonl", waits="--refresh.deterministic_lag" in flags)
        after[name] = measure(Path(config), folder / f"after-{name}", models=place / "last")
    return Outcome(seed, before, after, runs, seconds)


def _pairs_config(options: argparse.Namespace, encoder: Path, pairs: Path) -> str:
    values = {
        "output_dir": str(options.output / "run-pairs"),
        "model": {
            "name_or_path": str(encoder),
            "random_init": True,
            "query_max_length": 16,
            "document_max_length": 24,
        },
        "data": {"train": [str(pairs)]},
        "loss": {"temperature": 0.05, "learnable_temperature": False},
        "batch": {
            "per_device_batch_size": -(-PAIR_BATCH // options.nproc),
            "chunk_size": PAIR_BATCH,
        },
        "optim": {"learning_rate": 2e-3, "max_steps": options.pair_steps},
        "logging": {"every_steps": 50},
        "checkpoint": {"save_optimizer": False},
    }
    return _write(options.output / "pairs.yaml", values)


def _config(output: Path, models: dict[str, Any], data: ShiftSet) -> dict[str, Any]:
    """What all RAG runs of the demo have in common."""
    encoder = {
        "name_or_path": str(models["encoder"]),
        "query_max_length": 16,
        "document_max_length": 24,
    }
    return {
        "output_dir": str(output),
        "question_encoder": encoder,
        "document_encoder": encoder,
        "generator": {
            "name_or_path": str(models["generator"]),
            "template": "{question} {passage}",
            "prompt_max_length": 32,
            "target_max_length": 4,
        },
        "knowledge_base": {"source": str(data.passages)},
        "data": {"train": [str(data.train)], "eval": [str(data.held_out)]},
        # Re-ranked by the encoders as they are: what an old index finds is put in order.
        "retrieval": {"k": K, "over_retrieve": OVER_RETRIEVE, "batch_size": 256},
        "loss": {"temperature": 0.05},
        "index": {"factory": "Flat"},
        "refresh": {"batch_size": 256, "nice": 0},
        "batch": {
            "per_device_batch_size": 16,
            "question_chunk_size": 16,
            "document_chunk_size": 128,
            "generator_chunk_size": 128,
        },
        "eval": {"batch_size": 256},
        "logging": {"every_steps": 10},
        "checkpoint": {"save_optimizer": False},
    }


def _write(path: Path, values: dict[str, Any]) -> str:
    path.write_text(write_yaml(values), encoding="utf-8")
    return str(path)
