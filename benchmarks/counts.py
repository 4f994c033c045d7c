"""What a step of each job costs on each engine, in counts that no machine's speed changes.

    python -m benchmarks.counts            compare with benchmarks/counts.json
    python -m benchmarks.counts --write    record what is found, after a change that is meant

Counted are collectives and the bytes that they carry, floating-point operations, allocations and
operations launched, in the planner's simulation of two ranks (`docs/plan.md`) and of tiny models.
The first three must be equal. The last two belong to the versions of the libraries that the file
names: with those they may be off by 3 %, with others they are not compared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from transformers import BertConfig, Qwen3Config, T5Config

from pixelrag.config import jobs
from pixelrag.config.base import JobConfig, load
from pixelrag.plan.prediction import Prediction, predict
from pixelrag.plan.workload import Lengths

RECORD = Path(__file__).with_name("counts.json")
JOBS = ("contrastive", "distill", "rag")
ENGINES = ("ddp", "zero2", "zero3", "fsdp2")
WORLD_SIZE = 2
TOLERANCE = 0.03
_VERSIONED = ("allocations", "launches")
_REMEDY = "if this is meant, record it: python -m benchmarks.counts --write"


class Case(NamedTuple):
    """A job on an engine, as `pixelrag JOB` would be told."""

    job: str
    arguments: list[str]
    lengths: dict[str, Any]

    def config(self) -> JobConfig:
        """Its configuration."""
        return load(jobs.config_class(self.job), self.arguments)[0]

    def predicted(self, world_size: int = WORLD_SIZE) -> Prediction:
        """What a rank does and holds in a step."""
        return predict(self.config(), world_size, Lengths(**self.lengths))


def case_of(folder: Path, job: str, engine: str) -> Case:
    """One case; models' configurations and whatever else must be there are put into ``folder``."""
    models = {
        "bert": BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
            vocab_size=1000,
        ),
        "student": _qwen(64),
        "teacher": _qwen(96),
        "reader": T5Config(
            d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, vocab_size=1000,
            decoder_start_token_id=0,
        ),
    }  # fmt: skip
    for name, config in models.items():
        if not (folder / name).exists():
            config.save_pretrained(folder / name)
    rows = folder / "rows.jsonl"
    rows.touch()
    arguments, lengths = {
        "contrastive": (
            [
                f"--model.name_or_path={folder}/bert", "--batch.per_device_batch_size=32",
                "--batch.chunk_size=16",
            ],
            {"query": 16, "document": 64},
        ),
        "distill": (
            [
                f"--student.name_or_path={folder}/student",
                f"--teacher.name_or_path={folder}/teacher", "--packing.length=256",
                "--batch.per_device_batch_size=2", "--batch.gradient_accumulation_steps=2",
                "--loss.chunk_size=64",
            ],
            {"document": 32, "supervised": 0.5},
        ),
        "rag": (
            [
                f"--question_encoder.name_or_path={folder}/bert",
                f"--generator.name_or_path={folder}/reader", f"--knowledge_base.source={rows}",
                "--batch.per_device_batch_size=4", "--retrieval.k=2",
                "--generator.prompt_max_length=64", "--generator.target_max_length=8",
                "--batch.generator_chunk_size=4",
            ],
            {"query": 16, "document": 64},
        ),
    }[job]  # fmt: skip
    shared = [
        f"--output_dir={folder}/run", f"--data.train={rows}", "--optim.max_steps=2",
        f"--engine.name={engine}", "--engine.device=cpu", "--engine.grad_sync=deferred",
    ]  # fmt: skip
    return Case(job, [*arguments, *shared], lengths)


def _qwen(width: int) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=width, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=128, vocab_size=2000,
    )  # fmt: skip


def counts_of(found: Prediction) -> dict[str, int]:
    """What is recorded of a case, by name."""
    calls = {f"{kind} calls": number for kind, number in found.calls.items()}
    sizes = {f"{kind} bytes": number for kind, number in found.bytes.items()}
    return calls | sizes | {name: getattr(found, name) for name in ("flops", *_VERSIONED)}


def versions() -> dict[str, str]:
    """Of the libraries that decide how an operation is carried out."""
    return {name: version(name) for name in ("torch", "transformers", "deepspeed", "peft")}


def differences(
    name: str, recorded: Mapping[str, int], found: Mapping[str, int], *, same_versions: bool
) -> Iterator[str]:
    """Say of each quantity that is not as recorded what it was and what it is."""
    for quantity in sorted(recorded.keys() | found.keys()):
        was, now = recorded.get(quantity, 0), found.get(quantity, 0)
        varies = quantity in _VERSIONED
        if varies and (not same_versions or abs(now - was) <= TOLERANCE * was):
            continue
        if now != was:
            yield f"{name}: {quantity}: was {was:,}, is {now:,}"


def check(name: str, found: Prediction) -> list[str]:
    """Compare one case with the record; what is wrong, in words."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if name not in record["cases"]:
        return [f"{name}: not recorded; {_REMEDY}"]
    same = record["versions"] == versions()
    lines = list(differences(name, record["cases"][name], counts_of(found), same_versions=same))
    if lines and not same:
        lines.append(
            f"(recorded with {record['versions']}, found with {versions()}: allocations and "
            "launches are not compared)"
        )
    return [*lines, _REMEDY] if lines else []


def main() -> int:
    """Compare or record all cases; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="record what is found")
    write = parser.parse_args().write
    cases, wrong = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for job in JOBS:
            for engine in ENGINES:
                name, found = f"{job} {engine}", case_of(Path(folder), job, engine).predicted()
                cases[name] = counts_of(found)
                wrong += [] if write else check(name, found)
    if write:
        record = {"versions": versions(), "cases": cases}
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print("\n".join(wrong) or f"{len(cases)} cases {'recorded' if write else 'are as recorded'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
