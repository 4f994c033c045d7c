"""`pixelrag rag`: trains encoders and generator together; the knowledge base renews itself."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pixelrag.config.rag import RagConfig
from pixelrag.data.questions import Question, with_answer
from pixelrag.data.sampler import GlobalBatchSampler
from pixelrag.distributed.collectives import from_main
from pixelrag.distributed.env import World
from pixelrag.distributed.interrupt import Interrupted
from pixelrag.distributed.together import together
from pixelrag.errors import CheckpointError
from pixelrag.export.rag import export_rag
from pixelrag.gradcache.rag import rag_step
from pixelrag.losses.temperature import scale_from_log
from pixelrag.retrieval.ray_config import on_ray
from pixelrag.train.job import (
    checkpoint_of,
    engine_for,
    num_steps,
    worded_disk_errors,
)
from pixelrag.train.loop import Loop
from pixelrag.train.rag_data import RagData, build_parts, check_rows, open_data
from pixelrag.train.rag_eval import RagEvaluation, RagEvaluator
from pixelrag.train.rag_index import KnowledgeBase
from pixelrag.train.rag_retrieve import RagCollator, Retriever
from pixelrag.train.run_state import RunState, load_optimizer, load_start
from pixelrag.train.signals import StopRequest
from pixelrag.train.start import go_on, run_job
from pixelrag.train.task import StepReport

logger = logging.getLogger("pixelrag")


def main(config: RagConfig) -> int:
    """Train what ``config`` says; returns the exit code.

    Raises:
        PixelragError: see the message; raised before weights are loaded where possible.
    """
    return run_job(config, train)


def train(config: RagConfig, world: World, stop: StopRequest | None = None) -> dict[str, Any]:
    """Run the job inside an existing process group; a collective. Returns the run's summary."""
    from_main(lambda: on_ray(config))  # before anything is loaded
    checkpoint = from_main(lambda: checkpoint_of(config))
    data = open_data(config)
    with together():
        sampler = GlobalBatchSampler(
            len(data.questions),
            config.batch.rows(world.world_size),
            world.rank,
            world.world_size,
            config.seed,
            config.data.drop_last,
        )
        total_steps = num_steps(
            config, sampler.batches_per_epoch / config.batch.gradient_accumulation_steps
        )
    state, ended = go_on(
        config,
        checkpoint,
        total_steps,
        lambda position: _go_on_at(position, sampler, data, checkpoint),
    )
    if state is not None and ended:
        return {"step": state.step}
    task = RagTask(config, world, data, sampler, checkpoint, state)
    _say_arithmetic(config, world, data, total_steps)
    try:
        summary = Loop(task, config, world, total_steps, state, stop).run()
        if "preempted" not in summary:
            try:
                task.finish()
            except Interrupted as asked:  # all is written; the index alone is not the newest
                logger.info("the last refresh is not waited for: %s", asked)
        return summary
    finally:
        task.close()


def evaluate(config: RagConfig, world: World) -> RagEvaluation:
    """Measure the models that ``config`` names on the held-out questions; a collective.

    Passages are encoded and indexed anew, below ``output_dir``, in a folder that goes again.
    """
    scratch = Path(config.output_dir) / "eval"
    from_main(lambda: on_ray(config))
    config = config.model_copy(update={"output_dir": str(scratch)})
    data = open_data(config)
    with together():
        sampler = GlobalBatchSampler(
            len(data.questions), world.world_size, world.rank, world.world_size, config.seed
        )
    task = RagTask(config, world, data, sampler, None, None)
    try:
        return task.evaluation()
    finally:
        task.close()
        if world.is_main:
            shutil.rmtree(scratch, ignore_errors=True)


