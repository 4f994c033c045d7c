"""What the scripts share: their rows and files are those of `pixelrag bench`."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pixelrag.bench.command import line_of
from pixelrag.bench.machine import this_run
from pixelrag.bench.rows import Case, Row, write_rows
from pixelrag.bench.timing import Spread, Taken

RESULTS = Path(__file__).parent / "results"
# What a script's settings are not: where results go, and what it tells processes of its own.
_NO_SETTINGS = ("output", "worker", "memory_of", "folder")


class Results:
    """Rows of one run, printed and written as they come.

    Args:
        script: its module's name.
        options: its arguments; `output` is the folder to write to, None = only print.
        threads: torch's, of each process.
        suite: what the rows are called; None = as the script.
    """

    def __init__(
        self, script: str, options: Namespace, threads: int, suite: str | None = None
    ) -> None:
        settings = {k: v for k, v in vars(options).items() if k not in _NO_SETTINGS}
        text = json.dumps(settings, sort_keys=True, default=str)
        self._suite, self._folder = suite or script, options.output
        self._name = script if options.title is None else f"{script}-{options.title}"
        self._run = this_run(
            torch.device("cpu"), profile=options.title or "", threads=threads,
            command=" ".join(["python -m", f"benchmarks.{script}", *sys.argv[1:]]),
            config_hash=hashlib.sha256(text.encode()).hexdigest()[:12],
            load_average=os.getloadavg()[0],
        )  # fmt: skip
        self.rows: list[Row] = []

    def add(
        self,
        case: Case,
        taken: Taken | None = None,
        figures: Mapping[str, float] | None = None,
        **fields: Any,
    ) -> Row:
        """Add a case; `fields` are further ones of `Row`."""
        if taken is not None:
            spreads = {"seconds": Spread.of(taken.wall), "cpu_seconds": Spread.of(taken.cpu)}
            fields = {**spreads, "repeats": len(taken.wall), **fields}
        row = Row(self._suite, case, self._run, figures=dict(figures or {}), **fields)
        self.rows.append(row)
        print(line_of(row), flush=True)
        if self._folder is not None:
            write_rows(self._folder, self._name, self.rows)
        return row


def add_output(parser: Any) -> None:
    """The options of every script."""
    parser.add_argument("--output", type=Path, help="folder for the JSONL and CSV files")
    parser.add_argument("--title", help="what to call the files beside the script's own name")


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
