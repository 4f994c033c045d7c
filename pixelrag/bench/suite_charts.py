"""What a suite's rows look like as charts, and how to read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from pixelrag.bench.rows import Row, Value, known
from pixelrag.charts import Bars, Chart, Line, bar_chart, line_chart
from pixelrag.errors import DataError

Rows = Sequence[Row]


def charts_of(suite: str, rows: Rows) -> list[Chart]:
    """Charts of the rows of one suite; rows that were skipped are in none.

    Raises:
        DataError: rows lack what those of the suite have.
    """
    measured = [row for row in rows if not row.skipped]
    try:
        return CHARTS[suite](measured) if suite in CHARTS and measured else []
    except KeyError as error:
        raise DataError(f"a row of the suite {suite} lacks {error}, which its rows have") from error


def by(rows: Rows, *keys: str) -> dict[tuple[Value, ...], list[Row]]:
    """Rows by the values of some keys of their cases, in the order of their first mention."""
    found: dict[tuple[Value, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.case.get(key, "") for key in keys), []).append(row)
    return found


def kd_chunk(rows: Rows) -> list[Chart]:
    """Speed and memory by chunk size; the size that auto takes is marked."""
    charts = []
    for (vocab, dtype), some in by(rows, "vocab", "dtype").items():
        where = f"{vocab:,} rows of the head, {dtype}"
        lines = [_chunk_line(str(loss), ones, _rate) for (loss,), ones in by(some, "loss").items()]
        bounds = [known(row.tokens) / row.bound_seconds for row in some if row.bound_seconds]
        if bounds:
            ends = _ends([x for line in lines for x in line.x])
            lines.append(Line("bound of the device", ends, [bounds[0]] * 2, dashed=True))
        charts.append(
            line_chart(
                f"Distillation loss: {where}", lines, log_x=True, from_zero=True,
                x="chunk size, tokens", y="tokens a second",
            )
        )  # fmt: skip
        if all(row.added_mib is not None for row in some):
            held = [
                _chunk_line(str(loss), ones, _added) for (loss,), ones in by(some, "loss").items()
            ]
            charts.append(
                line_chart(
                    f"Memory of the loss: {where}", held, log_x=True, from_zero=True,
                    x="chunk size, tokens", y="MiB above what was held",
                )
            )  # fmt: skip
    return charts


def _chunk_line(name: str, rows: Rows, value: Callable[[Row], Any]) -> Line:
    points = {float(row.case["chunk"]): value(row) for row in rows if row.case["chunk"] != "auto"}
    marked = None
    for row in rows:
        if row.case["chunk"] == "auto":
            marked = row.figures["chunk_size"]
            points.setdefault(marked, value(row))
    xs = sorted(points)
    return _line(name, xs, [points[x] for x in xs], marked, "auto" if marked else "")


def packing(rows: Rows) -> list[Chart]:
    """The gain in tokens a second over a sample a row, by distribution of lengths."""
    gains: dict[str, dict[str, float]] = {}
    for (lengths,), some in by(rows, "lengths").items():
        rates = {str(row.case["way"]): known(row.tokens_per_second) for row in some}
        for way, rate in rates.items():
            if way != "unpacked" and "unpacked" in rates:
                gains.setdefault(f"packed, {way}", {})[str(lengths)] = rate / rates["unpacked"]
    padding = Bars(
        "unpacked",
        {
            str(row.case["lengths"]): 100 * row.figures["padding_share"]
            for row in rows
            if row.case["way"] == "unpacked"
        },
    )
    charts = []
    if gains:
        series = [Bars(way, values) for way, values in gains.items()]
        charts.append(bar_chart("What packing gains", series, x="times the tokens a second"))
    if padding.values:
        charts.append(bar_chart("Padding without packing", [padding], x="% of all places"))
    return charts


def gradcache(rows: Rows) -> list[Chart]:
    """Memory and time by batch, for each way to replay."""
    charts = []
    for (tower,), some in by(rows, "tower").items():
        chunked = [int(row.case["chunk"]) for row in some if row.case["replay"] != "plain"]
        first = min(chunked, default=0)
        shown = [row for row in some if row.case["chunk"] == first or row.case["replay"] == "plain"]
        names = {"plain": "plain step"}
        for value, title, y in (
            (_added, "Memory of a step", "MiB above what was held"),
            (_rate, "Speed", "tokens a second"),
        ):
            lines = []
            for (replay,), ones in by(shown, "replay").items():
                points = [(float(row.case["batch"]), value(row)) for row in ones]
                points = [point for point in points if point[1] is not None]
                if points:
                    xs, values = zip(*sorted(points, key=lambda p: p[0]), strict=True)
                    name = names.get(str(replay), f"replay {replay}")
                    lines.append(_line(name, xs, values))
            if lines:
                title = f"{title}: {tower} tower" + (f", chunks of {first}" if first else "")
                options = {"log_x": True, "from_zero": True}
                charts.append(line_chart(title, lines, x="rows of a batch", y=y, **options))
    return charts


def engine(rows: Rows) -> list[Chart]:
    """Speed by number of processes, beside what perfect scaling would be; and what is sent."""
    charts = []
    for (sync, params), some in by(rows, "grad_sync", "params").items():
        lines = []
        for (name,), ones in by(some, "engine").items():
            points = sorted((float(row.case["world"]), _rate(row)) for row in ones)
            lines.append(_through(str(name), points))
        alone = [_rate(row)[0] for row in some if row.case["world"] == 1]
        if alone:
            ends = _ends([x for line in lines for x in line.x])
            if ends[0] < ends[1]:
                best = max(alone)
                lines.append(Line("perfect", ends, [best * x for x in ends], dashed=True))
        title = f"Scaling: grad_sync {sync}, parameters {params}"
        options = {"log_x": True, "from_zero": True}
        charts.append(line_chart(title, lines, x="processes", y="tokens a second", **options))
    most = max(int(row.case["world"]) for row in rows)
    series = [
        Bars(
            f"{sync}, {params}",
            {str(row.case["engine"]): row.figures["wire_mib"] for row in ones},
        )
        for (sync, params), ones in by(
            [row for row in rows if row.case["world"] == most], "grad_sync", "params"
        ).items()
    ]
    if most > 1:
        charts.append(bar_chart(f"What a rank sends, {most} processes", series, x="MiB a step"))
    return charts


def rag_refresh(rows: Rows) -> list[Chart]:
    """A step alone and beside a refresh; how old the searched vectors are."""
    step = [
        Bars(
            "alone" if phase == "alone" else "beside a refresh",
            {_world(row): known(row.seconds).p50 for row in ones},
            {_world(row): (known(row.seconds).p20, known(row.seconds).p80) for row in ones},
        )
        for (phase,), ones in by(rows, "refresh").items()
    ]
    age = [
        Bars(
            "mean" if key == "mean_age_steps" else "most",
            {
                name: max(row.figures[key] for row in ones)
                for name, ones in _grouped(rows, _world).items()
            },
        )
        for key in ("mean_age_steps", "most_age_steps")
    ]
    return [
        bar_chart("A step of the RAG job", step, x="seconds (p20 to p80)"),
        bar_chart("Age of the vectors that are searched", age, x="steps"),
    ]


def data(rows: Rows) -> list[Chart]:
    """Tokens a second by workers."""
    lines = []
    for (source,), ones in by(rows, "source").items():
        points = sorted((float(row.case["workers"]), _rate(row)) for row in ones)
        lines.append(_through(str(source), points))
    return [
        line_chart("What the loaders deliver", lines, x="workers", y="tokens a second", log_y=True)
    ]


def attention(rows: Rows) -> list[Chart]:
    """Tokens a second by kernel."""
    series = [
        Bars(
            f"{count} document{'s' if count != 1 else ''} a row",
            {str(row.case["kernel"]): known(row.tokens_per_second) for row in ones},
        )
        for (count,), ones in by(rows, "documents").items()
    ]
    return [bar_chart("Attention kernels", series, x="tokens a second")]


def peers(rows: Rows) -> list[Chart]:
    """Our time over each other implementation's; below 1 we are faster."""
    charts = []
    for (task, objective), some in by(rows, "task", "objective").items():
        shown = [row for row in some if "ours_over_this" in row.figures]
        values = {str(row.case["candidate"]): row.figures["ours_over_this"] for row in shown}
        if values:
            title = " ".join(filter(None, ("Our seconds over theirs:", str(task), str(objective))))
            charts.append(bar_chart(title, [Bars("", values)], x="below 1: ours is faster"))
    return charts


