"""Lengths in tokens of a sample of texts, and in visual tokens of images."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from PIL import Image

from pixelrag.data.archives import image_source
from pixelrag.data.images import FORMATS, strict_decoding
from pixelrag.errors import DataError

SAMPLE = 2000
"""Rows that are measured of a file with more."""
CHARACTERS_A_TOKEN = 3
"""A cautious guess, where no tokenizer is there."""
_FACTOR = 32  # pixels on a side of one of Qwen3-VL's visual tokens
_T = TypeVar("_T")


class Sample(Generic[_T]):
    """Up to `SAMPLE` of the items added, each as likely as any other; `seen` counts all."""

    def __init__(self) -> None:
        self.items: list[_T] = []
        self.seen = 0
        self._draw = random.Random(0)

    def add(self, item: _T) -> None:
        """Keep it, perhaps in the place of another (Vitter's algorithm R)."""
        self.seen += 1
        if len(self.items) < SAMPLE:
            self.items.append(item)
        elif (place := self._draw.randrange(self.seen)) < SAMPLE:
            self.items[place] = item


def quantile(lengths: Iterable[int], share: float) -> int:
    """The smallest of the lengths that `share` of them do not exceed."""
    return int(np.quantile(np.fromiter(lengths, np.int64), share, method="inverted_cdf"))


def round_up(number: int, step: int) -> int:
    """To the next multiple of `step`."""
    return -(-number // step) * step


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of a sample, in tokens; `guessed`: from characters, as no tokenizer was there."""

    values: list[int]
    guessed: bool

    def at_most(self, limit: int, step: int = 16) -> int:
        """A bound that 99 % of the sample keep, a multiple of ``step``, at most ``limit``."""
        return min(limit, max(step, round_up(quantile(self.values, 0.99), step)))

    def why(self, things: str, num_all: int) -> str:
        """What was seen, as a sentence."""
        of_all = "all" if len(self.values) == num_all else f"a sample of {len(self.values):,} of"
        middle, most = (quantile(self.values, share) for share in (0.5, 0.99))
        guess = f" (guessed from characters, {CHARACTERS_A_TOKEN} to a token: the tokenizer was "
        return (
            f"Of {of_all} {num_all:,} {things} half have at most {middle:,} tokens, 99 % at most "
            f"{most:,}, the longest {max(self.values):,}"
            f"{guess + 'not there)' if self.guessed else ''}."
        )


def token_lengths(texts: Sequence[str], tokenizer: Any | None) -> Lengths:
    """Tokens of each text, special tokens included."""
    if tokenizer is None:
        return Lengths([len(text) // CHARACTERS_A_TOKEN + 2 for text in texts], guessed=True)
    found = tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]
    return Lengths([len(ids) for ids in found], guessed=False)


def visual_lengths(images: Sequence[tuple[Path, str]], factor: int = _FACTOR) -> Lengths:
    """Visual tokens that each image, given with what names it, would become at its own size.

    Raises:
        DataError: an image is not there or is none; names it and what names it.
    """
    values = []
    for path, where in images:
        try:
            with strict_decoding(), Image.open(image_source(path), formats=FORMATS) as image:
                values.append(-(-image.width // factor) * -(-image.height // factor))
        except FileNotFoundError as error:
            raise _unusable(path, where, "does not exist") from error
        except (OSError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            reason = getattr(error, "strerror", None) or error
            raise _unusable(path, where, f"cannot be read: {reason}") from error
    return Lengths(values, guessed=False)


def _unusable(path: Path, where: str, reason: str) -> DataError:
    return DataError(
        f"{where}: image {path} {reason}; paths start from the file's folder. `pixelrag validate` "
        "lists every such row"
    )
