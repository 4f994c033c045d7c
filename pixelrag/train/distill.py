"""`pixelrag distill`: trains a small causal language model on a larger one's distributions."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pixelrag.config.distill import DistillConfig
from pixelrag.data.packed_batch import PackedCollator, PackedStep, PackedSteps
from pixelrag.data.packed_sampler import PackedSampler
from pixelrag.data.step_loader import load_steps
from pixelrag.distributed.collectives import from_main, sum_over_ranks
from pixelrag.distributed.env import World
from pixelrag.distributed.together import together
from pixelrag.engine import Engine
from pixelrag.evaluate.sample_sheet import WrittenSample
from pixelrag.export.causal import export_causal
from pixelrag.models.causal import CausalLM, uncompiled
from pixelrag.models.causal_load import load_student, load_tokenizer, student_source
from pixelrag.models.distill import DistillModel
from pixelrag.models.isolation import check_head, check_isolation, sample_rows
from pixelrag.models.teacher import LiveTeacher, TeacherSource
from pixelrag.train.distill_batch import Lesson
from pixelrag.train.distill_data import DistillData, open_data
from pixelrag.train.distill_eval import DistillEvaluator
from pixelrag.train.distill_models import Contract, agree_on_models, open_teacher
from pixelrag.train.distill_samples import write_samples
from pixelrag.train.flops import ModelShape, peak_of
from pixelrag.train.job import (
    checkpoint_of,
    engine_for,
    num_steps,
    worded_disk_errors,
)
from pixelrag.train.loop import Loop
from pixelrag.train.run_state import load_optimizer, load_start
from pixelrag.train.signals import StopRequest
from pixelrag.train.start import go_on, run_job
from pixelrag.train.task import StepReport
from pixelrag.train.watch import Watch

logger = logging.getLogger("pixelrag")


def main(config: DistillConfig) -> int:
    """Train what ``config`` says; returns the exit code.

    Raises:
        PixelragError: see the message; raised before weights are loaded where possible.
    """
    return run_job(config, train)


def train(config: DistillConfig, world: World, stop: StopRequest | None = None) -> dict[str, Any]:
    """Run the job inside an existing process group; a collective. Returns the run's summary."""
    checkpoint = from_main(lambda: checkpoint_of(config))
    tokenizer, contract, data = _before_weights(config, world)
    with together():
        sampler = PackedSampler(
            data.train,
            rows_of_a_step(config, world),
            config.batch.per_device_batch_size,
            world.rank,
            world.world_size,
        )
        total_steps = num_steps(config, sampler.batches_per_epoch)
    state, ended = go_on(config, checkpoint, total_steps, sampler.load_state_dict)
    if state is not None and ended:
        return {"step": state.step}
    task = DistillTask(config, world, contract, tokenizer, data, sampler, checkpoint)
    _say_arithmetic(config, world, sampler, total_steps)
    try:
        return Loop(task, config, world, total_steps, state, stop).run()
    finally:
        task.close()


@dataclass(frozen=True, slots=True)
class DistillEvaluation:
    """What was measured, and what was written for a person to read."""

    figures: dict[str, float]
    samples: list[WrittenSample]


def evaluate(config: DistillConfig, world: World, *, writes: bool = False) -> DistillEvaluation:
    """Measure the student against the teacher on what is held out; a collective.

    Args:
        config: the job's.
        world: this process's place.
        writes: let both go on with a few held-out prompts.
    """
    tokenizer, contract, data = _before_weights(config, world)
    container = build_container(config, world, contract)
    engine = engine_for(config, world, container, container.student.blocks())
    teacher = open_teacher(config, world, contract, data)
    try:
        self_test(config, engine, container.student, teacher, contract, data)
        assert data.held_out is not None  # see `_refuse` of train/evaluate.py
        evaluator = DistillEvaluator(
            data.held_out, tokenizer.pad_token_id, config.eval.batch_size, world
        )
        figures = evaluator(engine, teacher)
        samples = write_samples(engine, teacher, tokenizer, data.held_out) if writes else []
        return DistillEvaluation(figures, samples)
    finally:
        teacher.close()


def _before_weights(config: DistillConfig, world: World) -> tuple[Any, Contract, DistillData]:
    """The student's tokenizer, what both models agree on, and the data; a collective."""
    with together():
        tokenizer = load_tokenizer(
            student_source(config.student), trust_remote_code=config.student.trust_remote_code
        )
    contract = from_main(lambda: agree_on_models(config, tokenizer))
    data = open_data(
        config, tokenizer, world,
        vocab_size=contract.vocab_size, attention_cost=contract.attention_cost,
    )  # fmt: skip
    return tokenizer, contract, data