def _go_on_at(
    position: dict[str, Any], sampler: GlobalBatchSampler, data: RagData, checkpoint: Path | None
) -> None:
    for name, what, now in (
        ("data", "the content of data.train", data.questions.report.fingerprint),
        ("passages", "the knowledge base", data.passages.fingerprint),
    ):
        if position[name] != now:
            raise CheckpointError(
                f"{checkpoint} was written under other data: {what} has changed (fingerprint was "
                f"{position[name][:12]}, is {now[:12]}). Restore the files, or choose another "
                "output_dir for a new run"
            )
    sampler.load_state_dict(position["sampler"])


@dataclass(slots=True)
class QuestionBatch:
    """The questions of a global batch, the same on all ranks, and which of them are this rank's."""

    questions: list[Question]
    own: slice


class RagTask:
    """The RAG job as the loop sees it.

    Args:
        config: the job's configuration.
        world: this process's place.
        data: passages and questions.
        sampler: names the questions of each global batch.
        checkpoint: a folder to take parameters and optimizer state from, or None.
        state: where that checkpoint left the run.
    """

    def __init__(
        self,
        config: RagConfig,
        world: World,
        data: RagData,
        sampler: GlobalBatchSampler,
        checkpoint: Path | None,
        state: RunState | None,
    ) -> None:
        self.batches_per_step = config.batch.gradient_accumulation_steps
        self._config = config
        self._data = data
        self._sampler = sampler
        self._parts = build_parts(config)
        self._container = self._parts.container
        self._objective = self._parts.objective
        with together():
            check_rows(config, data, self._parts)
        load_start(checkpoint, config, self._container)
        self.engine = engine_for(
            config, world, self._container, self._container.blocks(), part_of=part_of
        )
        if checkpoint is not None:
            with together():
                load_optimizer(checkpoint, self.engine)
        self._retriever = Retriever(config, data.passages, self._parts)
        self._collator = RagCollator(config, data.passages, self._parts)
        self._evaluator = None
        if data.held_out:
            self._evaluator = RagEvaluator(
                config, data.passages, self._parts, data.held_out, self._retriever
            )
        self._step = 0 if state is None else state.step
        self._consumed = sampler.position
        self._scale = 1.0 / config.loss.temperature
        self._looked: dict[str, float] = {}
        self._collapsed = False
        self._knowledge = KnowledgeBase(
            config, world, data.passages, self._parts, self.engine, self._retriever
        )
        try:
            self._knowledge.open(self._step, None if state is None else state.position["index"])
        except BaseException:
            self._knowledge.close()  # nobody else will: there is no task yet
            raise

    def before_step(self) -> None:
        self._looked = self._knowledge.at_step(self._step)

    def next_batch(self) -> QuestionBatch:
        rows = self._sampler.global_batch(self._consumed).tolist()
        share, extra = divmod(len(rows), self.engine.world_size)
        rank = self.engine.rank
        start = rank * share + min(rank, extra)
        questions = [self._data.questions[row] for row in rows]
        if self._config.data.answers == "sample":
            key = self._config.seed, self._consumed // self._sampler.batches_per_epoch
            questions = [with_answer(q, *key, row) for q, row in zip(questions, rows, strict=True)]
        self._consumed += 1
        return QuestionBatch(questions, slice(start, start + share + (rank < extra)))

    def sample_ids(self, batch: QuestionBatch) -> list[str]:
        return [question.sample_id for question in batch.questions[batch.own]]

    def accumulate(self, batch: QuestionBatch, *, weight: float, last: bool) -> StepReport:
        found = self._retriever(
            self.engine,
            self._knowledge.generation,
            [question.text for question in batch.questions],
            batch.own,
            self._config.retrieval.k,
        )
        if found.collapsed and not self._collapsed:
            logger.warning(
                "step %d: whatever the %d questions ask, they find the same few passages "
                "(index/distinct_share %.3f): retrieval has collapsed. Lower optim.learning_rate, "
                "raise loss.temperature, or begin with encoders that were trained to retrieve",
                self._step, len(batch.questions), found.distinct_share,
            )  # fmt: skip
        self._collapsed = found.collapsed
        own = batch.questions[batch.own]
        with together():
            # A rank without questions brings one that does not count: forwards are collectives.
            inputs = self._collator(
                own or batch.questions[:1], found.rows if own else [[0]], len(own)
            )
        sizes = self._config.batch
        result = rag_step(
            self.engine,
            inputs,
            self._objective,
            {
                "query": sizes.question_chunk_size,
                "document": sizes.document_chunk_size,
                "generator": sizes.generator_chunk_size,
            },
            trained=self._container.trained,
            weight=weight,
            last=last,
        )
        self._scale = result.scale
        self._step += last
        figures = {
            "train/answer_loss": result.answer_loss,
            "train/prior_entropy": result.prior_entropy,
            "train/posterior_entropy": result.posterior_entropy,
            "index/distinct_share": found.distinct_share,
        }
        if self._objective.retriever != "marginal":
            figures["train/retriever_loss"] = result.retriever_loss
        if self._objective.contrastive_weight:
            figures["train/contrastive_loss"] = result.contrastive_loss
        if found.score_error is not None:
            figures["index/score_error"] = found.score_error
        return StepReport(
            loss=result.loss,
            rows=result.num_questions,
            tokens=result.num_tokens,
            figures=figures,
            suspects=[q.sample_id for q in own] if self._has_bad_rows(result) else [],
        )

    def _has_bad_rows(self, result: Any) -> bool:
        return bool(result.bad_queries or result.bad_documents or result.bad_pairs)

    def step_figures(self) -> dict[str, float]:
        temperature = {"train/temperature": 1.0 / self._scale}
        return temperature | self._knowledge.figures(self._step) | self._looked

    def evaluate(self) -> dict[str, float]:
        return {} if self._evaluator is None else self.evaluation().figures

    def evaluation(self) -> RagEvaluation:
        """The figures with what is behind them; a collective."""
        assert self._evaluator is not None  # there are held-out questions
        return self._evaluator(self.engine, self._knowledge)

    def position(self) -> dict[str, Any]:
        return {
            "sampler": self._sampler.state_dict(self._consumed),
            "data": self._data.questions.report.fingerprint,
            "passages": self._data.passages.fingerprint,
            "index": self._knowledge.state_dict(),
        }

    def export(self, folder: Path) -> None:
        full = self.engine.full_parameters()

        def write() -> None:
            scale = float(scale_from_log(full["logit_scale.log_scale"]))
            bf16 = self._config.engine.precision == "bf16"
            with worded_disk_errors(folder):
                export_rag(
                    self._container,
                    self._parts.queries,
                    self._parts.documents,
                    self._parts.generator,
                    full,
                    folder,
                    temperature=1.0 / scale,
                    dtype=torch.bfloat16 if bf16 else torch.float32,
                )

        from_main(write)

    def finish(self) -> None:
        """After the last step: the refresh in flight ends, if that is wanted; a collective."""
        self._knowledge.finish(self._step)

    def close(self) -> None:
        """End what runs beside the training."""
        self._knowledge.close()


def part_of(name: str) -> str:
    """The part of a container's parameter that may have a learning rate of its own."""
    owner = name.partition(".")[0]
    return "temperature" if owner == "logit_scale" else owner.removesuffix("_encoder")


def _say_arithmetic(config: RagConfig, world: World, data: RagData, total_steps: int) -> None:
    batch, retrieval = config.batch, config.retrieval
    rows = batch.rows(world.world_size)
    accumulated = batch.gradient_accumulation_steps
    logger.info(
        "%d questions, %d passages; a step sees %d questions (%s) with %d passages each, of %d "
        "from the index; %d steps, %.2f epochs",
        *(len(data.questions), len(data.passages), rows * accumulated),
        *(batch.arithmetic(world.world_size), retrieval.k),
        *(retrieval.over_retrieve or retrieval.k, total_steps),
        total_steps * accumulated * rows / len(data.questions),
    )
