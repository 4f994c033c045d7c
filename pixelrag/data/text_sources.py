"""Where text rows come from: JSONL files, other files that `datasets` reads, and the Hub.

A source is named by a string:

    data/train.jsonl             JSON lines, read here, faults named by line
    data/train.parquet           also .json, .csv, .arrow, .txt (each line a text)
    data/folder                  a data set written by `save_to_disk`
    org/name                     a data set of the Hugging Face Hub
    org/name:config[split]       one configuration and split of it; splits may be sliced,
                                 as in org/name[train[:1%]]

Reading a Hub data set as a stream and taking the first rows would take whatever its author put
first; so a stream is shuffled before it is cut off, and so is everything else that is cut off.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pixelrag.data.chat import without_nulls
from pixelrag.data.lines import line_places, parsed_lines
from pixelrag.data.schema import RowError, decode_line
from pixelrag.errors import DataError

STREAM_SHUFFLE_SEED = 25
_JSON_LINES = (".jsonl", ".ndjson")
_LOADERS = {
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".arrow": "arrow",
    ".txt": "text",
}
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.+-]+))?(\[(?P<split>.+)\])?")


@dataclass(frozen=True, slots=True)
class TextSource:
    """A named source.

    Attributes:
        name: path or Hub name.
        config: configuration of a Hub data set.
        split: which of its parts.
        kind: "lines", a loader of `datasets`, "folder" or "hub".
    """

    name: str
    config: str | None
    split: str
    kind: str

    @property
    def label(self) -> str:
        """A short name for sample ids, without the folders."""
        if self.kind != "hub":
            return Path(self.name).name
        config = f":{self.config}" if self.config else ""
        return f"{self.name}{config}[{self.split}]"


def parse_source(text: str, split: str = "train") -> TextSource:
    """What a string names.

    Args:
        text: see this module's description.
        split: of data sets that do not name their own.

    Raises:
        DataError: it is neither a path of a known kind nor a Hub name.
    """
    path = Path(text)
    suffix = path.suffix.lower()
    if path.is_dir():
        return TextSource(text, None, split, "folder")
    if suffix in _JSON_LINES:
        return TextSource(text, None, split, "lines")
    if suffix in _LOADERS:
        return TextSource(text, None, split, _LOADERS[suffix])
    if path.exists():
        known = ", ".join([*_JSON_LINES, *_LOADERS])
        raise DataError(f"{text} has an ending that says nothing of its form; known are {known}")
    found = _HUB_NAME.fullmatch(text)
    if found is None or text.startswith("."):
        raise DataError(
            f"{text!r} is no file or folder (looked for in {Path.cwd()}) and cannot be the name of "
            "a Hugging Face data set, ORG/NAME, ORG/NAME:CONFIG or ORG/NAME:CONFIG[SPLIT]"
        )
    return TextSource(found["name"], found["config"], found["split"] or split, "hub")


def read_rows(
    source: TextSource,
    *,
    streaming: bool = False,
    shuffle: bool = False,
    seed: int = STREAM_SHUFFLE_SEED,
    buffer_size: int = 10_000,
) -> Iterator[tuple[int, object]]:
    """(number, row) of each row of a source.

    Args:
        source: what to read.
        streaming: read data sets as they come instead of fetching them whole first. A shuffled
            stream numbers its rows in the order in which they come out, which the seed decides.
        shuffle: in the order of a draw by `seed`; a stream is shuffled within a buffer.
        seed: of the draw.
        buffer_size: rows that a stream is shuffled within.

    Yields:
        Numbers count lines from 1 and rows of data sets from 0; a row is its JSON value, or the
        `RowError` of a line that is no JSON.

    Raises:
        DataError: the source cannot be read.
    """
    if source.kind == "lines":
        return _drawn_lines(source, seed) if shuffle else _lines(source)
    return _records(source, streaming, seed if shuffle else None, buffer_size)


def _lines(source: TextSource) -> Iterator[tuple[int, object]]:
    return parsed_lines(source.name, lambda value, file, line: value)


def _drawn_lines(source: TextSource, seed: int) -> Iterator[tuple[int, object]]:
    """Lines in the order of a draw; only their places in the file are kept."""
    places = np.fromiter(line_places(source.name), dtype=np.dtype((np.int64, 2)))
    with open(source.name, "rb") as handle:
        for index in _draw(len(places), seed):
            line, start = (int(value) for value in places[index])
            handle.seek(start)
            try:
                yield line, decode_line(handle.readline(), Path(source.name), line)
            except RowError as error:
                yield line, error


def _records(
    source: TextSource, streaming: bool, seed: int | None, buffer_size: int
) -> Iterator[tuple[int, object]]:
    data = _open(source, streaming)
    if not hasattr(data, "__len__"):
        stream = data if seed is None else data.shuffle(seed=seed, buffer_size=buffer_size)
        yield from _without_blank_lines(source, _guarded(source, enumerate(stream)))
        return
    if seed is None:
        rows: Iterator[tuple[int, Any]] = enumerate(data)
    else:
        rows = ((number, data[number]) for number in _draw(len(data), seed))
    yield from _without_blank_lines(source, _guarded(source, rows))


def _without_blank_lines(
    source: TextSource, rows: Iterator[tuple[int, Any]]
) -> Iterator[tuple[int, object]]:
    """Plain rows; of a text file the lines that hold something, as of JSON lines."""
    for number, row in rows:
        if source.kind != "text" or row["text"].strip():
            yield number, _plain(row)


def _open(source: TextSource, streaming: bool) -> Any:
    import datasets

    try:
        if source.kind == "folder":
            data = datasets.load_from_disk(source.name)
            if isinstance(data, datasets.DatasetDict):
                data = data[source.split]
            return data.to_iterable_dataset() if streaming else data
        if source.kind == "hub":
            return datasets.load_dataset(
                source.name, source.config, split=source.split, streaming=streaming
            )
        if not os.path.isfile(source.name):
            raise FileNotFoundError(f"it does not exist (looked for in {Path.cwd()})")
        return datasets.load_dataset(
            source.kind, data_files=source.name, split="train", streaming=streaming
        )
    except Exception as error:
        # `datasets` and what lies below it raise a zoo of types; all mean that nothing came.
        raise _unreadable(source, error) from error


def _guarded(source: TextSource, rows: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise _unreadable(source, error) from error
        yield row


def _unreadable(source: TextSource, error: Exception) -> DataError:
    reason = str(error).strip() or type(error).__name__
    return DataError(f"{source.name} cannot be read as a data set: {reason}")


def _plain(row: Any) -> object:
    # Tables fill what a row does not have with nulls, at every depth.
    return without_nulls(row)


def _draw(num_rows: int, seed: int) -> list[int]:
    # Raw draws: NumPy promises these in every release, but not `Generator.permutation`.
    draws = np.random.PCG64(np.random.SeedSequence([seed, num_rows]))
    return np.argsort(draws.random_raw(num_rows), kind="stable").tolist()
