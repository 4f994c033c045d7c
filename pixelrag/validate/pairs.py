"""A contrastive job: every row of its data, images opened; the model's small files. No weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.console import say
from pixelrag.data.files import Part, data_files
from pixelrag.data.images import image_progress_bar
from pixelrag.data.pairs import PairDataset, check_files, images_in_text, load_corpus
from pixelrag.data.tile_questions import load_tile_set
from pixelrag.errors import DataError, PixelragError
from pixelrag.validate.duration import Hardware
from pixelrag.validate.pair_figures import figures, read_model


@dataclass
class _Found:
    """What was seen so far: exit codes of faults, and the usable rows of each path, by its part."""

    codes: list[int] = field(default_factory=list)
    rows: dict[Part, list[PairDataset]] = field(default_factory=dict)
    seen: list[tuple[bool, list[Path]]] = field(default_factory=list)

    def fault(self, error: PixelragError) -> None:
        """Tell it, and go on."""
        say(str(error))
        self.codes.append(error.exit_code)


def check(config: ContrastiveConfig, hardware: Hardware | None = None) -> int:
    """Print each bad row by file, line and reason, then what the run would be.

    A file that cannot be read at all is reported like a bad row, and the others are still checked.
    Negatives beyond `data.num_hard_negatives` are not opened, as training does not open them.

    Returns:
        0, or the exit code of the first fault.
    """
    found = _Found()
    named: list[tuple[Part, str]] = [
        *(("train", path) for path in config.data.train),
        *(("eval", path) for path in config.data.eval),
        *(("text", path) for path in config.data.text),
    ]
    for part, path in named:
        try:
            _check_rows(config, part, path, found)
        except DataError as error:
            found.fault(error)
    corpus, miniv8 = config.eval.corpus, config.eval.miniv8
    roots = config.data.image_roots
    try:
        if corpus is not None:
            with image_progress_bar(f"Opening images of {corpus}") as progress:
                documents = load_corpus(corpus, progress, image_roots=roots)
            say(f"{corpus}: {len(documents)} distinct documents to search")
        if miniv8 is not None:
            with image_progress_bar(f"Opening tiles of {miniv8}") as progress:
                most = config.eval.max_questions
                tiles = load_tile_set(miniv8, most, progress, image_roots=roots)
            say(f"{miniv8}: {len(tiles.questions)} questions about {len(tiles.tiles)} tiles")
    except DataError as error:
        found.fault(error)
    try:
        read = [row for sets in found.rows.values() for rows in sets for row in rows]
        embedder, preprocessor = read_model(config, read)
        if not found.codes:
            for line in figures(config, found.rows, embedder, preprocessor, hardware or Hardware()):
                say(line)
    except PixelragError as error:
        found.fault(error)
    return found.codes[0] if found.codes else 0


def _check_rows(config: ContrastiveConfig, part: Part, path: str, found: _Found) -> None:
    """Say what is wrong with the files of a path, and keep their usable rows.

    Rows of text must not have an image, whatever `data.bad_rows` says.
    """
    files, of_text = data_files(path, part), part == "text"
    if (of_text, files) in found.seen:
        return
    found.seen.append((of_text, files))
    options: dict[str, Any] = {
        "num_hard_negatives": config.data.num_hard_negatives,
        "retrieved_negatives": config.data.retrieved_negatives,
        "image_roots": config.data.image_roots,
    }
    with image_progress_bar(f"Opening images of {path}") as progress:
        report = check_files(files, progress, **options)
    for bad in report.bad:
        say(f"{bad.file}:{bad.line}: {bad.reason}")
    usable = report.num_rows > report.num_bad_rows
    images: list[str] = []
    if usable:
        rows = PairDataset(files, "skip", report=report, quiet=True, **options)
        images = list(images_in_text(rows)) if of_text else []
        found.rows.setdefault(part, []).append(rows)
    for fault in images:
        say(fault)
    say(
        f"{path}: {report.num_rows} rows, {report.num_documents} distinct documents, "
        f"{report.num_bad_rows} bad rows"
    )
    refused = bool(report.bad) and (config.data.bad_rows == "error" or not usable)
    if refused or images:
        found.codes.append(DataError.exit_code)