def rows_of_a_step(config: DistillConfig, world: World) -> int:
    """Rows of an optimizer step over all ranks."""
    return config.batch.rows(world.world_size)


class DistillTask:
    """The distillation job as the loop sees it.

    One batch of the loop is a whole optimizer step: its micro-batches are divided by the supervised
    tokens of all of them, over all ranks.

    Args:
        config: the job's configuration.
        world: this process's place.
        contract: what was agreed before weights are loaded.
        tokenizer: the student's.
        data: rows to train and to evaluate on.
        sampler: names this rank's rows of each step.
        checkpoint: a folder to take parameters and optimizer state from, or None.
    """

    batches_per_step = 1

    def __init__(
        self,
        config: DistillConfig,
        world: World,
        contract: Contract,
        tokenizer: Any,
        data: DistillData,
        sampler: PackedSampler,
        checkpoint: Path | None,
    ) -> None:
        self._config = config
        self._world = world
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._row_length = data.train.settings.row_length
        self._container = build_container(config, world, contract)
        self._student = self._container.student
        shape = ModelShape.of(self._student, contract.vocab_size)
        load_start(checkpoint, config, self._container)
        self.engine = engine_for(config, world, self._container, self._student.blocks())
        if checkpoint is not None:
            with together():
                load_optimizer(checkpoint, self.engine, averages=config.ema.decay is not None)
        self.teacher: TeacherSource = open_teacher(config, world, contract, data)
        self._meter = _FlopMeter(config, world, shape, self.teacher, contract.vocab_size)
        self_test(config, self.engine, self._student, self.teacher, contract, data)
        self._evaluator = None
        if data.held_out is not None:
            self._evaluator = DistillEvaluator(
                data.held_out, tokenizer.pad_token_id, config.eval.batch_size, world
            )
        self._watch = Watch(config.watch, world.device)
        self._consumed = sampler.position
        self._steps: Iterator[PackedStep] = load_steps(
            PackedSteps(
                sampler,
                PackedCollator(
                    data.train, tokenizer.pad_token_id, fixed_width=config.student.compile
                ),
            ),
            sampler.position,
            num_workers=config.data.num_workers,
            prefetch_factor=config.data.prefetch_factor,
            timeout_seconds=config.data.worker_timeout_seconds,
        )
        self._started = time.perf_counter()

    def before_step(self) -> None:
        """Nothing is due."""

    def next_batch(self) -> PackedStep:
        self._started = time.perf_counter()
        step = next(self._steps)
        self._consumed = step.position + 1
        return step

    def sample_ids(self, batch: PackedStep) -> list[str]:
        return [name for micro in batch.micro_batches for row in micro.sample_ids for name in row]

    def accumulate(self, batch: PackedStep, *, weight: float, last: bool) -> StepReport:
        engine = self.engine
        # Of this rank: total, CE, KD, rows, operations.
        sums = torch.zeros(5, dtype=torch.float64, device=engine.device)
        suspects: list[str] = []
        finite: list[torch.Tensor] = []
        for number, micro in enumerate(batch.micro_batches):
            lesson = Lesson.of(micro)
            inputs = lesson.taught(self.teacher, batch.num_supervised, engine.device)
            terms = engine("student", **inputs)
            is_last = last and number == len(batch.micro_batches) - 1
            engine.backward(terms.total * weight, last=is_last)
            flops = self._meter.operations(micro.num_tokens, lesson)
            sums[:3] += torch.stack([t.detach().double() for t in terms[:3]])
            sums[3:] += torch.tensor([micro.num_rows, flops], dtype=torch.float64)
            finite.append(torch.isfinite(terms.total.detach()))
        if not bool(torch.stack(finite).all()):
            suspects = [
                name
                for micro, good in zip(batch.micro_batches, finite, strict=True)
                if not bool(good)
                for row in micro.sample_ids
                for name in row
            ]
        total, ce, kd, rows, flops = sum_over_ranks(sums).tolist()
        if math.isfinite(kd):
            self._watch.step(
                batch.position + 1, kd=kd, tokens=batch.num_tokens,
                seconds=time.perf_counter() - self._started,
            )  # fmt: skip
        return StepReport(
            loss=total,
            rows=int(rows),
            tokens=batch.num_tokens,
            figures={
                "train/ce_loss": ce,
                "train/kd_loss": kd,
                "data/fill": batch.num_tokens / (rows * self._row_length),
                "data/supervised_share": batch.num_supervised / batch.num_tokens,
            },
            amounts={
                "perf/supervised_tokens_per_second": batch.num_supervised,
                **self._meter.amounts(flops),
            },
            suspects=list(dict.fromkeys(suspects)),
        )

    def step_figures(self) -> dict[str, float]:
        return {}

    def evaluate(self) -> dict[str, float]:
        if self._evaluator is None:
            return {}
        return self._evaluator(self.engine, self.teacher)

    def position(self) -> dict[str, Any]:
        return self._sampler.state_dict(self._consumed)

    def export(self, folder: Path) -> None:
        full = self.engine.full_parameters()
        state = {
            name.removeprefix("student."): tensor
            for name, tensor in full.items()
            if name.startswith("student.")
        }
        bf16 = self._config.engine.precision == "bf16"

        def write() -> None:
            with worded_disk_errors(folder):
                export_causal(
                    self._student, self._tokenizer, state, folder,
                    dtype=torch.bfloat16 if bf16 else torch.float32,
                    ema_decay=self._config.ema.decay,
                )  # fmt: skip

        from_main(write)

    def close(self) -> None:
        """Let go of the teacher's files and connections."""
        self.teacher.close()


