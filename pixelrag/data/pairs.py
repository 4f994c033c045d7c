"""Checking data files, and the dataset that training draws its rows from.

Opening a dataset reads every row and decodes every image it will use, once each, so that a run of
hours cannot end at a broken file. All problems of all rows are collected before anything is said.
"""

import hashlib
import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pixelrag.data.images import Progress, check_images
from pixelrag.data.lines import BadRow, StrPath, file_labels, listing, parsed_lines
from pixelrag.data.roots import Roots
from pixelrag.data.schema import Document, PairRow, RowError, parse_corpus_entry, parse_row
from pixelrag.errors import ConfigError, DataError

logger = logging.getLogger("pixelrag")


@dataclass(frozen=True, slots=True)
class DataReport:
    """What `check_files` found.

    Attributes:
        num_rows: rows read, good and bad (blank lines are no rows).
        num_documents: distinct documents named by the good rows.
        bad: every fault, in the order of the files.
        fingerprint: hash of the files' bytes, in order. It tells whether two ranks, or a run and
            its resumption, read the same data; images are not part of it.
    """

    num_rows: int
    num_documents: int
    bad: list[BadRow]
    fingerprint: str

    @property
    def num_bad_rows(self) -> int:
        """Lines with at least one fault."""
        return len({(fault.file, fault.line) for fault in self.bad})

    def to_json(self) -> str:
        """As text, to hand to other ranks or to a file."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "DataReport":
        """Undo `to_json`."""
        fields = json.loads(text)
        return cls(**fields | {"bad": [BadRow(**fault) for fault in fields["bad"]]})


def check_files(
    paths: StrPath | Sequence[StrPath],
    progress: Progress | None = None,
    workers: int | None = None,
    *,
    num_hard_negatives: int | None = None,
    retrieved_negatives: bool = False,
    image_roots: Sequence[str] = (),
) -> DataReport:
    """Read every row of every file and decode every image, in parallel, each distinct one once.

    Args:
        paths: JSONL files.
        progress: called as `progress(done, total)` while images are decoded.
        workers: decoding threads (default: one a core, at most 16).
        num_hard_negatives: images of negatives beyond this many a row are not opened, as training
            will not use them (None = all are).
        retrieved_negatives: as for `PairDataset`.
        image_roots: folders in which images may lie beside those of the files, see `Roots`.

    Returns:
        The report; bad rows do not raise.

    Raises:
        DataError: a file is missing, unreadable, a folder, or has no rows.
    """
    lines, fingerprint = _read(paths, num_hard_negatives, retrieved_negatives)
    return _check(lines, fingerprint, Roots(names_of(paths), image_roots), progress, workers)


class PairDataset:
    """The usable rows of some data files, in the order of the files.

    Args:
        paths: JSONL files.
        bad_rows: "error" refuses to start on a bad row, "skip" leaves bad rows out and says so.
        num_hard_negatives: at most this many negatives a row, the first ones (None = all).
        retrieved_negatives: rows of images that name no negatives have those of `retrieve_top20`.
        image_roots, progress, workers: as for `check_files`.
        report: what `check_files` said about the same files with the same cap, when it has run
            already (on rank 0, say, whose report the others get); then no image is opened here.
        quiet: nothing is logged of bad rows that are left out; the caller tells of them.

    Attributes:
        rows: the rows.
        files: which of them are of which file, by the file's path as given.
        report: the report they were chosen by.

    Raises:
        DataError: as `check_files`; or a row is bad and `bad_rows` is "error"; or no row is usable;
            or `report` is about other data.
        ConfigError: an argument is out of its range.
    """

    def __init__(
        self,
        paths: StrPath | Sequence[StrPath],
        bad_rows: Literal["error", "skip"] = "error",
        num_hard_negatives: int | None = None,
        *,
        retrieved_negatives: bool = False,
        image_roots: Sequence[str] = (),
        progress: Progress | None = None,
        workers: int | None = None,
        report: DataReport | None = None,
        quiet: bool = False,
    ) -> None:
        if bad_rows not in ("error", "skip"):
            raise ConfigError(f"data.bad_rows: got {bad_rows!r}, expected 'error' or 'skip'")
        if num_hard_negatives is not None and num_hard_negatives < 0:
            raise ConfigError(
                f"data.num_hard_negatives: got {num_hard_negatives}, expected 0 or more, "
                "or null for all that a row has"
            )
        names = names_of(paths)
        lines, fingerprint = _read(names, num_hard_negatives, retrieved_negatives)
        if report is None:
            report = _check(lines, fingerprint, Roots(names, image_roots), progress, workers)
        elif report.fingerprint != fingerprint:
            raise DataError(
                f"{', '.join(names)}: not the data that was checked (got fingerprint "
                f"{fingerprint[:12]}, expected {report.fingerprint[:12]}); every process must see "
                "the same files, and they may not change during the run"
            )
        refuse_or_skip(report, bad_rows, quiet=quiet)
        bad = {(fault.file, fault.line) for fault in report.bad}
        self.report = report
        kept = [line for line in lines if line.row and (line.file, line.number) not in bad]
        self.rows = [line.row for line in kept if line.row]
        counts = Counter(line.file for line in kept)
        ends = itertools.accumulate(counts[name] for name in names)
        self.files = {
            name: range(start, end)
            for name, (start, end) in zip(names, itertools.pairwise([0, *ends]), strict=True)
        }

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> PairRow:
        return self.rows[index]

    def __iter__(self) -> Iterator[PairRow]:
        return iter(self.rows)


def images_in_text(rows: Iterable[PairRow]) -> Iterator[str]:
    """Say of each row of `data.text` with an image that such rows must not have one."""
    for row in rows:
        if image := next((d.image for d in row.documents if d.image), None):
            yield (
                f"{row.sample_id}: document {image} is an image, and data.text is for rows of "
                "text; name the file in data.train"
            )


def corpus_of(rows: Iterable[PairRow]) -> list[Document]:
    """Every distinct document of the rows, positives and negatives, in order of appearance."""
    distinct: dict[str, Document] = {}
    for row in rows:
        for document in row.documents:
            distinct.setdefault(document.key, document)
    return list(distinct.values())


def load_corpus(
    path: StrPath,
    progress: Progress | None = None,
    workers: int | None = None,
    *,
    image_roots: Sequence[str] = (),
) -> dict[str, Document]:
    """Read a corpus: JSONL of `{"id": ..., "text": ...}` or `{"id": ..., "chunk_path": ...}`.

    Returns:
        The distinct documents by id, in the order of the file. A document that stands there twice
        under two ids is kept once, under the first: nothing could tell the two apart when they are
        ranked.

    Raises:
        DataError: the file cannot be read or has no rows, or any entry is bad or repeats an id.
            Entries cannot be skipped, since that would change what the scores mean.
    """
    name = os.fspath(path)
    distinct: dict[str, tuple[str, Document]] = {}
    first_line: dict[str, int] = {}
    images: dict[Path, int] = {}
    faults: list[BadRow] = []
    num_entries = 0
    for line, entry in parsed_lines(path, parse_corpus_entry):
        num_entries += 1
        if isinstance(entry, RowError):
            faults += [BadRow(name, line, reason) for reason in entry.reasons]
            images |= dict.fromkeys(entry.images, line)
            continue
        identity, document = entry
        if identity in first_line:
            reason = f"repeats the id {identity!r} of line {first_line[identity]}"
            faults.append(BadRow(name, line, reason))
        first_line.setdefault(identity, line)
        distinct.setdefault(document.key, (identity, document))
        if document.image is not None:
            images.setdefault(document.image, line)
    roots = Roots([path], image_roots)
    for image, reason in check_images(list(images), progress, workers, roots=roots).items():
        faults.append(BadRow(name, images[image], f"image {image} {reason}"))
    if faults:
        faults.sort(key=lambda fault: fault.line)
        num_bad = len({fault.line for fault in faults})
        raise DataError(
            f"Corpus {name}: {num_bad:,} of {num_entries:,} entries cannot be used"
            f"{listing(faults)}\nMend or remove them; a corpus is never used in part."
        )
    if not distinct:
        raise DataError(f"Corpus {name} has no entries; expected one JSON object a line")
    if num_entries > len(distinct):
        repeated = num_entries - len(distinct)
        logger.info("Corpus %s: %d entries repeat a document and are kept once", name, repeated)
    return dict(distinct.values())


@dataclass(slots=True)
class _Line:
    """A row, or what is left of a broken one, and the images that it needs."""

    file: str
    number: int
    row: PairRow | None
    reasons: list[str]
    images: list[Path]


def _read(
    paths: StrPath | Sequence[StrPath], num_hard_negatives: int | None, retrieved: bool
) -> tuple[list[_Line], str]:
    """Every line of every file, and the hash of all bytes; no image is opened.

    Documents that several rows name are one object, and negatives beyond the cap are dropped.
    Faults of whole files raise, all at once.
    """
    names = names_of(paths)
    faults = [f"{name} is named twice" for name in sorted({n for n in names if names.count(n) > 1})]
    if not names:
        faults.append("no file is named; name at least one JSONL file")
    lines: list[_Line] = []
    shared: dict[str, Document] = {}
    digest = hashlib.sha256()
    for name, label in zip(names, file_labels(names), strict=True):
        num_before = len(lines)

        def parse(obj: object, file: Path, number: int, label: str = label) -> PairRow:
            return parse_row(obj, file, number, label=label, retrieved=retrieved)

        try:
            for number, row in parsed_lines(name, parse, digest):
                if isinstance(row, RowError):
                    lines.append(_Line(name, number, None, row.reasons, row.images))
                    continue
                named = [*row.positives, *row.negatives[:num_hard_negatives]]
                used = tuple(shared.setdefault(document.key, document) for document in named)
                images = [document.image for document in used if document.image]
                count = len(row.positives)
                row = PairRow(row.query, used[:count], used[count:], row.sample_id)
                lines.append(_Line(name, number, row, [], images))
        except DataError as error:
            faults.append(str(error))
        else:
            if len(lines) == num_before:
                faults.append(f"{name} has no rows; expected one JSON object a line")
        digest.update(b"\x00")  # so that a line moved from one file to the next is noticed
    if faults:
        raise DataError("Data files cannot be used:\n  " + "\n  ".join(faults))
    return lines, digest.hexdigest()


def _check(
    lines: list[_Line],
    fingerprint: str,
    roots: Roots,
    progress: Progress | None,
    workers: int | None,
) -> DataReport:
    """Decode the images that the lines need, and report."""
    images = dict.fromkeys(image for line in lines for image in line.images)
    broken = check_images(list(images), progress, workers, roots=roots)
    bad: list[BadRow] = []
    documents: set[str] = set()
    for line in lines:
        reasons = [f"image {image} {broken[image]}" for image in line.images if image in broken]
        reasons = line.reasons + reasons
        bad += [BadRow(line.file, line.number, reason) for reason in reasons]
        if line.row and not reasons:
            documents |= {document.key for document in line.row.documents}
    return DataReport(len(lines), len(documents), bad, fingerprint)


def refuse_or_skip(report: DataReport, bad_rows: str, *, quiet: bool = False) -> None:
    """Raise DataError on bad rows, or say in the log, unless quiet, how many are left out."""
    if not report.bad:
        return
    num_bad = report.num_bad_rows
    summary = f"{num_bad:,} of {report.num_rows:,} rows cannot be used{listing(report.bad)}"
    if num_bad == report.num_rows:
        raise DataError(f"No row is left: {summary}")
    if bad_rows == "error":
        raise DataError(
            f"{summary}\n`pixelrag validate` lists all of them; "
            "`data.bad_rows: skip` trains without them."
        )
    if not quiet:
        logger.warning("Skipping bad rows: %s\n`pixelrag validate` lists all of them.", summary)


def names_of(paths: StrPath | Sequence[StrPath]) -> list[str]:
    """One path or several, as texts."""
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    return [os.fspath(path) for path in paths]
