"""The demo's task: from what a function is said to do, find its code.

Queries are first sentences of docstrings, documents the functions without them. The functions are
those of the running interpreter's standard library, split by file: no held-out file is trained on.
"""

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pixelrag.demo.functions import Function, Library, held_out_files, read_library, salted
from pixelrag.demo.publish import (
    published_folder,
    refuse_foreign,
    write_jsonl,
    write_manifest,
)
from pixelrag.errors import ConfigError, DataError

KIND = "pixelrag code search"


@dataclass(frozen=True, slots=True)
class CodeSearchSet:
    """Where the set lies, and how many rows it has."""

    train_path: Path
    eval_path: Path
    num_train: int
    num_eval: int


def build_code_search(
    out_dir: str | Path,
    *,
    seed: int = 25,
    held_out_fraction: float = 0.25,
    max_eval: int = 600,
    mask_names: bool = False,
    root: Path | None = None,
    min_rows: int = 300,
) -> CodeSearchSet:
    """Write `train.jsonl`, `eval.jsonl` (text form) and `manifest.json` to `out_dir`, atomically.

    The same interpreter and arguments give the same bytes. Rows also carry `source`, the file and
    name of the function, which training ignores.

    Args:
        out_dir: folder to make; one that an earlier call made is replaced.
        seed: of the choice of held-out files and of the order of rows.
        held_out_fraction: share of the files that are held out, between 0 and 1.
        max_eval: at most this many held-out functions are written, chosen over all held-out files.
        mask_names: call every function `f` in its own code, which makes the task harder.
        root: Python files to use (default: this interpreter's standard library).
        min_rows: fewer functions than this are an error, since they make no task.

    Raises:
        DataError: too little Python source is there, or `out_dir` cannot be written.
        ConfigError: an argument is out of its range.
    """
    out_dir = Path(out_dir)
    if max_eval < 1:
        raise ConfigError(f"max_eval: got {max_eval}, expected 1 or more")
    refuse_foreign(out_dir, KIND)
    library = read_library(root, mask_names=mask_names)
    train, held_out = split_by_file(library.functions, held_out_fraction, seed)
    if len(library.functions) < min_rows or not train or not held_out:
        raise DataError(
            f"Only {len(library.functions)} functions with docstrings ({len(train)} to train on, "
            f"{len(held_out)} held out) in this interpreter's standard library, expected at least "
            f"{min_rows}; part of the library is missing. Run the demo with a full Python "
            "installation"
        )
    held_out = held_out[:max_eval]
    with published_folder(out_dir, KIND) as folder:
        files = {
            "train.jsonl": write_jsonl(folder / "train.jsonl", map(_row, train)),
            "eval.jsonl": write_jsonl(folder / "eval.jsonl", map(_row, held_out)),
        }
        arguments: dict[str, object] = {
            "seed": seed,
            "held_out_fraction": held_out_fraction,
            "max_eval": max_eval,
            "mask_names": mask_names,
        }
        entries = _manifest(library, train, held_out, arguments) | {"sha256": files}
        write_manifest(folder, KIND, entries)
    return CodeSearchSet(out_dir / "train.jsonl", out_dir / "eval.jsonl", len(train), len(held_out))


def split_by_file(
    functions: Sequence[Function], held_out_fraction: float, seed: int
) -> tuple[list[Function], list[Function]]:
    """Functions to train on and held-out ones, no file in both, each in an order that `seed` picks.

    Raises:
        ConfigError: the fraction is not between 0 and 1, or the seed is negative.
    """
    if not 0 < held_out_fraction < 1:
        raise ConfigError(f"held_out_fraction: got {held_out_fraction}, expected 0 < x < 1")
    if not 0 <= seed < 2**64:
        raise ConfigError(f"seed: got {seed}, expected 0 or more, below 2**64")
    held_out = held_out_files(list(functions), held_out_fraction, seed)
    mixed = sorted(functions, key=lambda one: salted(f"{one.file}:{one.name}:{one.code}", seed))
    return (
        [function for function in mixed if function.file not in held_out],
        [function for function in mixed if function.file in held_out],
    )


def _row(function: Function) -> dict[str, object]:
    return {
        "query": function.summary,
        "passage": function.code,
        "source": f"{function.file}:{function.name}",
    }


def _manifest(
    library: Library,
    train: Sequence[Function],
    held_out: Sequence[Function],
    arguments: dict[str, object],
) -> dict[str, object]:
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "arguments": arguments,
        "num_functions": len(library.functions),
        "num_train": len(train),
        "num_eval": len(held_out),
        "num_train_files": len(Counter(function.file for function in train)),
        "num_eval_files": len(Counter(function.file for function in held_out)),
        "unreadable_files": library.unreadable,
    }
