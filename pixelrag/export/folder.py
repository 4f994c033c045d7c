"""An exported folder appears whole or not at all, and replaces only what an export wrote."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pixelrag.errors import CheckpointError
from pixelrag.models.source import SETTINGS_FILE

MAX_SHARD_SIZE = "5GB"
# Left in parameter names by torch.compile and by data-parallel wrappers.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.")


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Give a fresh folder to write to; at the end it gets the name `folder`.

    Raises:
        CheckpointError: `folder` holds something that is no export, or it cannot be written.
            Nothing is left half-written.
    """
    if folder.exists() and not _replaceable(folder):
        raise CheckpointError(
            f"{folder} exists and was not written by an export (it has no {SETTINGS_FILE}); "
            "remove it or choose another folder"
        )
    part = folder.with_name(f".{folder.name}.part-{os.getpid()}")
    try:
        part.mkdir(parents=True)
        yield part
        _sync(part)
        _put_in_place(part, folder)
    except OSError as error:
        raise CheckpointError(f"cannot write the export {folder}: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def plain_name(key: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        key = key.replace(wrapper, "")
    return key.removeprefix("module.")


def _replaceable(folder: Path) -> bool:
    return folder.is_dir() and ((folder / SETTINGS_FILE).is_file() or not any(folder.iterdir()))


def _sync(folder: Path) -> None:
    """Have the disk hold every file before the folder gets its name."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _put_in_place(part: Path, folder: Path) -> None:
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    try:
        part.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
