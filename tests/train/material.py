"""Tiny data, models and configurations for the training tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.torch import load_file

ENGINES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")
_NOUNS = ("file", "list", "number", "string", "table", "server", "socket", "thread", "clock")
_VERBS = ("open", "sort", "parse", "close", "merge")


def text_rows(count: int, *, negatives: int | None = None, first: int = 0) -> list[dict[str, Any]]:
    """Rows whose queries and passages share words; lengths differ from row to row.

    Args:
        count: rows.
        negatives: hard negatives of each; None = 0, 1, 2, 0, ... in turn.
        first: number of the first row; other numbers give other rows.
    """
    rows = []
    for i in range(first, first + count):
        noun, verb = _NOUNS[i % len(_NOUNS)], _VERBS[i % len(_VERBS)]
        filler = " ".join(_NOUNS[(i * 7 + k) % len(_NOUNS)] for k in range(i % 4))
        row: dict[str, Any] = {
            "query": f"how to {verb} a {noun} {i}",
            "passage": f"the call {verb}_{noun} does it, number {i} {filler}".strip(),
        }
        many = i % 3 if negatives is None else negatives
        if many:
            row["neg_passages"] = [
                f"{_VERBS[(i + k + 1) % len(_VERBS)]} the {noun} {i} {k}" for k in range(many)
            ]
        rows.append(row)
    return rows


def image_rows(folder: Path, count: int, *, first: int = 0) -> list[dict[str, Any]]:
    """Rows that ask for a picture of a colour, with text and pictures among their negatives."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(first, first + count):
        pixels = np.random.default_rng(i).integers(0, 255, (64, 32 * (1 + i % 3), 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
        row: dict[str, Any] = {"query": f"a picture of tile {i}", "chunk_path": f"tiles/{i}.png"}
        if i > first and i % 2:
            row["neg_chunk_paths"] = [f"tiles/{i - 1}.png"]
        rows.append(row)
    return rows


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write rows, one JSON object a line; return the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def merged(base: Mapping[str, Any], *overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings laid over each other; `None` keeps its meaning of null."""
    result = {k: dict(v) if isinstance(v, Mapping) else v for k, v in base.items()}
    for override in overrides:
        for key, value in override.items():
            if isinstance(value, Mapping):
                result[key] = {**result.get(key, {}), **value}
            else:
                result[key] = value
    return result


def command(folder: Path, config: Mapping[str, Any], name: str = "contrastive") -> list[str]:
    """The command line that runs `config`, written to a file beside its output folder."""
    path = folder / f"{Path(config['output_dir']).name}.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return [name, "--config", str(path)]


def lines_of(output: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl, without what a clock or the memory decides."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in record.items() if not k.startswith(("perf/", "mem/", "checkpoint/"))}
        for record in records
    ]


def series(output: Path, name: str) -> list[float]:
    """One figure over the run."""
    return [record[name] for record in lines_of(output) if name in record]


def weights_of(folder: Path, kind: str = "model") -> dict[str, Any]:
    """All tensors of a checkpoint or export, of however many parts."""
    files = sorted(folder.glob(f"{kind}*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_equal_runs(run: Path, straight: Path) -> None:
    """Two runs of 6 steps left the same figures, weights and states, in every bit."""
    assert lines_of(run) == lines_of(straight)
    for name in ("checkpoint-6", "last", "best"):
        mine, theirs = weights_of(run / name), weights_of(straight / name)
        assert mine.keys() == theirs.keys()
        unlike = [key for key in mine if not mine[key].equal(theirs[key])]
        assert not unlike, f"{name}: {unlike}"
    for kind in ("optimizer", "ema"):
        if not list((straight / "checkpoint-6").glob(f"{kind}*")):
            continue
        mine, theirs = (weights_of(f / "checkpoint-6", kind) for f in (run, straight))
        assert all(mine[key].equal(theirs[key]) for key in theirs)
        assert len(mine) == len(theirs)
    states = [json.loads((f / "checkpoint-6" / "state.json").read_text()) for f in (run, straight)]
    assert states[0] == states[1]
