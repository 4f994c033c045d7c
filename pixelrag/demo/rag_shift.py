"""A catalogue whose naming changes: generated passages and questions with a domain shift.

An entry names a thing by two words of the shop's, tells one of two properties of it (two words,
the answer) and adds remarks. A question names the thing by other words, those of customers, so that
nothing but training joins question and entry:

    entry      "bamo tilu colour is rado feni  wuki sabo zemi ..."   (or remarks first)
    question   "which hue has gori pelu"
    answer     "rado feni"

In the old catalogue the second word of a name is of one set of words, and those of a second set are
mere remarks: an encoder trained on it learns to pass over them. In the new catalogue that second
set is what tells entries apart. Without retraining the passages' encoder, entries that differ in
that word only stay one and the same to the search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from pixelrag.demo.publish import published_folder, write_jsonl, write_manifest
from pixelrag.errors import ConfigError

KIND = "pixelrag catalogue"
NUM_NAMES = 40
NUM_VALUES = 40
NUM_REMARKS = 40
_REMARKS_OF_AN_ENTRY = 6
_PROPERTIES = (("colour", "hue"), ("material", "stuff"))
_NUM_KEYS = NUM_NAMES * NUM_NAMES * len(_PROPERTIES)
Catalogue = Literal["old", "new"]


@dataclass(frozen=True, slots=True)
class _Words:
    """Sets of words that share none: the shop's and the customers' names, values, remarks."""

    first: list[str]
    second: dict[Catalogue, list[str]]
    asked_first: list[str]
    asked_second: dict[Catalogue, list[str]]
    values: list[str]
    remarks: list[str]


@dataclass(frozen=True, slots=True)
class Entry:
    """A passage with the question that it answers."""

    passage: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class ShiftSet:
    """Where the files of a catalogue lie, and how many questions there are."""

    passages: Path
    train: Path
    held_out: Path
    num_passages: int
    num_train: int
    num_held_out: int


def all_words() -> list[str]:
    """Every word of both catalogues, so that a tokenizer keeps each whole."""
    words = _words()
    sets = [words.first, words.asked_first, words.values, words.remarks]
    sets += [*words.second.values(), *words.asked_second.values(), *map(list, _PROPERTIES)]
    return ["is", "which", "has", *(word for one in sets for word in one)]


def entries(catalogue: Catalogue, count: int, seed: int) -> list[Entry]:
    """Draw entries, each of another thing or property; the same arguments give the same.

    Raises:
        ConfigError: more than there are names.
    """
    if not 1 <= count <= _NUM_KEYS:
        raise ConfigError(f"count: got {count}, expected 1 to {_NUM_KEYS}")
    rng, words = np.random.default_rng([seed, catalogue == "new"]), _words()
    return [_entry(words, catalogue, int(key), rng) for key in rng.permutation(_NUM_KEYS)[:count]]


def write_pairs(folder: Path, count: int, seed: int) -> Path:
    """Write rows of the old catalogue for `pixelrag contrastive`; return the file.

    Every entry comes again and again, with other remarks each time.

    Raises:
        DataError: the folder holds something else, or cannot be written.
    """
    rng, words = np.random.default_rng(seed), _words()

    def rows() -> Iterator[dict[str, object]]:
        for start in range(0, count, _NUM_KEYS):
            for key in rng.permutation(_NUM_KEYS)[: count - start]:
                entry = _entry(words, "old", int(key), rng)
                yield {"query": entry.question, "passage": entry.passage}

    with published_folder(folder, KIND) as fresh:
        sha256 = write_jsonl(fresh / "train.jsonl", rows())
        write_manifest(fresh, KIND, {"seed": seed, "rows": count, "sha256": sha256})
    return folder / "train.jsonl"


def write_catalogue(
    folder: Path, catalogue: Catalogue, *, num_passages: int, num_held_out: int, seed: int
) -> ShiftSet:
    """Write `passages.jsonl`, `train.jsonl` and `held_out.jsonl` for `pixelrag rag`.

    Args:
        folder: to make; one that an earlier call made is replaced.
        catalogue: which.
        num_passages: entries; each is the answer of one question.
        num_held_out: questions that are not trained on. Their entries are in the knowledge base.
        seed: of the choice.

    Raises:
        DataError: the folder holds something else, or cannot be written.
        ConfigError: fewer than one question would be left to train on, or too many entries.
    """
    if not 1 <= num_held_out < num_passages:
        raise ConfigError(f"num_held_out: got {num_held_out}, expected 1 to {num_passages - 1}")
    drawn = entries(catalogue, num_passages, seed)
    questions = [
        {"question": e.question, "answers": [e.answer], "passage_ids": [str(number)]}
        for number, e in enumerate(drawn)
    ]
    num_train = num_passages - num_held_out
    with published_folder(folder, KIND) as fresh:
        files = {
            "passages.jsonl": write_jsonl(
                fresh / "passages.jsonl",
                ({"id": str(number), "text": e.passage} for number, e in enumerate(drawn)),
            ),
            "train.jsonl": write_jsonl(fresh / "train.jsonl", questions[:num_train]),
            "held_out.jsonl": write_jsonl(fresh / "held_out.jsonl", questions[num_train:]),
        }
        write_manifest(fresh, KIND, {"catalogue": catalogue, "seed": seed, "sha256": files})
    return ShiftSet(
        folder / "passages.jsonl",
        folder / "train.jsonl",
        folder / "held_out.jsonl",
        num_passages,
        num_train,
        num_held_out,
    )


def _entry(words: _Words, catalogue: Catalogue, key: int, rng: np.random.Generator) -> Entry:
    things, which = divmod(key, len(_PROPERTIES))
    first, second = divmod(things, NUM_NAMES)
    told, asked = _PROPERTIES[which]
    answer = " ".join(words.values[v] for v in rng.integers(NUM_VALUES, size=2))
    fact = f"{words.first[first]} {words.second[catalogue][second]} {told} is {answer}"
    noise = words.remarks + (words.second["new"] if catalogue == "old" else [])
    remarks = " ".join(noise[r] for r in rng.integers(len(noise), size=_REMARKS_OF_AN_ENTRY))
    passage = f"{fact} {remarks}" if rng.integers(2) else f"{remarks} {fact}"
    name = f"{words.asked_first[first]} {words.asked_second[catalogue][second]}"
    return Entry(passage, f"which {asked} has {name}", answer)


def _words() -> _Words:
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    pairs = [a + b for a in syllables for b in syllables]
    order = iter(np.random.default_rng(7).permutation(len(pairs)).tolist())

    def take(count: int) -> list[str]:
        return [pairs[next(order)] for _ in range(count)]

    return _Words(
        first=take(NUM_NAMES),
        second={"old": take(NUM_NAMES), "new": take(NUM_NAMES)},
        asked_first=take(NUM_NAMES),
        asked_second={"old": take(NUM_NAMES), "new": take(NUM_NAMES)},
        values=take(NUM_VALUES),
        remarks=take(NUM_REMARKS),
    )
