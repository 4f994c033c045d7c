"""Other implementations beside this one, on the same work, in one run.

gradcache  a whole step of GradCache over the same texts and model: sentence-transformers'
           CachedMultipleNegativesRankingLoss and the package gradcache
kd-loss    the distillation loss from final states and heads: Liger, TRL, and ways without a package
packing    rows of samples: TRL's pack_dataset

The first candidate is ours; every row has the ratio of our time to its own, within each round. All
gradients are compared before anything is timed: a candidate that does other work ends the run. What
is not installed is skipped; benchmarks/peers/README.md has the environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import torch

from pixelrag.bench import peers_gradcache, peers_kd, peers_packing
from pixelrag.bench.cases import Ready, Skipped, measure_in_turns
from pixelrag.bench.rows import Case, Row
from pixelrag.config.bench import PeersConfig

SUITE = "peers"
TASKS = {"gradcache": peers_gradcache, "kd-loss": peers_kd, "packing": peers_packing}


def groups(config: PeersConfig) -> list[list[Case]]:
    """Candidates by task; ours first."""
    return [
        [{"task": task, **case} for case in group]
        for task in config.work.tasks
        for group in TASKS[task].groups(config)
    ]


def measure(config: PeersConfig, cases: Sequence[Case]) -> Iterator[Row]:
    """Times in turns, memory alone."""
    return measure_in_turns(SUITE, prepare, config, cases, compare=True)


def prepare(
    config: PeersConfig, cases: Sequence[Case], device: torch.device
) -> list[Ready | Skipped]:
    """Candidates of one task whose package is here."""
    task = TASKS[str(cases[0]["task"])]
    missing = {
        name: package
        for case in cases
        if (package := task.NEEDS.get(name := str(case["candidate"])))
        and find_spec(package) is None
    }
    present = [case for case in cases if case["candidate"] not in missing]
    ready = iter(task.prepare(config, present, device)) if present else iter(())
    return [
        Skipped(f"{missing[str(case['candidate'])]} is not installed")
        if case["candidate"] in missing
        else next(ready)
        for case in cases
    ]
