"""PixelRAG's question files ("miniv8"): questions, and the articles whose tiles answer them.

    {"tiles_dir": "tiles",                          relative to the working directory
     "questions": [{"id": 7, "problem": "...", "answer": "..."}],
     "golden_mapping": {"7": ["article", ...]}}

A tile is of the article that its file is called after, see `pixelrag.data.tiles`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pixelrag.data.images import Progress, check_images
from pixelrag.data.lines import BadRow, listing
from pixelrag.data.roots import Roots
from pixelrag.data.schema import Document, kind_of, usable_text
from pixelrag.data.tiles import article_of
from pixelrag.errors import DataError
from pixelrag.json_text import read_json

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm"})


@dataclass(frozen=True, slots=True)
class TileQuestion:
    """A question; ``tiles`` are the numbers of those that show an article which answers it."""

    id: str
    text: str
    answer: str
    tiles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TileSet:
    """Tiles by number, and the questions about them."""

    tiles: list[Document]
    questions: list[TileQuestion]


def load_tile_set(
    path: str | Path,
    max_questions: int | None = None,
    progress: Progress | None = None,
    *,
    image_roots: Sequence[str] = (),
) -> TileSet:
    """Read a question file and decode all its tiles.

    Args:
        path: the JSON file.
        max_questions: use the first so many.
        progress: told about every few tiles.
        image_roots: folders in which tiles may lie beside those of the file and of the process.

    Raises:
        DataError: the file, a question or a tile cannot be used, or a question's articles have no
            tile, so that it could not be answered whatever the model did. All faults at once.
    """
    content = _read(Path(path))
    folder = Path(content["tiles_dir"])
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES)
    if not found:
        where = "does not exist" if not folder.is_dir() else "holds no image"
        raise DataError(
            f"{path}: tiles_dir {folder} {where}; it is relative to the working directory, "
            f"{Path.cwd()}"
        )
    by_article: dict[str, list[int]] = {}
    for number, tile in enumerate(found):
        by_article.setdefault(article_of(tile), []).append(number)
    faults: list[BadRow] = []
    questions = [
        _question(i, entry, content["golden_mapping"], by_article, str(path), faults)
        for i, entry in enumerate(content["questions"][:max_questions], start=1)
    ]
    tiles = [Document.of_image(tile) for tile in found]
    roots = Roots([path, "here"], image_roots)
    for tile, reason in check_images(found, progress, roots=roots).items():
        faults.append(BadRow(str(path), 0, f"tile {tile} {reason}"))
    first: dict[str, int] = {}
    for number, question in enumerate(questions, start=1):
        if first.setdefault(question.id, number) < number:
            reason = f"repeats the id {question.id!r} of question {first[question.id]}"
            faults.append(BadRow(str(path), number, reason))
    if faults:
        raise DataError(f"{path}: {len(faults)} faults (question numbers from 1){listing(faults)}")
    if not questions:
        raise DataError(f"{path}: has no questions")
    return TileSet(tiles, questions)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    kinds = {"tiles_dir": str, "questions": list, "golden_mapping": dict}
    got = content if isinstance(content, dict) else {}
    wrong = [name for name, kind in kinds.items() if not isinstance(got.get(name), kind)]
    if wrong:
        raise DataError(
            f"{path}: expected an object with tiles_dir (a string), questions (a list) and "
            f"golden_mapping (an object); wrong or missing: {', '.join(wrong)}"
        )
    reasons: list[str] = []
    if usable_text(content["tiles_dir"], "tiles_dir", reasons) is None:
        raise DataError(f"{path}: {reasons[0]}")
    return content


def _question(
    number: int,
    entry: Any,
    golden: Mapping[str, Any],
    by_article: Mapping[str, list[int]],
    path: str,
    faults: list[BadRow],
) -> TileQuestion:
    reasons: list[str] = []
    entry = entry if isinstance(entry, dict) else {}
    identity = entry.get("id", "")
    if not isinstance(identity, str | int) or isinstance(identity, bool):
        reasons.append(f"id is a string or a number, got {kind_of(identity)}")
    identity = str(identity)
    text = usable_text(entry.get("problem"), "problem", reasons)
    answer = usable_text(entry.get("answer"), "answer", reasons)
    articles = golden.get(identity)
    if not isinstance(articles, list):
        reasons.append(
            f"golden_mapping[{identity!r}] is a list of articles, got {kind_of(articles)}"
        )
        articles = []
    tiles = [tile for article in articles for tile in by_article.get(str(article), ())]
    if articles and not tiles:
        reasons.append(f"no tile shows an article of golden_mapping[{identity!r}], {articles}")
    faults += [BadRow(path, number, reason) for reason in reasons]
    return TileQuestion(identity, text or "", answer or "", tuple(sorted(set(tiles))))
