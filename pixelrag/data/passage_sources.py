"""Where passages come from, and how one of them is read again without keeping them all.

    kb.jsonl            lines of {"id": "7", "title": "...", "text": "..."}
                        or       {"id": "7", "title": "...", "chunk_path": "tiles/7.png"}
    tiles/              a folder of images, searched to every depth; the path below it is the id
    saved/  org/name    a Hugging Face data set, on disk or by name (`pixelrag.data.text_sources`)
    kb.parquet, .csv    another file that `datasets` reads, with columns id, title and text

`title` may be missing. A data set without a column `id` gets its row numbers, from 0, as ids.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pixelrag.data.lines import line_places, parsed_lines
from pixelrag.data.schema import (
    RowError,
    decode_line,
    kind_of,
    parse_corpus_entry,
    usable_text,
)
from pixelrag.data.text_sources import TextSource, parse_source
from pixelrag.errors import DataError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
_SAVED = ("state.json", "dataset_dict.json")


@dataclass(frozen=True, slots=True)
class Passage:
    """What a search finds: a text with its title, or an image.

    Attributes:
        id: tells it from every other passage of its knowledge base.
        title: of the document that it comes from; "" where there is none.
        text: the passage, or None.
        image: absolute path of the image, or None; exactly one of the two is given.
    """

    id: str
    title: str
    text: str | None
    image: Path | None


class PassageSource(Protocol):
    """Documents in an order, read twice: all at once, and one by one later."""

    name: str
    folder: Path
    """Where relative paths of images start."""

    def scan(self) -> Iterator[tuple[int, Passage | RowError]]:
        """(line or row number, document or what is wrong with it), from the first to the last."""

    def read(self, position: int) -> Passage:
        """A document by its position among those that `scan` gave.

        Raises:
            DataError: it is not there any more, or unreadable.
        """

    def changed(self) -> str | None:
        """What has visibly changed since the scan, or None."""


def open_source(name: str, split: str = "train") -> PassageSource:
    """The source that a name stands for.

    Args:
        name: see this module's description.
        split: which part of a data set that has several.

    Raises:
        DataError: it does not exist, or is of an unknown kind.
    """
    path = Path(name)
    if path.is_dir() and not any((path / file).is_file() for file in _SAVED):
        return Tiles(path)
    source = parse_source(name, split)
    return JsonLines(path) if source.kind == "lines" else Table(source)


class JsonLines:
    """A JSONL file. Only the place of each line is kept, and lines are read with `pread`, which
    threads and forked workers may share."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = Path(os.path.abspath(path))
        self.folder = self._path.parent
        self._starts = np.zeros(0, np.int64)
        self._numbers = np.zeros(0, np.int64)
        self._handle: int | None = None
        self._state: tuple[int, int] | None = None

    def scan(self) -> Iterator[tuple[int, Passage | RowError]]:
        # Before the first line is read: what is written in the meantime counts as a change.
        self._state = self._stat()
        starts, numbers = array("q"), array("q")
        lines = zip(parsed_lines(self.name, parse_passage), line_places(self.name), strict=True)
        for (number, parsed), (_, start) in lines:
            starts.append(start)
            numbers.append(number)
            yield number, parsed
        self._starts = np.array(starts, np.int64)
        self._numbers = np.array(numbers, np.int64)

    def read(self, position: int) -> Passage:
        number = int(self._numbers[position])
        try:
            raw = self._line(int(self._starts[position]))
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error.strerror or error}") from error
        try:
            return parse_passage(decode_line(raw, self._path, number), self._path, number)
        except RowError as error:
            raise DataError(f"{error}: the file has changed since it was opened") from error

    def changed(self) -> str | None:
        now = self._stat()
        if now == self._state:
            return None
        return "is not there any more" if now is None else "has been written to"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handle": None}

    def __del__(self) -> None:
        if (handle := getattr(self, "_handle", None)) is not None:
            os.close(handle)

    def _line(self, start: int) -> bytes:
        if self._handle is None:
            self._handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        raw, size = b"", 4096
        while b"\n" not in raw:
            block = os.pread(self._handle, size, start + len(raw))
            if not block:
                break
            raw, size = raw + block, size * 2
        return raw.partition(b"\n")[0]

    def _stat(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None  # the first read says why
        return found.st_size, found.st_mtime_ns


class Tiles:
    """A folder of images. Ids are paths below it, in the order of their names."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self.folder = Path(os.path.abspath(folder))
        self._names: list[str] = []

    def scan(self) -> Iterator[tuple[int, Passage | RowError]]:
        self._names = self._list()
        if not self._names:
            known = ", ".join(IMAGE_SUFFIXES)
            raise DataError(
                f"{self.name} holds no image ({known}) and is no data set written by save_to_disk"
            )
        for number, name in enumerate(self._names):
            if name.isprintable():  # half a surrogate pair stands for a byte that is no UTF-8
                yield number, self.read(number)
            else:
                reason = f"the file name {name!a} cannot be an id; rename it"
                yield number, RowError(self.name, [reason])

    def read(self, position: int) -> Passage:
        name = self._names[position]
        return Passage(name, "", None, self.folder / name)

    def changed(self) -> str | None:
        return None if self._list() == self._names else "holds other files"

    def _list(self) -> list[str]:
        found = [
            (Path(folder) / file).relative_to(self.folder).as_posix()
            for folder, _, files in os.walk(self.folder)
            for file in files
            if file.lower().endswith(IMAGE_SUFFIXES) and not file.startswith(".")
        ]
        return sorted(found)


class Table:
    """A data set that `datasets` opens: on disk, memory-mapped."""

    def __init__(self, source: TextSource) -> None:
        self.name = source.name
        where = Path(os.path.abspath(source.name))
        self.folder = where if where.is_dir() else where.parent
        self._source = source
        self._data: Any = None

    def scan(self) -> Iterator[tuple[int, Passage | RowError]]:
        self._data = _open_table(self._source)
        rows = enumerate(self._data)
        while True:
            try:
                number, row = next(rows)
            except StopIteration:
                return
            except Exception as error:
                raise DataError(f"{self.name} cannot be read as a data set: {error}") from error
            try:
                yield number, self._parse(row, number)
            except RowError as error:
                yield number, error

    def read(self, position: int) -> Passage:
        try:
            row = self._data[position]
        except Exception as error:
            raise DataError(f"{self.name}: row {position} cannot be read: {error}") from error
        return self._parse(row, position)

    def changed(self) -> str | None:
        return None  # a memory map; `datasets` never writes to a file that it has finished

    def _parse(self, row: dict[str, object], number: int) -> Passage:
        if "id" not in row:
            row = row | {"id": number}
        return parse_passage(row, self.folder / "row", number)


def parse_passage(obj: object, file: Path, line: int) -> Passage:
    """Turn the value of one line or row into a passage; no image is opened.

    Args:
        obj: the decoded line.
        file: the file it stands in; relative image paths start from its folder.
        line: its number.

    Raises:
        RowError: listing everything that is wrong with it.
    """
    identity, document, reasons = None, None, []
    images: list[Path] = []
    try:
        identity, document = parse_corpus_entry(obj, file, line)
    except RowError as error:
        reasons, images = list(error.reasons), error.images
    title = obj.get("title") if isinstance(obj, Mapping) else None
    if title is not None and not isinstance(title, str):
        reasons.append(f"title is a string, got {kind_of(title)}")
    elif title and title.strip():
        usable_text(title, "title", reasons)
    if reasons or identity is None or document is None:
        images = [document.image] if document and document.image else images
        raise RowError(f"{file}:{line}", reasons, images)
    return Passage(identity, (title or "").strip(), document.text, document.image)


def _open_table(source: TextSource) -> Any:
    import datasets

    try:
        if source.kind == "folder":
            data = datasets.load_from_disk(source.name)
            data = data[source.split] if isinstance(data, datasets.DatasetDict) else data
        elif source.kind == "hub":
            data = datasets.load_dataset(source.name, source.config, split=source.split)
        elif not os.path.isfile(source.name):
            raise FileNotFoundError(f"it does not exist (looked for in {Path.cwd()})")
        else:
            data = datasets.load_dataset(source.kind, data_files=source.name, split="train")
    except Exception as error:
        # `datasets` and what lies below it raise a zoo of types; all mean that nothing came.
        reason = str(error).strip() or type(error).__name__
        raise DataError(f"{source.name} cannot be read as a data set: {reason}") from error
    named = [name for name in ("id", "title", "text", "chunk_path") if name in data.column_names]
    if not {"text", "chunk_path"} & set(named):
        columns = ", ".join(data.column_names)
        raise DataError(f"{source.name} has no column text or chunk_path; it has {columns}")
    return data.select_columns(named)
