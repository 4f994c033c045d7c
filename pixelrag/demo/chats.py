"""Chats about the running Python's standard library: what a function or class method does.

A question names a function or shows its code, the answer is its docstring. They are split by file,
as the code search set is: no file that is held out is ever trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pixelrag.demo.code_search import split_by_file
from pixelrag.demo.functions import Function, read_library, salted
from pixelrag.demo.publish import (
    published_folder,
    refuse_foreign,
    write_jsonl,
    write_manifest,
)
from pixelrag.errors import DataError

KIND = "pixelrag chats"
_MAX_ANSWER = 700
_QUESTIONS = (
    "What does `{name}` of Python's `{module}` module do?",
    "Explain `{module}.{name}`.",
    "How would you document this Python {kind}?\n\n```python\n{code}\n```",
    "Explain what this Python code does.\n\n```python\n{code}\n```",
)


@dataclass(frozen=True, slots=True)
class ChatSet:
    """Where the chats lie, and how many there are."""

    train_path: Path
    eval_path: Path
    num_train: int
    num_eval: int


def build_chats(
    out_dir: str | Path,
    *,
    seed: int = 25,
    held_out_fraction: float = 0.1,
    max_eval: int = 64,
    root: Path | None = None,
    min_rows: int = 300,
) -> ChatSet:
    """Write `train.jsonl`, `eval.jsonl` (chat form) and `manifest.json` to `out_dir`, atomically.

    The same interpreter and arguments give the same bytes.

    Args:
        out_dir: folder to make; one that an earlier call made is replaced.
        seed: of the choice of held-out files and of the order and kind of questions.
        held_out_fraction: share of the files that are held out, between 0 and 1.
        max_eval: at most this many held-out chats.
        root: Python files to use (default: this interpreter's standard library).
        min_rows: fewer chats than this are an error.

    Raises:
        DataError: too little Python source is there, or `out_dir` cannot be written.
        ConfigError: an argument is out of its range.
    """
    out_dir = Path(out_dir)
    refuse_foreign(out_dir, KIND)
    library = read_library(root)
    train, held_out = split_by_file(library.functions, held_out_fraction, seed)
    if len(library.functions) < min_rows or not train or not held_out:
        raise DataError(
            f"Only {len(library.functions)} functions with docstrings in this interpreter's "
            f"standard library, expected at least {min_rows}. Run the demo with a full Python "
            "installation"
        )
    held_out = held_out[:max_eval]
    with published_folder(out_dir, KIND) as folder:
        files = {
            "train.jsonl": write_jsonl(folder / "train.jsonl", _chats(train, seed)),
            "eval.jsonl": write_jsonl(folder / "eval.jsonl", _chats(held_out, seed)),
        }
        counts = {"num_train": len(train), "num_eval": len(held_out), "seed": seed}
        write_manifest(folder, KIND, counts | {"sha256": files})
    return ChatSet(out_dir / "train.jsonl", out_dir / "eval.jsonl", len(train), len(held_out))


def _chats(functions: Sequence[Function], seed: int) -> list[dict[str, object]]:
    return [_chat(function, seed) for function in functions]


def _chat(function: Function, seed: int) -> dict[str, object]:
    draw = int.from_bytes(salted(f"{function.file}:{function.name}", seed)[:4])
    question = _QUESTIONS[draw % len(_QUESTIONS)].format(
        name=function.name, module=function.module, kind=function.kind, code=function.code
    )
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": _answer(function.docstring)},
        ],
        "source": f"{function.file}:{function.name}",
    }


def _answer(docstring: str) -> str:
    """The docstring up to the end of a paragraph, a line, or as far as it may be."""
    if len(docstring) <= _MAX_ANSWER:
        return docstring
    for end in ("\n\n", "\n"):
        cut = docstring.rfind(end, 0, _MAX_ANSWER)
        if cut > 0:
            return docstring[:cut].rstrip()
    return docstring[:_MAX_ANSWER].rstrip()
