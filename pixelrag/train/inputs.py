"""What a contrastive job reads: its rows, what is held out, and whether the model can read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.data.files import files_of
from pixelrag.data.images import image_progress_bar
from pixelrag.data.pairs import DataReport, PairDataset, check_files, load_corpus
from pixelrag.data.schema import Document, PairRow
from pixelrag.data.tile_questions import TileSet, load_tile_set
from pixelrag.distributed.collectives import from_main
from pixelrag.distributed.together import together
from pixelrag.errors import DataError


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What to evaluate on; at least one of ``rows`` and ``tiles`` is there.

    Attributes:
        rows: held-out rows.
        corpus: documents to search for them, by id; None = all documents of the rows.
        tiles: questions about tiles; None without any.
    """

    rows: list[PairRow]
    corpus: dict[str, Document] | None
    tiles: TileSet | None = None


def open_dataset(config: ContrastiveConfig, files: list[Path]) -> PairDataset:
    """Check files and images on rank 0, open them on every rank; a collective.

    Raises:
        DataError: a file or a row cannot be used; on all ranks.
    """
    options: dict[str, Any] = {
        "num_hard_negatives": config.data.num_hard_negatives,
        "retrieved_negatives": config.data.retrieved_negatives,
        "image_roots": config.data.image_roots,
    }

    def check() -> str:
        with image_progress_bar(f"Opening images of {', '.join(map(str, files))}") as progress:
            return check_files(files, progress, **options).to_json()

    report = DataReport.from_json(from_main(check))
    with together():
        return PairDataset(files, config.data.bad_rows, report=report, **options)


def open_held_out(config: ContrastiveConfig) -> HeldOut | None:
    """Open ``data.eval``, ``eval.corpus`` and ``eval.miniv8``; None without any. A collective.

    Raises:
        DataError: as ``open_dataset``; or an entry of the corpus, a question or a tile cannot be
            used.
    """
    options = config.eval
    if not config.data.eval and options.miniv8 is None:
        return None
    rows: list[PairRow] = []
    if config.data.eval:
        files = from_main(lambda: files_of(config.data.eval, "eval"))
        rows = open_dataset(config, files).rows[: options.max_rows]
    roots, file, questions = config.data.image_roots, options.corpus, options.miniv8
    corpus = None
    if file:
        corpus = from_main(lambda: load_corpus(file, image_roots=roots))
    tiles = from_main(lambda: _open_tiles(config, questions)) if questions else None
    return HeldOut(rows, corpus, tiles)


def _open_tiles(config: ContrastiveConfig, questions: str) -> TileSet:
    with image_progress_bar(f"Opening tiles of {questions}") as progress:
        return load_tile_set(
            questions, config.eval.max_questions, progress, image_roots=config.data.image_roots
        )


def require_text(rows: Iterable[PairRow], option: str = "model.name_or_path") -> None:
    """Refuse rows with images, before a text model meets the first of them hours later.

    Raises:
        DataError: names the first.
    """
    for row in rows:
        for document in row.documents:
            if document.image is not None:
                raise DataError(
                    f"{row.sample_id}: document {document.image} is an image, but the model reads "
                    "text only; name a vision model such as Qwen/Qwen3-VL-Embedding-2B in "
                    f"{option}"
                )
