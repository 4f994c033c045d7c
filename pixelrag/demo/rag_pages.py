"""Pages about the running Python's standard library, and which module a question is about.

A page belongs to a module and tells what one of its functions does, in that function's own words
(the first sentence of its docstring). Like pages of a web site it also points elsewhere: to what
functions of other modules do, above or below its own text.

    title      "shutil"
    text       "See also: Return an iterator over ... Convert a ... On this page: Recursively ..."
    question   "Which module does this: Recursively copy a directory tree and ..."
    answer     "shutil"

An encoder of general English takes a page to be about all that stands on it. That the part behind
"On this page" counts and the rest does not is what it must learn of this collection; no question
encoder can, as the pages differ in what else they mention.

A generator learns to read on slips: a module's name over words drawn at random, so that nothing but
the name on the slip tells the answer. A slip's question is its text.
"""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pixelrag.demo.functions import Function, read_library, salted
from pixelrag.demo.publish import published_folder, write_jsonl, write_manifest
from pixelrag.errors import DataError

KIND = "pixelrag pages"
NUM_POINTERS = 2
_MIN_WORDS, _MAX_WORDS = 4, 10
# A module with more functions would be right too often by chance.
_MAX_OF_A_MODULE = 6
_HELD_OUT = 1 / 3


@dataclass(frozen=True, slots=True)
class PageSet:
    """Where the files of a collection lie."""

    passages: Path
    train: Path
    held_out: Path


@functools.cache
def functions_to_ask_for(
    root: Path | None = None,
) -> tuple[tuple[Function, ...], tuple[Function, ...]]:
    """Functions of public modules whose first sentence is short: to train on, and held out.

    The same interpreter gives the same; no two share a sentence.

    Args:
        root: Python files to use (default: this interpreter's standard library).

    Raises:
        DataError: there is no Python source.
    """
    modules = defaultdict(list)
    for function in read_library(root).functions:
        short = _MIN_WORDS <= len(function.summary.split()) <= _MAX_WORDS
        if short and not _module(function).startswith("_"):
            modules[_module(function)].append(function)
    chosen = [
        function
        for functions in modules.values()
        for function in sorted(functions, key=_hash)[:_MAX_OF_A_MODULE]
    ]
    chosen.sort(key=_hash)
    count = round(_HELD_OUT * len(chosen))
    return tuple(chosen[count:]), tuple(chosen[:count])


def write_pages(
    folder: Path, *, num_train: int, num_held_out: int, seed: int, root: Path | None = None
) -> PageSet:
    """Write `passages.jsonl`, `train.jsonl` and `held_out.jsonl` for `pixelrag rag`.

    Args:
        folder: to make; one that an earlier call made is replaced.
        num_train: questions to train on, each with a page of its own.
        num_held_out: questions not to train on; their pages are in the knowledge base.
        seed: draws the functions, what each page points to, and the order of a page.
        root: see `functions_to_ask_for`.

    Raises:
        DataError: this Python has fewer functions; or the folder holds something else, or cannot be
            written.
    """
    rng = random.Random(seed)
    pools = functions_to_ask_for(root)
    functions: list[Function] = []
    wanted_of = {"train": num_train, "held-out": num_held_out}
    for pool, (kind, wanted) in zip(pools, wanted_of.items(), strict=True):
        if len(pool) < wanted:
            raise DataError(
                f"this Python's standard library has {len(pool)} functions for {kind} questions, "
                f"got {wanted} as the number wanted; ask for fewer"
            )
        functions += rng.sample(pool, wanted)
    entries = [
        _Entry(_module(one), _text(one, functions, rng), f"Which module does this: {one.summary}")
        for one in functions
    ]
    return _write(folder, entries, num_held_out, seed)


def write_slips(
    folder: Path, *, num_train: int, num_held_out: int, seed: int, root: Path | None = None
) -> PageSet:
    """Write slips in the place of pages; arguments and errors as of `write_pages`."""
    rng = random.Random(seed)
    functions = [one for pool in functions_to_ask_for(root) for one in pool]
    modules = sorted(set(map(_module, functions)))
    words = [word for one in functions for word in one.summary.split()]
    texts = [
        " ".join(rng.choices(words, k=rng.randint(_MIN_WORDS, _MAX_WORDS)))
        for _ in range(num_train + num_held_out)
    ]
    entries = [_Entry(rng.choice(modules), text, text) for text in texts]
    return _write(folder, entries, num_held_out, seed)


@dataclass(frozen=True, slots=True)
class _Entry:
    title: str
    text: str
    question: str


def _write(folder: Path, entries: Sequence[_Entry], num_held_out: int, seed: int) -> PageSet:
    """The last entries' questions are held out; a question's answer is its page's title."""
    pages = [{"id": str(n), "title": e.title, "text": e.text} for n, e in enumerate(entries)]
    questions = [
        {"question": e.question, "answers": [e.title], "passage_ids": [str(n)]}
        for n, e in enumerate(entries)
    ]
    rows: dict[str, Sequence[Mapping[str, object]]] = {
        "passages.jsonl": pages,
        "train.jsonl": questions[:-num_held_out],
        "held_out.jsonl": questions[-num_held_out:],
    }
    with published_folder(folder, KIND) as fresh:
        files = {name: write_jsonl(fresh / name, content) for name, content in rows.items()}
        write_manifest(fresh, KIND, {"seed": seed, "sha256": files})
    return PageSet(*(folder / name for name in rows))


def _text(function: Function, functions: Sequence[Function], rng: random.Random) -> str:
    others = [one for one in functions if _module(one) != _module(function)]
    pointers = " ".join(one.summary for one in rng.sample(others, NUM_POINTERS))
    parts = [f"On this page: {function.summary}", f"See also: {pointers}"]
    return " ".join(parts if rng.random() < 0.5 else reversed(parts))


def _module(function: Function) -> str:
    return function.module.partition(".")[0]


def _hash(function: Function) -> bytes:
    return salted(f"{function.file}:{function.name}", 0)
