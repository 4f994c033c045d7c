"""What tells documents of equal content, wherever they lie."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from pixelrag.data.archives import opened_image
from pixelrag.data.schema import Document
from pixelrag.errors import DataError


def content_of(document: Document) -> int:
    """A number below 2^63 that documents of equal content share: equal texts, equal image files.

    Raises:
        DataError: the image cannot be read.
    """
    if document.text is not None:
        return _number(document.text.encode("utf-8"))
    return _of_file(document.image)


@lru_cache(maxsize=1 << 16)
def _of_file(path: Path) -> int:
    try:
        with opened_image(path) as stream:
            return _number(stream.read())
    except OSError as error:
        raise DataError(f"image {path} cannot be read: {error.strerror or error}") from error


def _number(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest()) >> 1
