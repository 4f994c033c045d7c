"""One page of all that was measured: HTML to look at, Markdown to keep beside the code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pixelrag.bench.rows import Row, Run, read_rows, same_hardware
from pixelrag.bench.suite_charts import READING, charts_of
from pixelrag.charts import Section, Table, markdown, page
from pixelrag.errors import DataError
from pixelrag.retrieval.durable import put_text

TITLE = "pixelrag bench"
# A machine whose last minute was busier than this did other work as well.
BUSY = 0.5
# Columns of every table: the heading, and what it shows of a row ("" = nothing).
_COLUMNS = {
    "seconds a step": lambda row: str(row.seconds or ""),
    "processor seconds": lambda row: str(row.cpu_seconds or ""),
    "tokens/s": lambda row: _number(row.tokens_per_second),
    "supervised/s": lambda row: _number(row.supervised_tokens_per_second),
    "MFU": lambda row: "" if row.mfu is None else f"{row.mfu:.1%}",
    "bound, s": lambda row: f"{_number(row.bound_seconds)} {row.bound_by}".strip(),
    "MiB added": lambda row: _number(row.added_mib),
    "peak MiB": lambda row: _number(row.peak_mib),
}  # fmt: skip


def write_report(
    folder: Path, results: Sequence[Path], previous: Sequence[Path] = ()
) -> list[Path]:
    """Write `report.html` and `report.md`; return where they lie.

    Args:
        folder: where to.
        results: files and folders of results.
        previous: those of an earlier run to compare with.

    Raises:
        DataError: results cannot be read, are of unlike hardware, or the report not written.
        ConfigError: matplotlib is not installed.
    """
    rows, before = read_rows(results), read_rows(previous)
    if not rows:
        raise DataError(f"{', '.join(map(str, results))}: no row in it")
    sections = report_sections(rows, before)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        put_text(folder / "report.html", page(TITLE, sections))
        put_text(folder / "report.md", markdown(TITLE, sections))
    except OSError as error:
        raise DataError(f"{folder}: the report cannot be written: {error}") from error
    return [folder / "report.html", folder / "report.md"]


def report_sections(rows: Sequence[Row], before: Sequence[Row] = ()) -> list[Section]:
    """The report's content.

    Raises:
        DataError: rows are of unlike hardware.
    """
    same_hardware(rows, before)
    suites: dict[str, list[Row]] = {}
    for row in rows:
        suites.setdefault(row.suite, []).append(row)
    sections = [Section("Where it was measured", _conditions(rows))]
    if before:
        sections.append(Section("Beside the previous results", comparison(rows, before)))
    for suite, some in suites.items():
        reading = [READING[suite]] if suite in READING else []
        reasons: dict[str, list[str]] = {}
        for row in some:
            if row.skipped:
                reasons.setdefault(row.skipped, []).append(row.name)
        skipped = [f"Skipped {', '.join(names)}: {why}." for why, names in reasons.items()]
        tables = [table(ones) for ones in _alike([row for row in some if not row.skipped])]
        commands = [_said_of(run) for run in _runs(some)]
        parts = [*reading, *charts_of(suite, some), *tables, *skipped, *commands]
        sections.append(Section(suite, parts))
    return sections


def _conditions(rows: Sequence[Row]) -> list[str]:
    runs = _runs(rows)
    first = runs[0]
    versions = dict(item for run in runs for item in run.versions.items())
    parts = [
        f"Hardware: {first.hardware}.",
        "Versions: " + ", ".join(f"{name} {found}" for name, found in versions.items()) + ".",
        "Times are the median step, with the 20th and 80th percentile of the repeated ones; the "
        "warm-up does not count, and cases that are compared take turns in an order that reverses "
        "from round to round. Memory is that of a process of its own, or what CUDA's allocator "
        "counts. MFU and bounds need a device whose peak is known, and are left out elsewhere.",
    ]
    if any(run.load_average > BUSY for run in runs):
        parts.append(
            "Other work was running beside some of these: trust ratios and processor seconds, not "
            "the clock."
        )
    return parts


def _said_of(run: Run) -> str:
    commit = "an installed copy" if run.commit is None else f"commit {run.commit[:12]}"
    if run.commit is not None and run.commit.endswith("-dirty"):
        commit += " with changes"
    return (
        f"Measured by: {run.command} ({run.date}, {commit}, {run.threads} threads a process, load "
        f"average {run.load_average:g} before, settings {run.config_hash})"
    )


def _runs(rows: Sequence[Row]) -> list[Run]:
    """The runs that rows are of, each once."""
    found: dict[tuple[str, str, str], Run] = {}
    for row in rows:
        found.setdefault((row.run.command, row.run.date, row.run.config_hash), row.run)
    return list(found.values())


def _alike(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows by what their cases vary and what they hold: a table each."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((*row.case, row.seconds is None), []).append(row)
    return list(found.values())


def table(rows: Sequence[Row]) -> Table:
    """Rows whose cases vary the same; columns that would be empty are left out."""
    shown = {
        head: [cell(row) for row in rows]
        for head, cell in _COLUMNS.items()
        if any(cell(row) for row in rows)
    }
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    for name in names:
        shown[name.replace("_", " ")] = [_number(row.figures.get(name)) for row in rows]
    keys = list(rows[0].case)
    lines = [
        [*map(str, row.case.values()), *(column[n] for column in shown.values())]
        for n, row in enumerate(rows)
    ]
    return Table([*keys, *shown], lines)


def comparison(rows: Sequence[Row], before: Sequence[Row]) -> list[str | Table]:
    """What changed since the previous results, of cases that were measured with equal settings."""
    earlier = {(row.suite, row.name): row for row in before if row.seconds is not None}
    lines, unlike = [], []
    for row in rows:
        old = earlier.get((row.suite, row.name))
        if old is None or row.seconds is None:
            continue
        if old.run.config_hash != row.run.config_hash:
            unlike.append(row.suite)
            continue
        apart = row.seconds.p20 > old.seconds.p80 or row.seconds.p80 < old.seconds.p20
        memory = ""
        if row.added_mib and old.added_mib:
            memory = f"{row.added_mib / old.added_mib:.2f}"
        seconds = f"{row.seconds.p50 / old.seconds.p50:.2f}"
        name, verdict = f"{row.suite} {row.name}", "yes" if apart else "no"
        lines.append([name, old.seconds, row.seconds, seconds, memory, verdict])
    parts: list[str | Table] = []
    if lines:
        head = ["case", "before, s", "now, s", "now / before", "MiB, now / before", "apart"]
        parts.append(Table(head, lines))
        parts.append(
            "Apart: the ranges from the 20th to the 80th percentile do not overlap; otherwise the "
            "difference may be chance."
        )
    if unlike:
        names = ", ".join(dict.fromkeys(unlike))
        parts.append(f"Not compared, as they were measured with other settings: cases of {names}.")
    return parts or ["No case is in both."]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value and abs(value) < 1000:
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}".removesuffix(".0")
    return f"{value:,.0f}"
