"""The RAG demo's figures, as lines to print and as numbers to keep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pixelrag.evaluate.bootstrap import paired_bootstrap

MEASURES = ("recall@1", "recall@5", "em", "f1")
_LABELS = {"em": "EM", "f1": "F1"}


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What the metrics of a run say.

    Attributes:
        before: held-out figures before the first step, if the run was told to measure them.
        live: held-out figures at the end, searching the generation that was in use then.
        generations: how many were swapped in after the first.
        waited: how many of the swaps the training waited for.
        oldest: age of the generation in use, in steps, where it was greatest.
        step_seconds: of a step, in the median over intervals that were logged.
    """

    before: dict[str, float] | None
    live: dict[str, float]
    generations: int
    waited: int
    oldest: int
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured of one seed's runs.

    Attributes:
        seed: of the collection and the runs.
        fresh: of each run, of each measure the value of every held-out question, with passages
            encoded and indexed by its models as they were at the end.
        runs: what each run's metrics say.
        seconds: each run took, its start included.
    """

    seed: int
    fresh: Mapping[str, Mapping[str, Sequence[float]]]
    runs: Mapping[str, RunFigures]
    seconds: Mapping[str, float]


def read_run(metrics: Path, *, waits: bool) -> RunFigures:
    """Read a run's `metrics.jsonl`.

    Args:
        metrics: the file.
        waits: whether the run was told to wait for its refreshes.
    """
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "index/generation" in row]
    measured = [row for row in rows if "eval/em" in row]
    numbers = [row["index/generation"] for row in steps]
    generations = len(set(numbers) - {1.0})
    seconds = [row["perf/step_seconds"] for row in steps if "perf/step_seconds" in row]
    first, last = (
        {name: row[f"eval/{name}"] for name in MEASURES} for row in (measured[0], measured[-1])
    )
    return RunFigures(
        before=first if measured[0]["step"] == 0 else None,
        live=last,
        generations=generations,
        waited=generations if waits else 0,
        oldest=int(max(row["index/age_steps"] for row in steps)),
        step_seconds=float(np.median(seconds)) if seconds else float("nan"),
    )


def read_measured(file: Path) -> dict[str, list[float]]:
    """Of each measure the value of every question, out of what `pixelrag eval --output` wrote."""
    # Here, so that --help needs no torch.
    from pixelrag.evaluate import compare

    per_query = compare.read_measured(file)["eval"].per_query
    return {name: list(per_query[name]) for name in MEASURES}


def rag_table(outcomes: Sequence[Outcome]) -> tuple[list[str], dict[str, Any]]:
    """Put the runs of all seeds into a table.

    Returns:
        Lines, with the paired 95 % bootstrap interval of each trained encoder's gain over the
        frozen one on the questions of all seeds, and the numbers.
    """
    header = "".join(f"{_LABELS.get(name, name):>10}" for name in MEASURES)
    lines = [f"{'held out, mean over seeds':30}{header}   swaps  waited  oldest  s/step"]
    starts = [run.before for o in outcomes for run in o.runs.values() if run.before is not None]
    before = _means(starts)
    lines.append(_line("before", before))
    results: dict[str, Any] = {"seeds": [o.seed for o in outcomes], "before": before, "runs": {}}
    for name in outcomes[0].runs:
        runs = [outcome.runs[name] for outcome in outcomes]
        fresh = _means([outcome.fresh[name] for outcome in outcomes])
        live = _means([run.live for run in runs])
        counts = "{:>8}{:>8}{:>8}{:>8.2f}".format(
            *(_span(getattr(run, what) for run in runs) for what in _COUNTS),
            np.mean([run.step_seconds for run in runs]),
        )
        lines.append(_line(f"{name}, index in use", live) + counts)
        lines.append(_line(f"{name}, fresh index", fresh))
        results["runs"][name] = {
            "live": live,
            "fresh": fresh,
            "fresh_by_seed": [_means([outcome.fresh[name]]) for outcome in outcomes],
            **{what: [getattr(run, what) for run in runs] for what in _COUNTS},
            "step_seconds": [run.step_seconds for run in runs],
            "seconds": [round(outcome.seconds[name], 1) for outcome in outcomes],
        }
    lines.append("")
    for name in outcomes[0].runs:
        if name != "frozen":
            text, numbers = _gain(outcomes, name)
            lines.append(text)
            results["runs"][name]["gain_over_frozen"] = numbers
    return lines, results


_COUNTS = ("generations", "waited", "oldest")


def _gain(outcomes: Sequence[Outcome], name: str) -> tuple[str, dict[str, Any]]:
    numbers: dict[str, Any] = {}
    shown: list[str] = []
    for measure in ("recall@1", "em"):
        frozen, trained = (
            np.concatenate([np.asarray(o.fresh[run][measure], float) for o in outcomes])
            for run in ("frozen", name)
        )
        gain = paired_bootstrap(frozen, trained, seed=0)
        numbers[measure] = {"mean": gain.mean, "interval": [gain.low, gain.high]}
        label = _LABELS.get(measure, measure)
        shown.append(f"{label} {gain.mean:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})")
    beyond = "beyond" if numbers["em"]["interval"][0] > 0 else "not beyond"
    text = f"{name} over frozen, fresh index, {len(trained)} questions: {', '.join(shown)}"
    return f"{text}: EM {beyond} its paired 95 % interval", numbers


def _means(values: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {m: float(np.mean([np.mean(one[m]) for one in values])) for m in MEASURES}


def _line(name: str, figures: Mapping[str, float]) -> str:
    return f"{name:30}" + "".join(f"{figures[m]:>10.3f}" for m in MEASURES)


def _span(numbers: Any) -> str:
    low, *_, high = sorted([*numbers] * 2)
    return str(low) if low == high else f"{low}-{high}"
