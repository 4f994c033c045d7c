"""JSON that others wrote: what Python's parser would let pass, or fall over, is a plain ValueError.

It keeps the last of a key's values, takes `NaN` for a number, and answers thousands of nested
brackets with a RecursionError, some hundreds with one later, wherever the value is next walked.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

MAX_DEPTH = 100
MAX_FILE_BYTES = 256 * 2**20
BOM = b"\xef\xbb\xbf"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_NO_BRACKET = re.compile(r"[^\[\]{}]+")


def parse_json(raw: bytes, *, finite: bool = True, one_line: bool = False) -> Any:
    """The value of a JSON text in UTF-8.

    Args:
        raw: the text.
        finite: refuse `NaN` and `Infinity`, which JSON does not have and Python writes.
        one_line: name the column alone where it ends being JSON.

    Raises:
        ValueError: says what is wrong, and at which line and column.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = "; the file looks like UTF-16, save it as UTF-8" if b"\x00" in raw else ""
        reason = f"not UTF-8: byte 0x{error.object[error.start]:02x} at byte {error.start + 1}"
        raise ValueError(reason + hint) from error
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise ValueError(f"not valid JSON: nested more than {MAX_DEPTH} levels deep")
    repeated: list[str] = []

    def keep_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            repeated.extend(name for name, count in counts.items() if count > 1)
        return found

    try:
        constant = _no_number if finite else None
        value = json.loads(text, object_pairs_hook=keep_once, parse_constant=constant)
    except json.JSONDecodeError as error:
        line = "" if one_line else f"line {error.lineno} "
        raise ValueError(f"not valid JSON: {error.msg} at {line}column {error.colno}") from error
    except ValueError as error:  # a number of thousands of digits, or NaN
        raise ValueError(f"not valid JSON: {error}") from error
    if repeated:
        names = ", ".join(json.dumps(name) for name in dict.fromkeys(repeated))
        raise ValueError(f"names the key {names} more than once; keep one")
    return value


def read_json(path: Path, *, finite: bool = True) -> Any:
    """The value in a JSON file, with or without a byte order mark; see `parse_json`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no JSON, or larger than any that pixelrag reads whole.
    """
    with open(path, "rb") as stream:
        raw = stream.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES:,} bytes")
    return parse_json(raw.removeprefix(BOM), finite=finite)


def is_beside(name: object) -> bool:
    """Whether a name out of a manifest is that of a file in the manifest's own folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _depth(text: str) -> int:
    depth = most = 0
    for bracket in _NO_BRACKET.sub("", _STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        most = max(most, depth)
    return most
