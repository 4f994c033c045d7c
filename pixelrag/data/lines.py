"""JSONL files line by line, and the faults found in them."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from pixelrag.data.schema import RowError, decode_line
from pixelrag.errors import DataError
from pixelrag.json_text import BOM

NUM_LISTED = 20
StrPath = str | os.PathLike[str]
_T = TypeVar("_T")


class Digest(Protocol):
    """What `hashlib`'s objects offer."""

    def update(self, data: bytes, /) -> None: ...


@dataclass(frozen=True, slots=True)
class BadRow:
    """One thing that is wrong with one line; a line with two faults gives two of these."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


def listing(faults: Sequence[BadRow]) -> str:
    """The first faults, one an indented line, for the end of a message."""
    count = f" ({NUM_LISTED} of {len(faults):,} faults shown)" if len(faults) > NUM_LISTED else ""
    return f"{count}:\n  " + "\n  ".join(map(str, faults[:NUM_LISTED]))


def parsed_lines(
    path: StrPath, parse: Callable[[object, Path, int], _T], digest: Digest | None = None
) -> Iterator[tuple[int, _T | RowError]]:
    """(line number from 1, parsed line or its RowError) for each line that is not blank.

    Args:
        path: the file; a byte order mark at its start and CRLF line ends are fine.
        parse: given the JSON value, the file and the line number; may raise RowError.
        digest: updated with all bytes of the file.

    Raises:
        DataError: the file is missing, unreadable or a folder.
    """
    file = Path(path)
    with _opened(file) as handle:
        # Only "\n" ends a line: JSON strings may hold the other line ends of Unicode.
        for line, raw in enumerate(handle, start=1):
            if digest is not None:
                digest.update(raw)
            content = raw.removeprefix(BOM) if line == 1 else raw
            if not content.strip():
                continue
            try:
                parsed: _T | RowError = parse(decode_line(content, file, line), file, line)
            except RowError as error:
                parsed = error
            yield line, parsed


def line_places(path: StrPath) -> Iterator[tuple[int, int]]:
    """(line number from 1, its first byte in the file) of each line that is not blank.

    Raises:
        DataError: the file is missing, unreadable or a folder.
    """
    start = 0
    with _opened(Path(path)) as handle:
        for line, raw in enumerate(handle, start=1):
            skipped = len(BOM) if line == 1 and raw.startswith(BOM) else 0
            if raw[skipped:].strip():
                yield line, start + skipped
            start += len(raw)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Iterator[bytes]]:
    try:
        with file.open("rb") as handle:
            yield handle
    except FileNotFoundError as error:
        where = "" if file.is_absolute() else f" (looked for in {Path.cwd()})"
        raise DataError(f"{file} does not exist{where}") from error
    except IsADirectoryError as error:
        raise DataError(f"{file} is a folder; name the JSONL file in it") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error


def file_labels(names: Sequence[str]) -> list[str]:
    """The shortest ends of the paths that tell them apart ("train.jsonl", or "a/train.jsonl")."""
    parts = [Path(name).parts for name in names]
    depth = 1
    while depth < max(map(len, parts), default=1):
        if len({part[-depth:] for part in parts}) == len(set(parts)):
            break
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]
