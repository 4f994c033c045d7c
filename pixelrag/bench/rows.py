"""The one form of every measurement, and the files that hold it.

A row is one case of one suite: what was varied, what it took, and where. A JSONL file has one JSON
object a line with the fields below; the CSV file beside it has the same in columns (`case.KEY`,
`seconds.p50`, `figures.KEY`, `run.KEY`).
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from pixelrag.bench.timing import Spread
from pixelrag.errors import DataError
from pixelrag.retrieval.durable import put_text

T = TypeVar("T")
Value = str | int | float | bool
Case = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Run:
    """Where, when and with what a row was measured.

    Attributes:
        profile: sizes of the suite (`cpu-smoke`, `h200`, ...), or "".
        command: what was typed.
        config_hash: of all settings but how often and which cases: equal hashes, equal work.
        device: what computed, by its own name; `hardware` also says how many cores and how much.
        hardware: rows of unlike hardware are never compared.
        threads: torch's, of each process.
        versions: of the packages that matter, by name.
        commit: of pixelrag; None = an installed copy.
        date: day, UTC, YYYY-MM-DD.
        load_average: of the last minute before the run; above 0.5 others were at work.
    """

    profile: str
    command: str
    config_hash: str
    device: str
    hardware: str
    threads: int
    versions: Mapping[str, str]
    commit: str | None
    date: str
    load_average: float


_NOT_YET = Run("", "", "", "", "", 0, {}, None, "", 0.0)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case. What was not measured, or is not known, is None.

    Attributes:
        suite: its name.
        case: what was varied, by name.
        run: see `Run`; the command fills it in.
        seconds, cpu_seconds: of a step, on the clock and on the processors of its process.
        repeats: measured steps, after the warm-up.
        tokens, supervised_tokens: of a step, over all ranks; padding does not count.
        tokens_per_second, supervised_tokens_per_second: at the median step.
        flops: operations that the mathematics needs, over all ranks; recomputation and padding do
            not count.
        mfu: flops a second over the device's peak in the precision of the case.
        bound_seconds: the least that a step can take on the device (roofline).
        bound_by: "compute" or "memory"; "" where the device or the work is unknown.
        peak_mib: the most that a fresh process (of several ranks the fullest) held during a step.
        added_mib: that, less what it held before the step.
        figures: further ones of the suite, by name with the unit in it.
        skipped: why the case did not run, or "".
    """

    suite: str
    case: Case
    run: Run = _NOT_YET
    seconds: Spread | None = None
    cpu_seconds: Spread | None = None
    repeats: int = 0
    tokens: int | None = None
    supervised_tokens: int | None = None
    tokens_per_second: float | None = None
    supervised_tokens_per_second: float | None = None
    flops: float | None = None
    mfu: float | None = None
    bound_seconds: float | None = None
    bound_by: str = ""
    peak_mib: float | None = None
    added_mib: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    skipped: str = ""

    @property
    def name(self) -> str:
        """The case in a line: `chunk=256 dtype=fp32`."""
        return name_of(self.case)


def known(value: T | None) -> T:
    """A field that rows of the suite always have.

    Raises:
        DataError: this one has it not.
    """
    if value is None:
        raise DataError("a row lacks a figure that its suite always has; measure it again")
    return value


def name_of(case: Case) -> str:
    """A case in a line, as `--only` takes it."""
    return " ".join(f"{key}={value}" for key, value in case.items())


def to_json(row: Row) -> str:
    """A line of a JSONL file; what is None or empty is left out."""
    values = asdict(row)
    return json.dumps({k: v for k, v in values.items() if v not in (None, "", {})})


def from_json(text: str, where: str) -> Row:
    """The row of a line.

    Args:
        text: the line.
        where: file and line, for messages.

    Raises:
        DataError: it is no row of a benchmark.
    """
    try:
        values = json.loads(text)
        known = {item.name for item in fields(Row)}
        if unknown := set(values) - known:
            raise ValueError(f"unknown fields {', '.join(sorted(unknown))}")
        for key in ("seconds", "cpu_seconds"):
            if key in values:
                values[key] = Spread(**values[key])
        return Row(**(values | {"run": Run(**values["run"])}))
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{where}: no row of a benchmark: {error}") from error


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """The rows of files, and of all JSONL files in folders.

    Raises:
        DataError: a file is not there or holds something else, or there is none.
    """
    rows: list[Row] = []
    for path in paths:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise DataError(f"{path}: holds no results (*.jsonl) of pixelrag bench")
        for file in files:
            try:
                lines = file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{file}: cannot be read: {error}") from error
            rows += [from_json(line, f"{file} line {n}") for n, line in enumerate(lines, start=1)]
    return rows


def write_rows(folder: Path, name: str, rows: Sequence[Row]) -> None:
    """Write `NAME.jsonl` and `NAME.csv`, each whole or not at all.

    Raises:
        DataError: they cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        put_text(folder / f"{name}.jsonl", "".join(to_json(row) + "\n" for row in rows))
        put_text(folder / f"{name}.csv", to_csv(rows))
    except OSError as error:
        raise DataError(f"{folder}: results cannot be written: {error}") from error


def to_csv(rows: Sequence[Row]) -> str:
    """Rows as CSV, with a column for every field of any of them."""
    flat = [dict(_flat(asdict(row))) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    written = io.StringIO()
    writer = csv.DictWriter(written, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return written.getvalue()


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def same_hardware(rows: Sequence[Row], against: Sequence[Row]) -> None:
    """Refuse to compare what was measured on unlike hardware.

    Raises:
        DataError: names both.
    """
    found = {row.run.hardware for row in (*rows, *against)}
    if len(found) > 1:
        both = " and ".join(sorted(found)[:2])
        raise DataError(
            f"rows of unlike hardware are not compared: these are of {both}. Measure both on one "
            "machine"
        )
