"""The contrastive job's data: which files, in what proportions, and when text comes in."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from pixelrag.config.parts import DataFiles
from pixelrag.config.problems import Conflict


class DataConfig(DataFiles):
    train: list[str] = Field(min_length=1)
    """JSONL files of rows, or folders with train_hn.jsonl or else train.jsonl; each is a set."""
    eval: list[str] = Field(default_factory=list)
    """Held-out JSONL files of the same form, or folders with eval_hn.jsonl or else eval.jsonl."""
    bad_rows: Literal["error", "skip"] = "error"
    """error: refuse to start on a bad row; skip: train without it and say how many there are."""
    image_roots: list[str] = Field(default_factory=list)
    """Folders, beside those of the data files, in which images that rows name may lie; / = any."""
    num_hard_negatives: int | None = Field(None, ge=0)
    """Use at most this many hard negatives of a row; null = all."""
    retrieved_negatives: bool = False
    """Rows that name none take theirs from retrieve_top20, hits of other articles."""
    mixing: Literal["pooled", "proportional", "homogeneous"] = "pooled"
    """proportional: each batch has exact shares of all sets; homogeneous: is of one set."""
    weights: list[Annotated[float, Field(gt=0)]] | None = None
    """Share of each set of data.train, in any unit; null = as many as it has rows."""
    order: Literal["shuffled", "file", "reversed"] = "shuffled"
    """Order of a set's rows in every pass: shuffled anew, as in the file, or from its end."""
    text: list[str] = Field(default_factory=list)
    """JSONL files of text rows, or folders with */filtered_hn.jsonl or else *.jsonl."""
    text_warmup_steps: int = Field(0, ge=0)
    """Train on data.text alone for so many steps, before anything else."""
    text_mix_ratio: float = Field(0, ge=0, lt=1)
    """Share of data.text after the text warm-up."""
    text_mix: Literal["batches", "rows"] = "batches"
    """batches: such a share of them is text alone; rows: every batch has such a share of them."""
    text_curriculum: bool = False
    """Shares 1/2, 1/3, 1/5 and 0, each for a quarter of the steps after the text warm-up."""
    num_workers: int = Field(0, ge=0)
    """Processes a rank uses to prepare batches; 0 = none beside itself."""
    prefetch_factor: int = Field(2, ge=1)
    """Batches that each of them prepares ahead."""
    worker_timeout_seconds: int = Field(300, ge=1)
    """A worker that gives nothing for so long ends the run."""
    drop_last: bool = False
    """Leave out an epoch's last batch where it is smaller than the others."""


def data_conflicts(data: DataConfig, max_steps: int | None) -> Iterator[Conflict]:
    """Sets and weights that fit each other, and text options that have something to act on."""
    if data.weights is not None:
        if data.mixing == "pooled":
            yield Conflict(
                ("data.weights", "data.mixing"),
                got="data.weights with data.mixing pooled, which serves every row once an epoch",
                remedy="set data.mixing to proportional or homogeneous, or data.weights to null",
            )
        if len(data.weights) != len(data.train):
            yield Conflict(
                ("data.weights", "data.train"),
                got=f"{len(data.weights)} data.weights for {len(data.train)} of data.train",
                remedy="give one weight to each file or folder of data.train, in their order",
            )
    yield from _text_conflicts(data, max_steps)


def _text_conflicts(data: DataConfig, max_steps: int | None) -> Iterator[Conflict]:
    asked = [
        name
        for name in ("text_warmup_steps", "text_mix_ratio", "text_curriculum")
        if getattr(data, name)
    ]
    if asked and not data.text:
        yield Conflict(
            (f"data.{asked[0]}", "data.text"),
            got=f"data.{asked[0]} without data.text",
            remedy="name files of text rows in data.text",
        )
    if data.text and not asked:
        yield Conflict(
            ("data.text", "data.text_warmup_steps"),
            got="data.text, and nothing that says when to train on it",
            remedy="set data.text_warmup_steps, data.text_mix_ratio or data.text_curriculum, or "
            "name the files in data.train",
        )
    if data.text_curriculum and data.text_mix_ratio:
        yield Conflict(
            ("data.text_curriculum", "data.text_mix_ratio"),
            got=f"data.text_mix_ratio {data.text_mix_ratio:g} with data.text_curriculum, which "
            "has shares of its own",
            remedy="set one of them",
        )
    mixes = data.text_curriculum or data.text_mix_ratio > 0
    if data.text_mix == "rows" and not mixes:
        yield Conflict(
            ("data.text_mix", "data.text_mix_ratio"),
            got="data.text_mix rows, and no share of text",
            remedy="set data.text_mix_ratio or data.text_curriculum, or leave data.text_mix out",
        )
    elif data.text_mix == "rows" and data.mixing != "pooled":
        yield Conflict(
            ("data.text_mix", "data.mixing"),
            got=f"data.text_mix rows with data.mixing {data.mixing}",
            remedy="set data.text_mix batches, or name the text files in data.train with weights",
        )
    if max_steps is not None and 0 < max_steps <= data.text_warmup_steps:
        yield Conflict(
            ("data.text_warmup_steps", "optim.max_steps"),
            got=f"data.text_warmup_steps {data.text_warmup_steps} with optim.max_steps "
            f"{max_steps}, so that data.train is never trained on",
            remedy="warm up for fewer steps, or name the text files in data.train",
        )
