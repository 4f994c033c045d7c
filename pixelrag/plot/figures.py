"""Which charts there are, and what stands in each of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from pixelrag.charts import Chart, Line, Section, Table, line_chart
from pixelrag.plot.run import Run

_MOST_POINTS = 800
_Points = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, slots=True)
class _Group:
    """Figures that may share a chart: a pattern of names, what the axis shows, and how many of
    them it takes to tell something."""

    title: str
    pattern: str
    y: str
    log: bool = False
    least: int = 1


_SECTIONS: dict[str, tuple[_Group, ...]] = {
    "Learning": (
        _Group("Loss", r"(train|eval)/loss", "loss"),
        _Group("Cross entropy and divergence", r"(train|eval)/(ce|kd)_loss", "loss"),
        _Group(
            "Terms of the RAG loss", r"train/(answer|retriever|contrastive)_loss", "loss", least=2
        ),
        _Group("Accuracy", r"(train|eval)/accuracy|eval/agreement", "share"),
    ),
    "Held-out figures": (
        _Group("Retrieval", r"eval/.*(recall|mrr|ndcg|hit).*", "share"),
        _Group("Answers", r"eval/(em|f1)", "share"),
    ),
    "Speed and memory": (
        _Group("Tokens", r"perf/(supervised_)?tokens_per_second", "tokens a second"),
        _Group("Rows", r"perf/rows_per_second", "rows a second"),
        _Group("Step", r"perf/step_seconds", "seconds"),
        _Group("Share of the peak (MFU)", r"perf/mfu", "share"),
        _Group("Peak memory", r"mem/.*_gib", "GiB"),
        _Group("Stalls for checkpoints", r"checkpoint/stall_seconds", "seconds"),
    ),
    "Knowledge base": (
        _Group("Index lag: age of what is searched", r"index/age_steps", "steps"),
        _Group("Drift of probes", r"index/drift", "1 - cosine"),
        _Group("Generation in use", r"index/generation", "number"),
    ),
    "Optimizer": (
        _Group("Gradient norm, before clipping", r"train/grad_norm", "norm", log=True),
        _Group("Learning rate", r"train/lr(/.*)?", "rate"),
        _Group("Temperature", r"train/temperature", "temperature"),
    ),
}


def sections(runs: Sequence[Run]) -> list[Section]:
    """A table of the runs, and the charts of what they have logged, by subject."""
    note = "Tokens a second are the median of what was logged."
    found = [Section("Runs", [_table(runs), note, *_notes(runs)])]
    for title, groups in _SECTIONS.items():
        charts = [chart for group in groups for chart in _charts(group, runs)]
        if charts:
            found.append(Section(title, charts))
    return found


def _charts(group: _Group, runs: Sequence[Run]) -> Iterator[Chart]:
    """One for all figures of a run; of several runs, one for each figure."""
    logged = dict.fromkeys(name for run in runs for name in run.series)
    names = [name for name in logged if re.fullmatch(group.pattern, name)]
    names = [name for name in names if any(run.finite(name) for run in runs)]
    if len(names) < group.least:
        return
    if len(runs) == 1:
        lines = [line for name in names for line in _lines(name, name, runs)]
        title = group.title if len(names) > 1 else f"{group.title} ({names[0]})"
        yield _drawn(title, lines, group)
        return
    for name in names:
        if lines := _lines(name, None, runs):
            yield _drawn(f"{group.title} ({name})", lines, group)


def _drawn(title: str, lines: Sequence[Line], group: _Group) -> Chart:
    values = [y for line in lines for y in line.y if not math.isnan(y)]
    log = group.log and min(values) > 0
    return line_chart(title, lines, x="step", y=group.y, log_y=log)


def _lines(figure: str, label: str | None, runs: Sequence[Run]) -> list[Line]:
    return [
        Line(label or run.name, *_thinned(run.points(figure))) for run in runs if run.finite(figure)
    ]


def _thinned(points: tuple[list[int], list[float]]) -> _Points:
    """The points, or of many the lowest and highest of each stretch: what stands out stays."""
    steps, values = points
    if len(steps) <= _MOST_POINTS:
        return steps, values
    size = -(-len(steps) // (_MOST_POINTS // 2))
    kept: set[int] = {0, len(steps) - 1}
    for start in range(0, len(steps), size):
        stretch = range(start, min(start + size, len(steps)))
        finite = [index for index in stretch if math.isfinite(values[index])]
        if len(finite) < len(stretch):
            kept.update(index for index in stretch if index not in finite)
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    order = sorted(kept)
    return [steps[index] for index in order], [values[index] for index in order]


def _table(runs: Sequence[Run]) -> Table:
    best = [
        name
        for name in dict.fromkeys(name for run in runs for name in run.series)
        if re.fullmatch(r"eval/(loss|recall@1|recall@10|ndcg@10|em|f1|agreement)", name)
    ]
    head = ["run", "step", "last loss", *(f"best {name}" for name in best), "tokens/s", "peak GiB"]
    rows = []
    for run in runs:
        loss, tokens = run.finite("train/loss"), run.finite("perf/tokens_per_second")
        memory = run.finite("mem/peak_gib")
        rows.append([
            run.name, f"{run.last_step:,}", _number(loss[-1:], max),
            *(_number(run.finite(name), min if name == "eval/loss" else max) for name in best),
            f"{median(tokens):,.0f}" if tokens else "-", _number(memory, max),
        ])  # fmt: skip
    return Table(head, rows)


def _number(values: Sequence[float], choose: Callable[[Sequence[float]], float]) -> str:
    return f"{choose(values):.4g}" if values else "-"


def _notes(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.resumed:
            steps = ", ".join(f"{step:,}" for step in run.resumed)
            yield f"{run.name} went on from step {steps}; steps that were done again count once."
        bad = {name: sum(map(math.isnan, run.points(name)[1])) for name in run.series}
        if names := [f"{name} ({number} times)" for name, number in bad.items() if number]:
            yield f"{run.name}: not finite, and gaps in the charts: {', '.join(names)}."
