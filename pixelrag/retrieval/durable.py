"""Files that are whole or not there, on the disk and not only in the page cache."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path


def put(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file, force it onto the disk, give it its name.

    Whenever the process is killed, ``path`` holds its old content, or all of the new.

    Raises:
        OSError: it cannot be written; the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        fsync(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = os.fspath(path)  # what a failing write leaves out
        raise
    fsync(path.parent)


def put_text(path: Path, text: str) -> None:
    """``put`` for a short text (UTF-8)."""
    put(path, lambda temporary: _write_text(temporary, text))


def fsync(path: Path) -> None:
    """Force a file's content, or the names in a folder, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)
