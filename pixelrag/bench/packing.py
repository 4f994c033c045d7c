"""Whole distillation steps, packed and not, on samples of several distributions of lengths.

A step goes once through all samples, whatever the way: so all ways have the same real tokens, and
seconds compare. Real tokens count, padding does not.

unpacked      a sample a row, padded to the longest of its micro-batch; no head sees padding
concatenated  rows filled with samples, each seeing all before it
isolated      rows filled with samples, each seeing itself alone
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from pixelrag.bench.cases import Ready, Skipped, measure_in_turns
from pixelrag.bench.models import DTYPES, FIRST_WORD, MAX_NORM, adamw, causal
from pixelrag.bench.rows import Case, Row
from pixelrag.config.bench import PackingConfig, PackingWork
from pixelrag.config.distill_parts import KDLossConfig
from pixelrag.data.pack_plan import PackPlan, RowSettings
from pixelrag.data.packed_batch import PackedCollator, PackedStep, PackedSteps
from pixelrag.data.packed_sampler import PackedSampler
from pixelrag.data.text_encoder import Tokens
from pixelrag.data.token_store import TokenStore, TokenStoreBuilder
from pixelrag.engine import Engine, build_engine
from pixelrag.models.distill import DistillModel
from pixelrag.models.teacher import LiveTeacher
from pixelrag.train.distill_batch import Lesson
from pixelrag.train.flops import ModelShape

SUITE = "packing"


def groups(config: PackingConfig) -> list[list[Case]]:
    """Ways by distribution."""
    return [
        [{"lengths": lengths, "way": way} for way in config.work.ways]
        for lengths in config.work.lengths
    ]


def measure(config: PackingConfig, cases: Sequence[Case]) -> Iterator[Row]:
    """Times in turns, memory alone."""
    return measure_in_turns(SUITE, prepare, config, cases)


def sample_lengths(work: PackingWork, kind: str) -> np.ndarray:
    """Tokens of each sample, int64 [samples], from 2 to a row."""
    draw = np.random.default_rng(0)
    longest, count = work.row_length, work.samples
    if kind == "equal":
        lengths = np.full(count, longest // 4)
    elif kind == "uniform":
        lengths = draw.integers(2, longest + 1, count)
    else:  # most are short, and one or two fill a row
        lengths = draw.lognormal(math.log(longest / 6) - 0.5, 1.0, count)
    return np.clip(lengths, 2, longest).astype(np.int64)


def make_store(work: PackingWork, kind: str, vocab_size: int) -> TokenStore:
    """Samples of random tokens; the last part of each is learnt from."""
    draw = np.random.default_rng(1)
    builder = TokenStoreBuilder()
    for number, length in enumerate(sample_lengths(work, kind).tolist(), start=1):
        learnt = np.arange(length) >= length - max(1, round(work.supervised * length))
        ids = draw.integers(FIRST_WORD, vocab_size, length).astype(np.int32)
        builder.add(Tokens(ids, learnt), 0, number)
    return builder.build([kind])


def make_step(work: PackingWork, store: TokenStore, way: str) -> PackedStep:
    """One pass over all samples as the distillation job lays it out."""
    settings = RowSettings(
        work.row_length,
        packed=way != "unpacked",
        attention="concatenated" if way == "concatenated" else "isolated",
        # So that every way learns from the same tokens.
        mask_first_token=True,
    )
    plan = PackPlan(store, settings)
    sampler = PackedSampler(plan, plan.num_rows, work.rows)
    return PackedSteps(sampler, PackedCollator(plan, 0))[0]


def prepare(
    config: PackingConfig, cases: Sequence[Case], device: torch.device
) -> list[Ready | Skipped]:
    """One student, teacher and engine for all ways."""
    work = config.work
    half = work.precision == "bf16"
    student = causal(config.student, device, half_precision=half).train()
    teacher = causal(
        config.teacher, device, dtype=DTYPES[work.precision], half_precision=half, setting="teacher"
    )
    vocab_size = min(config.student.vocab_size, config.teacher.vocab_size)
    container = DistillModel(
        student, KDLossConfig(chunk_size=work.chunk_size), vocab_size=vocab_size,
        half_precision=half,
    )  # fmt: skip
    shapes = ModelShape.of(student, vocab_size), ModelShape.of(teacher, vocab_size)
    engine = build_engine(container, adamw, device=device, precision=work.precision)
    live = LiveTeacher(teacher, device=device, student_device=device)
    store = make_store(work, str(cases[0]["lengths"]), vocab_size)
    return [_ready(str(case["way"]), work, store, engine, live, shapes) for case in cases]


def _ready(
    way: str,
    work: PackingWork,
    store: TokenStore,
    engine: Engine,
    teacher: LiveTeacher,
    shapes: tuple[ModelShape, ModelShape],
) -> Ready:
    packed = make_step(work, store, way)
    lessons = [Lesson.of(batch) for batch in packed.micro_batches]
    supervised = packed.num_supervised
    # What the mathematics needs is the samples' own attention: more is the way's doing.
    alone = int((store.lengths**2).sum())
    sizes = packed.num_tokens, alone, supervised
    flops = 3 * shapes[0].forward(*sizes) + shapes[1].forward(*sizes)
    places = sum(batch.input_ids.numel() for batch in packed.micro_batches)
    figures = {
        "micro_batches": float(len(lessons)),
        "padding_share": 1 - packed.num_tokens / places,
    }
    step = _step(engine, teacher, lessons, supervised)
    return Ready(step, packed.num_tokens, supervised, flops, None, work.precision, lambda: figures)


def _step(
    engine: Engine, teacher: LiveTeacher, lessons: list[Lesson], supervised: int
) -> Callable[[], None]:
    def step() -> None:
        for number, lesson in enumerate(lessons, start=1):
            inputs = lesson.taught(teacher, supervised, engine.device)
            terms = engine("student", **inputs)
            engine.backward(terms.total, last=number == len(lessons))
        engine.step(MAX_NORM)

    return step
