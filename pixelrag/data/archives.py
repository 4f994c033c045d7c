"""Images that lie in tar archives: read in place, at their offsets; nothing is ever unpacked.

A path names a member of an archive as `tiles.tar::page/7.png`. A path of which no file exists is
also looked for in the archives beside it, as PixelRAG's data sets are published:

    tiles/page/7.png           tiles.tar                   page/7.png or tiles/page/7.png
    images/shard_812/7.png     image_shards/shard_812.tar  shard_812/7.png or 7.png

The offsets of an archive's members are kept in memory and in the user's cache folder. Compressed
archives have no offsets, and are refused.
"""

import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import posixpath
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

from pixelrag.errors import DataError
from pixelrag.json_text import read_json

logger = logging.getLogger("pixelrag")

SEPARATOR = "::"
# An image of the most pixels that are decoded (see `images.MAX_PIXELS`), uncompressed and 16-bit.
MAX_MEMBER_BYTES = 512 * 2**20

Members = dict[str, tuple[int, int]]
"""Offset of the first byte and number of bytes, by name."""


_one_at_a_time = threading.Lock()


class ArchiveError(DataError):
    """An archive that cannot be read, or lacks what is asked of it."""


def image_source(path: Path) -> Path | io.BytesIO:
    """Where the bytes of an image are: the path itself, or the content of an archive's member.

    Raises:
        ArchiveError: the archive is broken, compressed, or has no such member.
        FileNotFoundError: there is no such file, nor an archive beside it that has it.
    """
    with contextlib.suppress(FileNotFoundError):
        path.stat()
        return path
    archive, separator, member = str(path).rpartition(SEPARATOR)
    if separator:
        members = _members(Path(archive))
        if member not in members:
            raise ArchiveError(f"{archive} has no member {member!r} ({len(members)} files in it)")
        return io.BytesIO(_read(Path(archive), members[member]))
    for folder in path.parents:
        for candidate, names in _beside(folder, path.relative_to(folder)):
            if candidate.is_file():
                members = _members(candidate)
                if place := next((members[name] for name in names if name in members), None):
                    return io.BytesIO(_read(candidate, place))
    raise FileNotFoundError(f"{path} does not exist")


@contextlib.contextmanager
def opened_image(path: Path) -> Iterator[io.BufferedIOBase]:
    """The bytes of an image as a stream; raises as `image_source`, and OSError."""
    source = image_source(path)
    with source.open("rb") if isinstance(source, Path) else source as stream:
        yield stream


def normal_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path without "..", of a file or of an archive's member.

    Raises:
        ValueError: the member's name leads out of the archive.
    """
    archive, separator, member = os.fspath(path).rpartition(SEPARATOR)
    if not separator:
        return Path(os.path.abspath(path))
    if not is_safe(member):
        raise ValueError(f"names {member!r}, which is no place within {archive}")
    return Path(f"{os.path.abspath(archive)}{SEPARATOR}{posixpath.normpath(member)}")


def is_safe(member: str) -> bool:
    """Whether a member's name is relative and never goes up."""
    return bool(member) and not member.startswith("/") and ".." not in member.split("/")


def _beside(folder: Path, inside: Path) -> Iterator[tuple[Path, list[str]]]:
    """Archives that may stand for `folder`, and how `inside` would be called in them."""
    if folder.name:
        names = [inside.as_posix(), f"{folder.name}/{inside.as_posix()}"]
        yield folder.with_name(f"{folder.name}.tar"), names
    if folder.name == "images" and len(inside.parts) > 1:
        shard, rest = inside.parts[0], Path(*inside.parts[1:])
        names = [inside.as_posix(), rest.as_posix()]
        yield folder.parent / "image_shards" / f"{shard}.tar", names


def _read(archive: Path, place: tuple[int, int]) -> bytes:
    offset, size = place
    if size > MAX_MEMBER_BYTES:
        raise ArchiveError(f"{archive}: a member of {size:,} bytes is no image to train on")
    # Opened anew each time: thousands of shards would use up the file handles.
    with archive.open("rb") as file:
        file.seek(offset)
        content = file.read(size)
    if len(content) < size:
        raise ArchiveError(f"{archive} is truncated: it ends within a member")
    return content


def _members(archive: Path) -> Members:
    try:
        stat = archive.stat()
    except OSError as error:
        raise ArchiveError(f"{archive} cannot be read: {error.strerror or error}") from error
    with _one_at_a_time:  # threads that check images all ask for the same archives
        return _indexed(archive.absolute(), stat.st_size, stat.st_mtime_ns)


@functools.cache
def _indexed(archive: Path, size: int, mtime_ns: int) -> Members:
    cache = _cache_folder() / f"{hashlib.sha256(os.fsencode(archive)).hexdigest()[:32]}.json"
    state = [size, mtime_ns]
    with contextlib.suppress(
        OSError, ValueError, KeyError, TypeError, AttributeError
    ):  # none, or half
        kept = read_json(cache)
        if kept["state"] == state:
            return {member: (start, length) for member, (start, length) in kept["members"].items()}
    members = _scan(archive, size)
    temporary = cache.with_suffix(f".{os.getpid()}.tmp")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"state": state, "members": members}), encoding="utf-8")
        temporary.replace(cache)
    except OSError as error:
        logger.info("%s: its index is not kept in %s: %s", archive, cache.parent, error.strerror)
    return members


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "pixelrag" / "archives"


class _Member(tarfile.TarInfo):
    def _block(self, count: int) -> int:
        # A negative size would have tarfile read the same header for ever (CVE-2025-8194).
        if count < 0:
            raise tarfile.HeaderError("a negative size")
        return super()._block(count)  # type: ignore[misc]


def _scan(archive: Path, size: int) -> Members:
    """Read the headers of an archive; of members of one name the last counts, as for tar."""
    members: Members = {}
    try:
        with tarfile.open(archive, "r:", tarinfo=_Member) as tar:
            for member in tar:
                if not member.isreg() or member.issparse():
                    continue  # folders and links hold no bytes, sparse files not all of theirs
                name = posixpath.normpath(member.name)
                if not is_safe(member.name):
                    raise ArchiveError(
                        f"{archive} has a member {member.name!r}, which leads out of the archive; "
                        "pack it anew with relative names"
                    )
                if member.offset_data + member.size > size:
                    raise ArchiveError(f"{archive} is truncated: {name} goes on behind its end")
                members[name] = (member.offset_data, member.size)
    except tarfile.ReadError as error:
        raise ArchiveError(
            f"{archive} is no plain tar archive: {error}. Compressed archives cannot be read in "
            "place; decompress it to a .tar"
        ) from error
    except (OSError, tarfile.TarError, ValueError, OverflowError, MemoryError) as error:
        raise ArchiveError(f"{archive} cannot be read: {error}") from error
    return members
