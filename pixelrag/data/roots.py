"""Where the images that rows name may lie: below the folder of their file, or where it is allowed.

A data file from elsewhere may name any path of this machine, by "..", as it stands or through a
symbolic link. What counts is where a path leads in the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pixelrag.data.archives import SEPARATOR

StrPath = str | os.PathLike[str]


class Roots:
    """Folders in which images may lie.

    Args:
        files: data files; each allows its own folder, and where it lies if it is a link.
        others: further folders; "/" allows everything.
        option: what names these, for messages.
    """

    def __init__(
        self, files: Iterable[StrPath], others: Sequence[str] = (), option: str = "data.image_roots"
    ) -> None:
        folders = [os.path.dirname(os.path.abspath(file)) for file in files]
        folders += [os.path.dirname(os.path.realpath(file)) for file in files]
        folders += [os.path.expanduser(folder) for folder in others]
        real = dict.fromkeys(os.path.realpath(folder) for folder in folders)
        self._prefixes = tuple(folder.rstrip(os.sep) + os.sep for folder in real)
        self._option = option

    def fault(self, image: Path) -> str | None:
        """What is wrong with the place of an image, or of the archive that it lies in; or None."""
        archive, separator, member = os.fspath(image).rpartition(SEPARATOR)
        real = os.path.realpath(archive if separator else member)
        if real.startswith(self._prefixes):
            return None
        shown = "" if real == (archive or member) else f", at {real}"
        allowed = ", ".join(self._prefixes[:3])
        return (
            f"lies outside {allowed}{shown}; if it is meant, allow its folder with {self._option}"
        )
