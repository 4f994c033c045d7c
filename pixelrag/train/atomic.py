"""Folders that are whole or not there: written aside, described, forced onto the disk, renamed.

When every rank has written its files under a hidden temporary name, rank 0 forces them onto the
disk, writes `COMPLETE` (a JSON manifest: size and SHA-256 of each file, versions, the caller's
info) as the last file, forces the folders too, and renames. A process killed at any point, or a
disk that fills, leaves what was there before and at most a hidden folder.

Hidden names beside a folder NAME, which `checkpoint.clean_leftovers` removes or puts back:
`.NAME.tmp` being written, `.NAME.old` being replaced, `.NAME.trash` being deleted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pixelrag import __version__
from pixelrag.errors import CheckpointError
from pixelrag.json_text import read_json
from pixelrag.train import owner
from pixelrag.train.commit import commit

logger = logging.getLogger(__name__)

MANIFEST = "COMPLETE"
_FORMAT = 1
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_VERSIONS_OF = ("torch", "transformers", "peft", "deepspeed", "safetensors")


def hidden(final: Path, kind: str) -> Path:
    """The hidden name beside `final` for one of "tmp", "old", "trash"."""
    return final.with_name(f".{final.name}.{kind}")


def discard(folder: Path) -> None:
    """Delete a folder that nothing needs, if it is there; what resists is warned about and left."""

    def warn(function: Callable, path: str, error: BaseException | tuple) -> None:
        # Python 3.11 hands over exc_info, later versions the exception.
        reason = error[1] if isinstance(error, tuple) else error
        logger.warning("%s: could not be deleted: %s", path, reason)

    if folder.exists():
        if sys.version_info >= (3, 12):
            shutil.rmtree(folder, onexc=warn)
        else:
            shutil.rmtree(folder, onerror=warn)


def free_bytes(folder: Path) -> int:
    """Bytes that an ordinary user may still write to the file system of `folder`."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    stats = os.statvfs(existing)
    return stats.f_bavail * stats.f_frsize


@contextlib.contextmanager
def atomic_dir(
    final: Path,
    *,
    info: Mapping[str, Any] | None = None,
    num_bytes: int = 0,
    rank: int = 0,
    agree: Callable[[bool], bool] = bool,
    free: Callable[[Path], int] = free_bytes,
) -> Iterator[Path]:
    """Write a folder that appears under `final`, complete, or not at all. Collective.

    All ranks enter with the same `final` and write their own files into the folder yielded; it
    exists on entry. An existing `final` is replaced, and stays until its successor is whole.

    Args:
        final: the folder's lasting name, on storage that all ranks share.
        info: what the manifest also says, for example the step and the world size; JSON.
        num_bytes: estimate of what will be written by all ranks; checked first. 0: unchecked.
        rank: this process's rank; rank 0 prepares, seals and renames.
        agree: logical and over the ranks; the default is one process's own answer.
        free: free bytes of a folder's file system; tests pass their own.

    Raises:
        CheckpointError: too little space (before anything is touched), a disk that fills on the
            way, another live run writing the same folder, or a failure on another rank. Any
            exception of the body passes through. In every case `final` is as it was.
    """
    with _together(agree, f"preparing {final}"):
        if rank == 0:
            begin(final, num_bytes, free)
    try:
        with _together(agree, f"writing {final}"), disk_errors(final):
            yield hidden(final, "tmp")
        with _together(agree, f"sealing {final}"):
            if rank == 0:
                publish(final, info or {})
    except BaseException:
        if rank == 0:
            abandon(final)
        raise


def begin(final: Path, num_bytes: int = 0, free: Callable[[Path], int] = free_bytes) -> Path:
    """Make the hidden folder whose files `publish` will bring under `final`; one process does it.

    Raises:
        CheckpointError: too little space, or another live run writes the same folder.
    """
    temporary = hidden(final, "tmp")
    _require_space(final, num_bytes, free)
    _prepare(final, temporary)
    return temporary


def publish(final: Path, info: Mapping[str, Any]) -> None:
    """Seal what `begin` made, all files written, and give it its name.

    Raises:
        CheckpointError: the disk is full; what was there before is as it was.
    """
    temporary = hidden(final, "tmp")
    with disk_errors(final):
        _seal(temporary, info)
        _swap(temporary, final)


