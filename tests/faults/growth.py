"""`python -m tests.faults.growth JOB STEPS`: whether a long run's memory grows with its steps.

One process that saves and logs, and renews its index where it has one. Printed is how much its own
memory (RssAnon) grows per 1,000 steps, in three parts of the run behind its first tenth.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.faults.jobs import arguments, make_material
from tests.faults.soak import own_memory
from tests.train import nursery

PARTS = ((0.1, 0.4), (0.4, 0.7), (0.7, 1.0))


def _step(metrics: Path) -> int:
    """Of the last line of metrics.jsonl; 0 while there is none."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def main() -> None:
    """Run, sample twice a second, print."""
    job, steps = sys.argv[1], int(sys.argv[2])
    nursery.start_server()
    with tempfile.TemporaryDirectory(prefix="pixelrag-growth-") as name:
        folder = Path(name)
        make_material(folder / "material", job)
        flags = [f"--optim.max_steps={steps}", "--checkpoint.every_steps=100"]
        flags += ["--logging.every_steps=10", f"--eval.every_steps={steps}"]
        if job == "rag":
            flags += ["--refresh.every_steps=100", "--refresh.deterministic_lag=20"]
        run = nursery.start(arguments(folder / "material", job, folder / "run", *flags))
        samples = []
        while run.workers[0].exitcode is None:
            if step := _step(folder / "run" / "metrics.jsonl"):
                with contextlib.suppress(OSError, IndexError):  # it has just ended
                    samples.append((step, own_memory(run.workers[0].pid) / 1024))
            time.sleep(0.5)
        run.wait().check()
    rows = np.array(samples, dtype=float)
    for first, last in PARTS:
        part = rows[(rows[:, 0] > first * steps) & (rows[:, 0] <= last * steps)]
        slope = 1000 * np.polyfit(part[:, 0], part[:, 1], 1)[0]
        level = part[:, 1].mean() / 1024
        told = f"{slope:+.0f} KiB per 1,000 steps, at {level:.1f} MiB ({len(part)} samples)"
        print(f"{job}, steps {first:.0%} to {last:.0%}: {told}")


if __name__ == "__main__":
    main()
