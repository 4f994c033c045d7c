"""What rows cost to train on, estimated before they are tokenised: to share them out over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pixelrag.data.schema import Document, PairRow

CHARACTERS_PER_TOKEN = 4
"""Of English text and code, about."""
PIXELS_PER_TOKEN = 32 * 32
"""Of Qwen3-VL: 2 x 2 patches of 16 x 16 pixels become one token."""
VISION_FACTOR = 2
"""A visual token also costs its patches' way through the vision tower, about as much again."""


def row_costs(
    rows: Sequence[PairRow],
    pixels: Mapping[Path, int],
    *,
    query_max_length: int,
    document_max_length: int,
    max_visual_tokens: int,
) -> NDArray[np.float64]:
    """Tokens of each row's query and documents, those of images weighted; [R], above 0.

    Args:
        rows: the rows.
        pixels: width times height of every image of theirs; an image that is missing here counts
            as the largest that the model is shown.
        query_max_length, document_max_length: tokens, at most.
        max_visual_tokens: tokens of an image, at most.
    """

    def text(characters: int, most: int) -> float:
        return min(characters / CHARACTERS_PER_TOKEN, most)

    def document(of: Document) -> float:
        if of.text is not None:
            return text(len(of.text), document_max_length)
        assert of.image is not None  # a document is one of the two
        tokens = pixels.get(of.image, max_visual_tokens * PIXELS_PER_TOKEN) / PIXELS_PER_TOKEN
        return VISION_FACTOR * min(tokens, max_visual_tokens)

    return np.array(
        [
            # Special tokens, templates and instructions: a little for every sequence.
            text(len(row.query), query_max_length)
            + sum(map(document, row.documents))
            + 2 * (1 + len(row.documents))
            for row in rows
        ]
    )


def images_of(rows: Iterable[PairRow]) -> list[Path]:
    """Distinct images of the rows."""
    return list(dict.fromkeys(d.image for row in rows for d in row.documents if d.image))
