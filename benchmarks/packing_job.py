"""`pixelrag distill` as `benchmarks.packing` measures it.

    python -m benchmarks.packing_job [--full-rows] FLAGS OF PIXELRAG DISTILL

Rates count this process's processor seconds, from the first step on, so that other work on the
machine does not show. With --full-rows every row is padded to the length that a row may have.
"""

from __future__ import annotations

import sys
import time
from functools import partial

from pixelrag import cli
from pixelrag.data.packed_batch import PackedCollator
from pixelrag.train import distill, loop
from pixelrag.train.metrics import Throughput

FULL_ROWS = "--full-rows"


def main(argv: list[str]) -> int:
    """Run the job; returns the exit code."""
    loop.Throughput = partial(Throughput, skip=0, window=10_000, clock=time.process_time)
    if FULL_ROWS in argv:
        distill.PackedCollator = _full_rows
    return cli.main(["distill", *(flag for flag in argv if flag != FULL_ROWS)])


def _full_rows(plan, pad_id: int, *, fixed_width: bool) -> PackedCollator:
    return PackedCollator(plan, pad_id, fixed_width=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
