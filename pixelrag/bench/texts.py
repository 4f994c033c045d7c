"""Real texts that need no download: the running interpreter's standard library."""

from __future__ import annotations

import bisect
import json
import math
import random
import tempfile
from pathlib import Path

from pixelrag.demo.code_search import build_code_search
from pixelrag.demo.functions import read_library

Texts = tuple[list[str], list[str]]


def code_search_pairs(num_rows: int) -> Texts:
    """Queries and documents of the demo's task: docstring sentences, and the code they describe.

    Args:
        num_rows: how many; the set is repeated where it has fewer.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = build_code_search(Path(folder) / "set").train_path
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [rows[i % len(rows)] for i in range(num_rows)]
    return [row["query"] for row in rows], [row["passage"] for row in rows]


def long_tail_pairs(num_rows: int) -> Texts:
    """Whole docstrings, and the functions that they describe, most of them short and some long.

    Functions chosen so that the lengths of their sources follow a log-normal distribution (median
    220 characters, sigma 1); deterministic.

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


PAIRS = {"code-search": code_search_pairs, "long-tail": long_tail_pairs}
