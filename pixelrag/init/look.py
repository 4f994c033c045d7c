"""Looks at data files: of what kind their rows are, how many, and how long on a sample of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pixelrag.data.lines import BOM, NUM_LISTED, BadRow, listing, parsed_lines
from pixelrag.data.schema import RowError, kind_of
from pixelrag.errors import DataError

KINDS = {
    "pair": "a query with its document (query, and passage or chunk_path)",
    "chat": "a chat or text (messages; or prompt and completion; or text)",
    "question": "a question with its answers (question, and answers or answer)",
    "passage": "a passage (id, and text or chunk_path)",
}
_JOBS = {"pair": "contrastive", "chat": "distill", "question": "rag", "passage": "rag"}
_HELD_OUT = {"eval", "dev", "test", "val", "valid", "validation", "heldout"}
_T = TypeVar("_T")


def is_held_out(path: str) -> bool:
    """Whether a file's name says that its rows are for evaluation."""
    return not _HELD_OUT.isdisjoint(re.split(r"[^a-z]+", Path(path).stem.lower()))


def kind_of_row(value: object) -> str | None:
    """Which of `KINDS` a row is by its keys, or None."""
    if not isinstance(value, dict):
        return None
    keys = {key for key, item in value.items() if item is not None}
    if "question" in keys:
        return "question"
    if "query" in keys or "positive_messages" in keys:
        return "pair"
    if "id" in keys and keys & {"text", "chunk_path"}:
        return "passage"
    if "messages" in keys or "text" in keys or {"prompt", "completion"} <= keys:
        return "chat"
    return None


def kind_of_file(path: str, wanted: Sequence[str]) -> str:
    """The kind of a JSONL file's first row.

    Raises:
        DataError: the file cannot be read, has no rows, or begins with a row of no wanted kind.
    """
    for line, value in parsed_lines(path, lambda value, file, line: value):
        if not isinstance(value, dict):
            got = value if isinstance(value, RowError) else f"{path}:{line}: got {kind_of(value)}"
            raise DataError(f"{got}; {_form(path)}")
        kind = kind_of_row(value)
        if kind is None or kind not in wanted:
            raise DataError(f"{path}:{line}: {_unlike(value, kind, wanted)}")
        return kind
    raise DataError(f"{path} has no rows; expected one JSON object a line")


def rows_of(
    path: str, kind: str, parse: Callable[[Any, Path, int], _T], *, skip: bool = False
) -> Iterator[_T]:
    """The parsed rows of a JSONL file that holds rows of one kind.

    Args:
        path: the file.
        kind: one of `KINDS`.
        parse: as for `parsed_lines`.
        skip: leave broken rows out.

    Raises:
        DataError: rows are broken or of another kind; names the file and the lines.
    """

    def parse_kind(value: object, file: Path, line: int) -> _T:
        other = kind_of_row(value)
        if other not in (kind, None):
            raise RowError(f"{file}:{line}", [_unlike(value, other, [kind])])
        return parse(value, file, line)

    faults: list[BadRow] = []
    for line, row in parsed_lines(path, parse_kind):
        if not isinstance(row, RowError):
            yield row
            continue
        if skip:
            continue
        faults += [BadRow(path, line, reason) for reason in row.reasons]
        if len(faults) >= NUM_LISTED:
            break
    if faults:
        raise DataError(
            f"{path}: rows cannot be used{listing(faults)}\nExpected {KINDS[kind]} on every line; "
            "--data.bad_rows skip leaves them out"
        )


def power_of_two(number: float) -> int:
    """The largest power of two that is not above `number`, at least 1."""
    return 1 << max(0, int(number).bit_length() - 1)


def count(number: int, thing: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _form(path: str) -> str:
    """What a file should be, and how a CSV file or an array becomes it."""
    expected = "expected JSONL, one JSON object a line"
    suffix = Path(path).suffix.lower()
    lines = str(Path(path).with_name(f"{Path(path).stem}-rows.jsonl"))  # not the file itself
    with open(path, "rb") as stream:
        is_array = stream.read(1024).removeprefix(BOM).lstrip().startswith(b"[")
    if is_array:
        return (
            f"{expected}; of a JSON array: jq -c '.[]' {shlex.quote(path)} > {shlex.quote(lines)}"
        )
    if suffix in (".csv", ".tsv"):
        table = f"pandas.read_csv({path!r}, sep=None, engine='python')"
        return f"{expected}; of a table: {table}.to_json({lines!r}, orient='records', lines=True)"
    return expected


def _unlike(value: Any, kind: str | None, wanted: Sequence[str]) -> str:
    expected = " or ".join(KINDS[name] for name in wanted)
    if kind is None:
        keys = ", ".join(list(map(str, value))[:12])
        return f"expected {expected}; got {keys or 'no key at all'}"
    job = _JOBS[kind]
    hint = "" if job == _JOBS[wanted[0]] else f"; that is for pixelrag init {job}"
    return f"expected {expected}; got {KINDS[kind]}{hint}"
