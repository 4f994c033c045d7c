"""One page of all that was measured: HTML to look at, Markdown to keep beside the code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pixelrag.bench.rows import Row, Run, known, read_rows, same_hardware
from pixelrag.bench.suite_charts import READING, charts_of
from pixelrag.charts import Part, Section, Table, markdown, page
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
        parts: list[Part] = [*reading, *charts_of(suite, some), *tables, *skipped, *commands]
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
        f"Measured by: {run.command} ({run.date}, {commit}, torch threads: {run.threads}, load "
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
    changes: list[_Change] = []
    unlike: list[str] = []
    for row in rows:
        old = earlier.get((row.suite, row.name))
        if old is None or row.seconds is None:
            continue
        if old.run.config_hash == row.run.config_hash:
            changes.append(_Change(old, row))
        else:
            unlike.append(row.suite)
    parts: list[str | Table] = []
    if changes:
        apart = [change for change in changes if change.apart]
        slower = sum(change.ratio > 1 for change in apart)
        parts.append(
            f"Of {len(changes)} cases {slower} are slower and {len(apart) - slower} faster than "
            "before, so far that the ranges from the 20th to the 80th percentile do not overlap "
            "(apart: yes). The difference of the others may be chance."
        )
        # What changed most first; those that may be chance behind.
        changes.sort(key=lambda change: (not change.apart, -abs(math.log(change.ratio))))
        head = ["case", "now / before", "apart", "MiB, now / before", "before, s", "now, s"]
        parts.append(Table(head, [change.cells() for change in changes]))
    if unlike:
        names = ", ".join(dict.fromkeys(unlike))
        parts.append(f"Not compared, as they were measured with other settings: cases of {names}.")
    return parts or ["No case is in both."]


@dataclass(frozen=True, slots=True)
class _Change:
    """One case, measured before and now."""

    before: Row
    now: Row

    @property
    def ratio(self) -> float:
        """Of the median steps."""
        return known(self.now.seconds).p50 / known(self.before.seconds).p50

    @property
    def apart(self) -> bool:
        """Whether the ranges of both do not overlap."""
        now, before = known(self.now.seconds), known(self.before.seconds)
        return now.p20 > before.p80 or now.p80 < before.p20

    def cells(self) -> list[object]:
        """A line of the table."""
        memory = ""
        if self.now.added_mib and self.before.added_mib:
            memory = f"{self.now.added_mib / self.before.added_mib:.2f}"
        verdict = "yes" if self.apart else "no"
        name = f"{self.now.suite} {self.now.name}"
        return [
            name, f"{self.ratio:.2f}", verdict, memory, self.before.seconds, self.now.seconds
        ]  # fmt: skip


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value and abs(value) < 1000:
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}".removesuffix(".0")
    return f"{value:,.0f}"