def self_test(
    config: DistillConfig,
    engine: Engine,
    student: CausalLM,
    teacher: TeacherSource,
    contract: Contract,
    data: DistillData,
) -> None:
    """Try heads and isolation of both models on this machine; a collective, all ranks run the same.

    Raises:
        ModelError: documents that share a row see each other, or a head does more than is known.
    """
    vocab_size, isolated = contract.vocab_size, data.isolates
    precision = torch.bfloat16 if config.engine.precision == "bf16" else student.dtype
    # Documents are told apart by what goes into the layers, compiled or not.
    with engine.inference(), uncompiled():
        rows = sample_rows(vocab_size).to(engine.device)
        split, whole = engine("logits", rows=rows), engine("whole", rows=rows)
        check_head(split, whole, name="student", precision=precision)
        if isolated:
            check_isolation(
                lambda rows: engine("logits", rows=rows),
                name="student",
                vocab_size=vocab_size,
                precision=precision,
                device=engine.device,
                setting="student.attention",
            )
    if isinstance(teacher, LiveTeacher):
        teacher.self_test(vocab_size, isolated=isolated)


class _FlopMeter:
    """Operations of both models, and the share of the device's peak they are."""

    def __init__(
        self,
        config: DistillConfig,
        world: World,
        student: ModelShape,
        teacher: TeacherSource,
        vocab_size: int,
    ) -> None:
        self._student = student
        self._teacher = (
            ModelShape.of(teacher.model, vocab_size) if isinstance(teacher, LiveTeacher) else None
        )
        # The backward pass does twice the forward's work, half of it for the weights.
        self._passes = 2 if config.lora.enabled else 3
        peak = peak_of(world.device, config.engine.precision)
        self._capacity = None if peak is None else peak * world.world_size

    def operations(self, num_tokens: int, lesson: Lesson) -> float:
        """Of one micro-batch."""
        sizes = num_tokens, lesson.squares, len(lesson.labels_N)
        done = self._passes * self._student.forward(*sizes)
        return done if self._teacher is None else done + self._teacher.forward(*sizes)

    def amounts(self, operations: float) -> dict[str, float]:
        """What to log per second: operations, and as a share of the peak where it is known."""
        figures = {"perf/tflops": operations / 1e12}
        if self._capacity is not None:
            figures["perf/mfu"] = operations / self._capacity
        return figures


def build_container(config: DistillConfig, world: World, contract: Contract) -> DistillModel:
    """Load the student into its container, on the CPU."""
    bf16 = config.engine.precision == "bf16"
    # A frozen base needs no fp32 master; whatever is trained has one.
    dtype = torch.bfloat16 if bf16 and config.lora.enabled else torch.float32
    with together():
        student = load_student(
            config.student,
            config.lora,
            dtype=dtype,
            half_precision=bf16,
            cuda=world.device.type == "cuda",
            seed=config.seed,
        )
        return DistillModel(
            student, config.loss, vocab_size=contract.vocab_size, half_precision=bf16
        )


def _say_arithmetic(
    config: DistillConfig, world: World, sampler: PackedSampler, total_steps: int
) -> None:
    batch, rows = config.batch, rows_of_a_step(config, world)
    logger.info(
        "%d rows an epoch; a step sees %d of them (%s), up to %d tokens; %d steps, %.2f epochs",
        *(sampler.plan.num_rows, rows, batch.arithmetic(world.world_size)),
        *(rows * config.packing.length, total_steps),
        total_steps / sampler.batches_per_epoch,
    )