def abandon(final: Path) -> None:
    """Remove what `begin` made; once nobody writes into it any more."""
    discard(hidden(final, "tmp"))


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: `format`, `files`, `versions`, `info`. Checks no file.

    Raises:
        CheckpointError: there is none, or it is not one.
    """
    manifest = path / MANIFEST
    try:
        content = read_json(manifest)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: no {MANIFEST} manifest; not a checkpoint, or one that was never finished"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{manifest}: cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(f"{manifest}: expected a manifest of format {_FORMAT}")
    files = content.get("files")
    if not isinstance(files, dict) or not all(map(_is_entry, files.values())):
        raise CheckpointError(f"{manifest}: its list of files is altered")
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise CheckpointError(f"{manifest}: names {name!r}, which lies outside {path}")
    return content


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and [type(entry.get(k)) for k in ("size", "sha256")] == [
        int,
        str,
    ]


def inspect(path: Path, *, hashes: bool = True) -> list[str]:
    """What is wrong with a checkpoint, one sentence a file; empty when it is whole.

    Args:
        path: the folder.
        hashes: read every byte; False compares names and sizes alone.
    """
    try:
        files = read_manifest(path)["files"]
    except CheckpointError as error:
        return [str(error)]
    if not hashes:
        return [p for name, entry in files.items() if (p := _size_problem(path / name, entry))]
    with _pool(len(files)) as pool:
        found = pool.map(lambda item: _problem(path / item[0], item[1]), files.items())
        return [problem for problem in found if problem]


def _prepare(final: Path, temporary: Path) -> None:
    try:
        if temporary.exists():
            holder = owner.other_live_process(temporary)
            if holder is not None:
                raise CheckpointError(
                    f"{final}: process {holder} of this machine is writing it too; two runs share "
                    f"{final.parent}: give each its own output_dir"
                )
            logger.warning("%s: removed; an earlier run left it unfinished", temporary)
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        owner.sign(temporary)
    except OSError as error:
        raise CheckpointError(f"{final}: cannot be started: {error}") from error


def _seal(temporary: Path, info: Mapping[str, Any]) -> None:
    """Force the files onto the disk, describe them in the manifest, force that and the folders."""
    signature = temporary / owner.FILE
    files = sorted(p for p in temporary.rglob("*") if p.is_file() and p != signature)
    with _pool(len(files)) as pool:
        entries = list(pool.map(_describe, files))
    manifest = {
        "format": _FORMAT,
        "info": dict(info),
        "versions": versions(),
        "files": {
            file.relative_to(temporary).as_posix(): entry
            for file, entry in zip(files, entries, strict=True)
        },
    }
    with open(temporary / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    signature.unlink()
    for folder in (temporary, *(p for p in temporary.rglob("*") if p.is_dir())):
        _fsync(folder)


def _swap(temporary: Path, final: Path) -> None:
    old = hidden(final, "old")
    replaces = final.exists()
    if replaces:
        discard(old)
        os.rename(final, old)
    try:
        os.rename(temporary, final)
    except OSError:
        if replaces:
            os.rename(old, final)
        raise
    _fsync(final.parent)
    if replaces:
        discard(old)


@contextlib.contextmanager
def _together(agree: Callable[[bool], bool], what: str) -> Iterator[None]:
    """Leave normally on all ranks or raise on all: a rank alone would wait for ever."""
    try:
        yield
    except Exception:
        agree(False)
        raise
    if not agree(True):
        raise CheckpointError(f"{what} failed on another rank; that rank's message says why")


@contextlib.contextmanager
def disk_errors(final: Path) -> Iterator[None]:
    """Tell a full disk in words that say what is safe and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise CheckpointError(
            f"{final}: the disk is full ({error.strerror}); it was not written and what was "
            "there before is as it was. Free space or lower checkpoint.keep_last, then resume"
        ) from error


def _require_space(final: Path, num_bytes: int, free: Callable[[Path], int]) -> None:
    if num_bytes <= 0:
        return
    available = free(final.parent)
    if available < num_bytes:
        raise CheckpointError(
            f"{final}: needs about {num_bytes / 2**30:.2f} GiB, {final.parent} has "
            f"{available / 2**30:.2f} GiB free; nothing was written. Free space, lower "
            "checkpoint.keep_last, or set checkpoint.save_optimizer to false"
        )


def _describe(file: Path) -> dict[str, Any]:
    _fsync(file)
    return {"size": file.stat().st_size, "sha256": _sha256(file)}


def _problem(file: Path, entry: Mapping[str, Any]) -> str | None:
    problem = _size_problem(file, entry)
    if problem is not None:
        return problem
    try:
        got = _sha256(file)
    except OSError as error:
        return f"{file}: cannot be read: {error}"
    if got != entry["sha256"]:
        return f"{file}: altered (SHA-256 {got[:12]}..., expected {entry['sha256'][:12]}...)"
    return None


def _size_problem(file: Path, entry: Mapping[str, Any]) -> str | None:
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        return f"{file}: missing"
    except OSError as error:
        return f"{file}: cannot be read: {error}"
    if size != entry["size"]:
        kind = "truncated" if size < entry["size"] else "altered"
        return f"{file}: {kind} ({size} bytes, expected {entry['size']})"
    return None


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _pool(num_files: int) -> ThreadPoolExecutor:
    # hashlib and fsync release the GIL; eight readers saturate most disks.
    return ThreadPoolExecutor(max_workers=max(1, min(8, num_files)))


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def versions() -> dict[str, str]:
    """Versions of pixelrag, with its commit where known, and of what shapes a checkpoint."""
    found = {"pixelrag": __version__}
    if (known := commit()) is not None:
        found["commit"] = known
    for name in _VERSIONS_OF:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