CHARTS: dict[str, Callable[[Rows], list[Chart]]] = {
    "kd-chunk": kd_chunk,
    "packing": packing,
    "gradcache": gradcache,
    "engine": engine,
    "rag-refresh": rag_refresh,
    "data": data,
    "attention": attention,
    "peers": peers,
}
READING = {
    "kd-chunk": "Tokens a second rise with the chunk until the products are as fast as they get, "
    "memory rises all the time: take the smallest chunk on the flat part. The ring marks what "
    "loss.chunk_size: auto takes here.",
    "packing": "How many times the real tokens a second of one sample a row, padded to the longest "
    "of its micro-batch. The gain grows with the padding that packing does away with.",
    "gradcache": "The plain step's memory grows with the batch; GradCache's stays that of a chunk "
    "(replay all), or grows with the graphs that are kept, which save the second forward.",
    "engine": "The dashed line is so many times the fastest single process. Processes that share "
    "cores cannot reach it. What is sent decides where links are slow.",
    "rag-refresh": "A refresh encodes and indexes on what the training leaves free; where nothing "
    "is free, steps beside it take longer. Age counts from the snapshot that is searched.",
    "data": "What a trainer can be fed with: where a step consumes more than that, add workers.",
    "attention": "Kernels that mask a packed row compute its square; varlen goes document by "
    "document. A kernel that cannot run here is skipped, with the reason.",
    "peers": "Implementations take turns in one run; every ratio is that of a round.",
}


def _rate(row: Row) -> tuple[float, float, float]:
    """Tokens a second at the median step, and at the slow and the fast end."""
    tokens, spread = known(row.tokens), known(row.seconds)
    return tokens / spread.p50, tokens / spread.p80, tokens / spread.p20


def _added(row: Row) -> float | None:
    return row.added_mib


def _line(
    name: str, xs: Sequence[float], values: Sequence[Any], marked: float | None = None,
    mark: str = "",
) -> Line:  # fmt: skip
    """A line of numbers, or of (middle, low, high)."""
    if isinstance(values[0], tuple):
        middle, low, high = zip(*values, strict=True)
        return Line(name, xs, middle, low, high, marked, mark)
    return Line(name, xs, [math.nan if v is None else v for v in values], marked=marked, mark=mark)


def _through(name: str, points: Sequence[tuple[float, Any]]) -> Line:
    return _line(name, [x for x, _ in points], [value for _, value in points])


def _ends(xs: Sequence[float]) -> list[float]:
    return [min(xs), max(xs)]


def _world(row: Row) -> str:
    count = row.case["world"]
    return f"{count} process{'es' if count != 1 else ''}"


def _grouped(rows: Rows, key: Callable[[Row], str]) -> Mapping[str, list[Row]]:
    return {name: list(ones) for name, ones in groupby(sorted(rows, key=key), key=key)}
