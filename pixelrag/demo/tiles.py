"""Functions of the standard library as screenshots, with queries that ask for them.

Two kinds of queries go with the same pages:

- "code": the first sentence of the docstring, which is not on the page. The real task: it wants a
  model that reads.
- "visual": what anybody sees at a glance, such as "short red page about email". This is for the
  smoke run of a tiny model that starts from random weights: a few dozen steps do not teach it to
  read letters of 6 x 11 pixels, but they do teach it colours and sizes, which shows that the whole
  path from image file to gradient works. A package has one colour and a page one of three lengths,
  so there are at most 24 different queries, and each fits several pages: among N pages chance is
  1/N, and no model can get beyond 24/N. Pages of the evaluation come from files of which no page
  is trained on, so beating chance takes generalisation, if only of colours.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from pixelrag.demo.code_search import split_by_file
from pixelrag.demo.functions import Function, salted
from pixelrag.demo.page import PageStyle, render_page
from pixelrag.demo.publish import published_folder, write_jsonl, write_manifest
from pixelrag.errors import ConfigError, DataError

KIND = "pixelrag code tiles"
# Far apart, and dark enough for white letters.
COLOURS = {
    "red": "#c92a2a",
    "blue": "#1c5fd0",
    "green": "#2b8a3e",
    "orange": "#e67700",
    "purple": "#6f3fc9",
    "black": "#22262b",
    "pink": "#d6336c",
    "teal": "#0f9aa0",
}
_SHORT, _LONG = 8, 18  # lines


@dataclass(frozen=True, slots=True)
class TileSet:
    """Where the set lies, and how many rows (and pages) it has."""

    train_path: Path
    eval_path: Path
    num_train: int
    num_eval: int


def render_tiles(
    functions: Sequence[Function],
    out_dir: str | Path,
    *,
    kind: Literal["visual", "code"] = "visual",
    num_train: int = 320,
    num_eval: int = 64,
    seed: int = 25,
    held_out_fraction: float = 0.25,
    style: PageStyle | None = None,
) -> TileSet:
    """Write `train.jsonl`, `eval.jsonl` (image form), their pages and `manifest.json`, atomically.

    Args:
        functions: of `pixelrag.demo.functions.read_library`.
        out_dir: folder to make; one that an earlier call made is replaced.
        kind: what queries ask, see above.
        num_train, num_eval: at most this many rows.
        seed, held_out_fraction: of the split by file, the same one as the text set's.
        style: how pages look.

    Raises:
        DataError: too few functions for a task, or `out_dir` cannot be written.
        ConfigError: an argument is out of its range.
    """
    out_dir = Path(out_dir)
    if kind not in ("visual", "code"):
        raise ConfigError(f"kind: got {kind!r}, expected 'visual' or 'code'")
    if min(num_train, num_eval) < 1:
        raise ConfigError(f"num_train, num_eval: got {num_train}, {num_eval}, expected 1 or more")
    train, held_out = split_by_file(functions, held_out_fraction, seed)
    if kind == "visual":
        colours = _one_colour_each(train, held_out)
        train, held_out = _in_turns(train, colours), _in_turns(held_out, colours)
    else:
        colours = {_package(function): _any_colour(_package(function)) for function in functions}
    train, held_out = train[:num_train], held_out[:num_eval]
    if not train or not held_out:
        raise DataError(
            f"{len(functions)} functions are too few for screenshots of both kinds of files, "
            "trained on and held out; run the demo with a full Python installation"
        )
    with published_folder(out_dir, KIND) as folder:
        digests = {}
        for name, part in (("train", train), ("eval", held_out)):
            (folder / name).mkdir()
            rows = []
            for number, function in enumerate(part):
                path = f"{name}/{number:04d}.png"
                colour = colours[_package(function)]
                page = render_page(
                    function.source,
                    title=function.module,
                    subtitle=function.name,
                    colour=COLOURS[colour],
                    style=style,
                )
                page.save(folder / path)
                query = _glance(function, colour) if kind == "visual" else function.summary
                source = f"{function.file}:{function.name}"
                rows.append({"query": query, "chunk_path": path, "source": source})
            digests[f"{name}.jsonl"] = write_jsonl(folder / f"{name}.jsonl", rows)
        entries: dict[str, object] = {"queries": kind, "seed": seed}
        entries["held_out_fraction"] = held_out_fraction
        entries |= {"num_train": len(train), "num_eval": len(held_out), "sha256": digests}
        write_manifest(folder, KIND, entries)
    return TileSet(out_dir / "train.jsonl", out_dir / "eval.jsonl", len(train), len(held_out))


def _package(function: Function) -> str:
    return function.module.split(".")[0]


def _glance(function: Function, colour: str) -> str:
    lines = function.source.count("\n") + 1
    length = "short" if lines <= _SHORT else "long" if lines > _LONG else "medium"
    return f"{length} {colour} page about {_package(function)}"


def _one_colour_each(train: Sequence[Function], held_out: Sequence[Function]) -> dict[str, str]:
    """The packages with most functions on both sides of the split, as many as there are colours."""
    counts = Counter(map(_package, train)), Counter(map(_package, held_out))
    fewest = {name: min(counts[0][name], counts[1][name]) for name in counts[0]}
    ranked = sorted((name for name in fewest if fewest[name]), key=lambda name: -fewest[name])
    return dict(zip(ranked, COLOURS, strict=False))


def _any_colour(package: str) -> str:
    names = list(COLOURS)
    return names[int.from_bytes(salted(package, 0)) % len(names)]


def _in_turns(functions: Sequence[Function], packages: Iterable[str]) -> list[Function]:
    """One function of each package, then a second one of each, and so on."""
    stacks: dict[str, list[Function]] = {name: [] for name in packages}
    for function in functions:
        if _package(function) in stacks:
            stacks[_package(function)].append(function)
    rounds = zip_longest(*stacks.values())
    return [function for turn in rounds for function in turn if function is not None]
