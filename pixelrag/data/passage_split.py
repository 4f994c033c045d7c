"""Where a document is cut into passages: every so many words, or tokens of a tokenizer.

A passage holds at most `length` units and shares up to `overlap` units with the one before it.
Words are what white space separates (the 100 words of Karpukhin et al. 2020, "Dense Passage
Retrieval", section 4.1). Tokens are cut where a word begins, so that a passage's text has the
tokens that were counted, and within a word only where it alone is longer than a passage, as in
scripts that write no spaces.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pixelrag.errors import ConfigError, ModelError

SplitKind = Literal["none", "words", "tokens"]
Spans = list[tuple[int, int]]
"""First character of each passage and the one behind its last."""

_WORD = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class Splitter:
    """Cuts texts.

    Args:
        kind: "none" leaves documents whole.
        length: most words or tokens of a passage; the title is not counted.
        overlap: most words or tokens that a passage shares with the one before it, below `length`.
        tokenizer: a fast Hugging Face tokenizer, for "tokens".

    Raises:
        ConfigError: an argument is missing or out of its range.
        ModelError: the tokenizer is no fast one.
    """

    kind: SplitKind = "none"
    length: int | None = None
    overlap: int = 0
    tokenizer: Any | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(SplitKind):
            expected = ", ".join(get_args(SplitKind))
            raise ConfigError(f"split: got {self.kind!r}, expected one of {expected}")
        if self.kind == "none":
            return
        if self.length is None or self.length < 1:
            raise ConfigError(
                f"length: got {self.length}, expected at least 1 with split {self.kind}"
            )
        if not 0 <= self.overlap < self.length:
            raise ConfigError(
                f"overlap: got {self.overlap}, expected 0 to below the length, {self.length}"
            )
        if self.kind == "tokens":
            if self.tokenizer is None:
                raise ConfigError("split: tokens needs a tokenizer")
            if not self.tokenizer.is_fast:
                name = self.tokenizer.name_or_path or type(self.tokenizer).__name__
                raise ModelError(f"The tokenizer {name} has no fast version, which cutting needs")

    def spans(self, texts: Sequence[str]) -> list[Spans]:
        """Where the passages of each text lie, at least one a text unless it has no token.

        White space at a passage's ends belongs to none.
        """
        if self.kind == "none":
            return [[(0, len(text))] for text in texts]
        if self.kind == "words":
            return [self._of_words(text) for text in texts]
        assert self.tokenizer is not None  # or the constructor would have raised
        # The texts are no model's input, so it is no matter that they are longer than a model's.
        encoded = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            truncation=False,
            verbose=False,
        )
        return [
            self._of_tokens(text, offsets)
            for text, offsets in zip(texts, encoded["offset_mapping"], strict=True)
        ]

    def _of_words(self, text: str) -> Spans:
        words = [word.span() for word in _WORD.finditer(text)]
        return [
            (words[start][0], words[stop - 1][1])
            for start, stop in self._windows(len(words), range(len(words)), range(len(words)))
        ]

    def _of_tokens(self, text: str, offsets: list[tuple[int, int]]) -> Spans:
        # Tokens of byte-level tokenizers may hold the space before them, or a part of a character.
        tokens = [(start, end) for start, end in offsets if start < end]
        words, whole = [], []
        for index, (start, _) in enumerate(tokens):
            if index == 0 or start >= tokens[index - 1][1]:
                whole.append(index)
                if index == 0 or text[start].isspace() or text[start - 1].isspace():
                    words.append(index)
        spans = [
            (tokens[start][0], tokens[stop - 1][1])
            for start, stop in self._windows(len(tokens), words, whole)
        ]
        stripped = [(end - len(text[start:end].lstrip()), end) for start, end in spans]
        trimmed = [(start, start + len(text[start:end].rstrip())) for start, end in stripped]
        return [(start, end) for start, end in trimmed if start < end]

    def _windows(
        self, num_units: int, words: Sequence[int], whole: Sequence[int]
    ) -> list[tuple[int, int]]:
        """(first unit, the one behind the last) of each passage.

        Args:
            num_units: units of the text.
            words: units that begin a word, ascending.
            whole: units that begin a character, ascending; they include `words`.
        """
        windows: list[tuple[int, int]] = []
        start = 0
        assert self.length is not None  # or the text would be one window
        while start < num_units:
            stop = min(start + self.length, num_units)
            if stop < num_units:
                stop = _last(words, start, stop) or _last(whole, start, stop) or stop
            windows.append((start, stop))
            if stop == num_units:
                break
            # The first word that is close enough to the end; at least one unit further each time.
            wanted = max(stop - self.overlap, start + 1)
            place = bisect_left(words, wanted)
            start = min(words[place], stop) if place < len(words) else stop
        return windows


def _last(borders: Sequence[int], start: int, stop: int) -> int | None:
    """The last border behind `start` and up to `stop`."""
    place = bisect_right(borders, stop) - 1
    return borders[place] if place >= 0 and borders[place] > start else None
