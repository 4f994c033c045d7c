"""What the loaders deliver: a step is one pass over the data, batch by batch, and nothing computes.

pairs    (query, document) rows to model inputs, by a WordPiece tokenizer
images   the same, with an image as each document, for a Qwen3-VL
packed   tokenized samples to packed rows
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pixelrag.bench.cases import Ready, Skipped, measure_in_turns
from pixelrag.bench.packing import make_store
from pixelrag.bench.rows import Case, Row
from pixelrag.config.bench import DataConfig, DataWork, PackingWork
from pixelrag.data.pack_plan import PackPlan, RowSettings
from pixelrag.data.packed_batch import PackedCollator, PackedSteps
from pixelrag.data.packed_sampler import PackedSampler
from pixelrag.data.sampler import GlobalBatchSampler
from pixelrag.data.schema import Document, PairRow
from pixelrag.data.step_loader import load_steps
from pixelrag.distributed.cores import cores_per_rank
from pixelrag.models.preprocess import Preprocessor
from pixelrag.models.tiny_tokenizer import SAMPLE, byte_tokenizer, wordpiece_tokenizer
from pixelrag.train.batches import load_batches

SUITE = "data"
_VOCABULARY = 600


def groups(config: DataConfig) -> list[list[Case]]:
    """Numbers of workers by source."""
    return [
        [{"source": source, "workers": workers} for workers in config.work.workers]
        for source in config.work.sources
    ]


def measure(config: DataConfig, cases: Sequence[Case]) -> Iterator[Row]:
    """Times in turns, memory alone."""
    return measure_in_turns(SUITE, prepare, config, cases)


def prepare(
    config: DataConfig, cases: Sequence[Case], device: torch.device
) -> list[Ready | Skipped]:
    """A loader for each number of workers; batches stay on the CPU."""
    return [_prepare(config.work, case) for case in cases]


def _prepare(work: DataWork, case: Case) -> Ready | Skipped:
    workers, cores = int(case["workers"]), cores_per_rank()
    if workers > cores:
        return Skipped(f"{workers} workers are more than the {cores} cores here")
    if case["source"] == "packed":
        batches, per_pass = packed_batches(work, workers)
        tokens_of: Callable[[Any], int] = lambda step: step.num_tokens  # noqa: E731
    else:
        batches, per_pass = pair_batches(work, workers, images=case["source"] == "images")
        tokens_of = lambda b: _real(b.queries) + _real(b.documents)  # noqa: E731
    seen: list[int] = []

    def step() -> None:
        seen[:] = [sum(tokens_of(next(batches)) for _ in range(per_pass))]

    step()  # starts the workers, and counts
    ready = Ready(step, seen[0])
    ready.figures = lambda: {"batches": float(per_pass)}
    return ready


def _real(inputs: dict[str, torch.Tensor]) -> int:
    return int(inputs["attention_mask"].sum())


def pair_batches(work: DataWork, workers: int, *, images: bool) -> tuple[Iterator[Any], int]:
    """Endless batches of pairs, and how many are one pass."""
    rows = make_pairs(work, images=images)
    if images:
        processor = Qwen2VLImageProcessorPil(
            patch_size=16, merge_size=2, temporal_patch_size=2,
            image_mean=[0.5] * 3, image_std=[0.5] * 3,
            size={"shortest_edge": 32 * 32, "longest_edge": 1280 * 32 * 32},
        )  # fmt: skip
        tokenizer = byte_tokenizer(vocab_size=_VOCABULARY)
    else:
        processor, tokenizer = None, wordpiece_tokenizer(vocab_size=_VOCABULARY)
    preprocessor = Preprocessor(
        tokenizer, processor, query_max_length=work.tokens,
        document_max_length=8192 if images else work.tokens,
    )  # fmt: skip
    sampler = GlobalBatchSampler(len(rows), work.batch)
    loaded = load_batches(rows, sampler, preprocessor, num_workers=workers)  # type: ignore
    return loaded, sampler.batches_per_epoch


def make_pairs(work: DataWork, *, images: bool) -> list[PairRow]:
    """Rows of made-up texts, most short and some as long as allowed; or of drawn images."""
    draw = np.random.default_rng(0)
    words = " ".join(SAMPLE).split()

    def text() -> str:
        length = min(work.tokens, max(2, round(draw.lognormal(np.log(work.tokens / 6), 1.0))))
        return " ".join(draw.choice(words, length))

    if not images:
        documents = [Document.of_text(text()) for _ in range(work.samples)]
    else:
        # They must outlast the workers that read them: gone when the interpreter ends.
        _folders.append(tempfile.TemporaryDirectory(prefix="pixelrag-bench-"))
        side, documents = work.image_side, []
        for number in range(work.samples):
            path = Path(_folders[-1].name, f"{number}.png")
            pixels = draw.integers(0, 256, (side // 8, side // 8, 3), np.uint8)
            Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST).save(path)
            documents.append(Document.of_image(path))
    return [PairRow(text(), (document,), (), f"row {n}") for n, document in enumerate(documents)]


_folders: list[tempfile.TemporaryDirectory] = []


def packed_batches(work: DataWork, workers: int) -> tuple[Iterator[Any], int]:
    """Endless steps of packed rows, and how many are one pass."""
    sizes = PackingWork(samples=work.samples, row_length=work.row_length)
    plan = PackPlan(make_store(sizes, "long_tail", _VOCABULARY), RowSettings(work.row_length))
    sampler = PackedSampler(plan, work.batch, work.batch)
    steps = PackedSteps(sampler, PackedCollator(plan, 0))
    return load_steps(steps, num_workers=workers), sampler.batches_per_epoch
