"""The knowledge base as passages in a fixed order, read from their source when asked for.

What is kept of a passage is its id, its place in the source and its length: about 60 bytes, so
that millions of them fit in each process. Rows, from 0, are what indexes and vectors count by;
ids are what files, questions and results name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelrag.data.archives import opened_image
from pixelrag.data.id_table import IdTable
from pixelrag.data.images import Progress
from pixelrag.data.lines import BadRow, listing
from pixelrag.data.passage_scan import Scan, in_blocks
from pixelrag.data.passage_sources import Passage, PassageSource, open_source
from pixelrag.data.passage_split import SplitKind, Splitter
from pixelrag.errors import DataError

_IMAGES_AT_ONCE = 512


class PassageStore:
    """Passages by row; made by `load_passages`.

    Picklable, and safe to read from threads and forked workers.

    Attributes:
        lengths: int32 [N], characters of title and text, 0 for images: a cheap guess at what a
            passage costs, to sort by.
        num_documents: documents that the passages were cut from.
        has_images: whether any passage is an image.
    """

    def __init__(
        self,
        source: PassageSource,
        is_split: bool,
        documents: IdTable,
        counts: NDArray[np.int64],
        spans_N2: NDArray[np.int32],
        lengths: NDArray[np.int32],
        image_rows: NDArray[np.int64],
        text_digest: str,
    ) -> None:
        self.lengths = lengths
        self.num_documents = len(documents)
        self.has_images = len(image_rows) > 0
        self._source = source
        self._is_split = is_split
        self._documents = documents
        self._firsts = np.concatenate([[0], np.cumsum(counts)])
        self._spans_N2 = spans_N2
        self._image_rows = image_rows
        self._text_digest = text_digest
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Passage:
        """The passage of a row.

        Raises:
            IndexError: no such row; -1, a search's "nothing found", is none.
            DataError: the source has changed, or cannot be read any more.
        """
        document, piece = self._place(row)
        passage = self._source.read(document)
        if passage.id != self._documents[document]:
            raise DataError(
                f"{self._source.name} has changed: where document {self._documents[document]!r} "
                f"was, there is {passage.id!r} now"
            )
        if not self._is_split or passage.text is None:
            return Passage(self.id_of(row), passage.title, passage.text, passage.image)
        start, end = self._spans_N2[row]
        return Passage(f"{passage.id}#{piece}", passage.title, passage.text[start:end], None)

    def __iter__(self) -> Iterator[Passage]:
        return (self[row] for row in range(len(self)))

    @property
    def ids(self) -> list[str]:
        """The ids of all rows, as a new list: heavy for millions, see `id_of`."""
        return [self.id_of(row) for row in range(len(self))]

    def id_of(self, row: int) -> str:
        """The id of a row: the document's own where documents are whole, else with "#" and the
        number of the piece from 0, also where there is only one.

        Raises:
            IndexError: no such row.
        """
        document, piece = self._place(row)
        identity = self._documents[document]
        return f"{identity}#{piece}" if self._is_split else identity

    def row_of(self, identity: str) -> int:
        """The row of a passage's id.

        Raises:
            DataError: no passage has it.
        """
        rows = self._rows_of_passage(identity)
        if not rows:
            raise DataError(f"{self._source.name} has no passage with the id {identity!r}")
        return rows[0]

    def rows_of(self, identity: str) -> range:
        """The rows that an id stands for: a passage's own, or all pieces of a document.

        Gold ids of questions name documents as often as passages. Empty when nothing has the id.
        """
        rows = self._rows_of_passage(identity)
        if rows:
            return rows
        document = self._documents.find(identity)
        if document is None:
            return range(0)
        return range(int(self._firsts[document]), int(self._firsts[document + 1]))

    @property
    def fingerprint(self) -> str:
        """sha256 over ids, titles, texts, the bytes of images and where documents are cut, in
        order: equal for equal passages wherever they lie. Images are read when it is first asked
        for.

        Raises:
            DataError: an image cannot be read.
        """
        if self._fingerprint is None:
            digest = hashlib.sha256(self._text_digest.encode())
            with ThreadPoolExecutor(thread_name_prefix="pixelrag-hash") as pool:
                for block in in_blocks(self._image_rows.tolist(), _IMAGES_AT_ONCE):
                    for hashed in pool.map(self._hash_image, block):
                        digest.update(hashed)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def require_unchanged(self) -> None:
        """Look whether the source has visibly changed (size, time of writing, file names); cheap,
        and no proof: `fingerprint` of a store that is loaded anew is one.

        Raises:
            DataError: it has.
        """
        if change := self._source.changed():
            raise DataError(
                f"{self._source.name} {change} since it was opened; a knowledge base may not "
                "change during a run: write a new one beside it and start again"
            )

    def _place(self, row: int) -> tuple[int, int]:
        """Document of a row, and which of its pieces the row is."""
        if not 0 <= row < len(self):
            raise IndexError(f"passage row {row}: expected 0 to {len(self) - 1}")
        document = int(np.searchsorted(self._firsts, row, side="right")) - 1
        return document, int(row - self._firsts[document])

    def _rows_of_passage(self, identity: str) -> range:
        piece = "0"
        if self._is_split:
            identity, _, piece = identity.rpartition("#")
        document = self._documents.find(identity)
        # Written as `id_of` writes it: "7#01" is no id.
        if document is None or not piece.isdecimal() or str(int(piece)) != piece:
            return range(0)
        row = int(self._firsts[document]) + int(piece)
        return range(row, row + 1) if row < self._firsts[document + 1] else range(0)

    def _hash_image(self, row: int) -> bytes:
        path = self[row].image
        assert path is not None  # of a passage that is an image
        try:
            with opened_image(path) as file:
                return hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise DataError(f"image {path} cannot be read: {error.strerror or error}") from error


def load_passages(
    source: str,
    *,
    split: SplitKind = "none",
    length: int | None = None,
    overlap: int = 0,
    tokenizer: Any | None = None,
    dataset_split: str = "train",
    open_images: bool = True,
    image_roots: Sequence[str] = (),
    progress: Progress | None = None,
) -> PassageStore:
    """Read and check a knowledge base.

    Args:
        source: what `pixelrag.data.passage_sources` describes.
        split, length, overlap, tokenizer: how documents are cut, see
            `pixelrag.data.passage_split.Splitter`. Images are never cut.
        dataset_split: part of a data set that has several.
        open_images: decode every image once, so that a run of hours cannot end at a broken one.
            False for a process that reads what another one has checked.
        image_roots: folders in which images may lie beside that of the source, see `Roots`.
        progress: called as `progress(done, total)` while images are decoded.

    Raises:
        DataError: the source cannot be read or is empty, or any passage is bad or repeats an id:
            all are listed. A knowledge base is never used in part.
        ConfigError, ModelError: see `Splitter`.
    """
    splitter = Splitter(split, length, overlap, tokenizer)
    opened = open_source(source, dataset_split)
    scan = Scan(opened, splitter)
    documents = IdTable(scan.ids())
    if not scan.num_read:
        raise DataError(f"{source} has no passages")
    faults = scan.faults
    for position, first in documents.repeated():
        reason = f"repeats the id {documents[position]!r} of {source}:{scan.numbers[first]}"
        faults.append((scan.numbers[position], reason))
    if open_images:
        faults += scan.broken_images(progress, image_roots)
    if faults:
        bad = [BadRow(source, number, reason) for number, reason in sorted(faults)]
        num_bad = len({fault.line for fault in bad})
        raise DataError(
            f"Knowledge base {source}: {num_bad:,} of {scan.num_read:,} documents cannot be used"
            f"{listing(bad)}\nMend or remove them; a knowledge base is never used in part."
        )
    return PassageStore(
        opened,
        split != "none",
        documents,
        np.array(scan.counts, np.int64),
        np.array(scan.spans, np.int32).reshape(-1, 2),
        np.array(scan.lengths, np.int32),
        np.array(scan.image_rows, np.int64),
        scan.digest.hexdigest(),
    )
