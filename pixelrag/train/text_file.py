"""Small files of a run's folder: whole, or as they were; and whether it may be written at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pixelrag.errors import CheckpointError


def replace_text(path: Path, text: str) -> None:
    """Write `path` in one step; a disk that fills leaves an older file as it was.

    Raises:
        CheckpointError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise CheckpointError(
            f"{path}: cannot be written ({error.strerror or error}). Free space, or mend "
            "permissions, and go on with `--checkpoint.resume auto`"
        ) from error


def require_writable(folder: Path, option: str = "output_dir") -> None:
    """Check, creating nothing, that `folder`, which `option` named, can be made or written to.

    Raises:
        CheckpointError: it cannot.
    """
    existing = folder.absolute()
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise CheckpointError(
            f"{option} {folder}: {existing} is not a folder; choose another {option}"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{option} {folder}: {existing} may not be written to by this user; mend its "
            f"permissions, or choose another {option}"
        )
