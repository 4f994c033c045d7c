"""One reading of a whole knowledge base: every fault found, and what is kept of each passage."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from pixelrag.data.images import Progress, check_images
from pixelrag.data.passage_sources import Passage, PassageSource
from pixelrag.data.passage_split import Spans, Splitter
from pixelrag.data.roots import Roots
from pixelrag.data.schema import RowError

# Documents that are cut, and images that are decoded, at once.
_BLOCK = 512
_IMAGE_BLOCK = 16_384
_T = TypeVar("_T")


def in_blocks(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """The items in lists of `size`, the last one perhaps shorter."""
    left = iter(items)
    while block := list(itertools.islice(left, size)):
        yield block


class Scan:
    """Reads a source once. Iterate over `ids`; everything else is there when that has ended.

    Attributes:
        numbers: line or row of each good document.
        counts: its passages.
        spans: first character and the one behind the last of each passage, one after the other.
        lengths: characters of each passage and its title; 0 for images.
        image_rows: rows of the passages that are images.
        faults: (line or row, what is wrong) of the others.
        num_read: documents read, good and bad.
        digest: sha256 of ids, titles, texts and spans.
    """

    def __init__(self, source: PassageSource, splitter: Splitter) -> None:
        self.numbers, self.counts = array("q"), array("q")
        self.spans, self.lengths = array("i"), array("i")
        self.image_rows = array("q")
        self.faults: list[tuple[int, str]] = []
        self.num_read = 0
        # Ids of pieces are unlike those of whole documents, though the spans may be the same.
        self.digest = hashlib.sha256(b"whole" if splitter.kind == "none" else b"pieces")
        self._source = source
        self._splitter = splitter
        self._images = array("q")  # line and position of each good document that is one
        self._images_of_bad: list[tuple[int, Path]] = []

    def ids(self) -> Iterator[str]:
        """The ids of the good documents, in order.

        Raises:
            DataError: the source cannot be read.
        """
        for block in in_blocks(self._source.scan(), _BLOCK):
            good = []
            for number, passage in block:
                if isinstance(passage, RowError):
                    self.faults += [(number, reason) for reason in passage.reasons]
                    self._images_of_bad += [(number, image) for image in passage.images]
                else:
                    good.append((self.num_read, number, passage))
                self.num_read += 1
            texts = [passage.text for _, _, passage in good if passage.text is not None]
            cut = iter(self._splitter.spans(texts))
            for position, number, passage in good:
                if passage.image is not None:
                    self.image_rows.append(len(self.lengths))
                    self._images.extend((number, position))
                    self._keep(number, passage, [(0, 0)])
                elif spans := next(cut):
                    self._keep(number, passage, spans)
                else:
                    self.faults.append((number, "text yields no token"))
                    continue
                yield passage.id

    def broken_images(
        self, progress: Progress | None = None, image_roots: Sequence[str] = ()
    ) -> list[tuple[int, str]]:
        """Decode every image, also those that bad documents name.

        Args:
            progress: told about every few thousand.
            image_roots: folders in which images may lie beside that of the source.

        Returns:
            (line or row, what is wrong) of the broken ones.
        """
        good = in_blocks(self._images, 2)
        named = itertools.chain(
            self._images_of_bad,
            (
                (number, image)
                for number, position in good
                if (image := self._source.read(position).image)
            ),
        )
        roots = Roots(
            [self._source.folder / "row"], image_roots, option="knowledge_base.image_roots"
        )
        total = len(self._images_of_bad) + len(self._images) // 2
        faults: list[tuple[int, str]] = []
        done = 0
        for block in in_blocks(named, _IMAGE_BLOCK):
            broken = check_images(list(dict.fromkeys(image for _, image in block)), roots=roots)
            faults += [
                (n, f"image {image} {broken[image]}") for n, image in block if image in broken
            ]
            done += len(block)
            if progress is not None:
                progress(done, total)
        return faults

    def _keep(self, number: int, passage: Passage, spans: Spans) -> None:
        self.numbers.append(number)
        self.counts.append(len(spans))
        for start, end in spans:
            self.spans.extend((start, end))
            self.lengths.append(end - start + len(passage.title) if end else 0)
        is_image = passage.image is not None
        for part in (passage.id, passage.title, "image" if is_image else passage.text or ""):
            encoded = part.encode("utf-8")
            self.digest.update(len(encoded).to_bytes(8, "little"))
            self.digest.update(encoded)
        self.digest.update(repr((is_image, spans)).encode())
