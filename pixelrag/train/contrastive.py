"""`pixelrag contrastive`: trains a bi-encoder with GradCache on any engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.data.pairs import PairDataset
from pixelrag.data.sampler import GlobalBatchSampler
from pixelrag.data.text_schedule import TextOrder
from pixelrag.distributed.collectives import from_main
from pixelrag.distributed.env import World
from pixelrag.distributed.together import together
from pixelrag.engine.base import Engine
from pixelrag.errors import CheckpointError
from pixelrag.export.hf import export_embedder
from pixelrag.gradcache import gradcache_step
from pixelrag.gradcache.chunking import Chunking
from pixelrag.gradcache.keep import Keeper
from pixelrag.gradcache.step import Pairs
from pixelrag.losses.temperature import scale_and_bias, scale_from_log
from pixelrag.models.tower_parts import part_of as part_of_tower
from pixelrag.retrieval.document_encoder import fingerprints
from pixelrag.train.batches import PairBatch, load_batches
from pixelrag.train.biencoder import build_biencoder, evaluator_of, objective_of
from pixelrag.train.guide import open_guide
from pixelrag.train.inputs import HeldOut, open_held_out, require_text
from pixelrag.train.job import (
    checkpoint_of,
    engine_for,
    worded_disk_errors,
)
from pixelrag.train.loop import Loop
from pixelrag.train.pair_sampler import build_sampler, estimate_costs, open_training_rows
from pixelrag.train.query_side import Towers, open_document_tower
from pixelrag.train.run_state import RunState, is_allowed, load_optimizer, load_start
from pixelrag.train.signals import StopRequest
from pixelrag.train.start import go_on, run_job
from pixelrag.train.task import StepReport

logger = logging.getLogger("pixelrag")


def main(config: ContrastiveConfig) -> int:
    """Train what ``config`` says; returns the exit code.

    Raises:
        PixelragError: see the message; raised before the model is loaded where possible.
    """
    return run_job(config, train)


def train(
    config: ContrastiveConfig, world: World, stop: StopRequest | None = None
) -> dict[str, Any]:
    """Run the job inside an existing process group; a collective. Returns the run's summary."""
    checkpoint = from_main(lambda: checkpoint_of(config))
    rows = open_training_rows(config)
    held_out = open_held_out(config)
    costs = estimate_costs(config, rows, world)
    with together():
        sampler, total_steps = build_sampler(config, rows, world, costs)
    state, ended = go_on(
        config,
        checkpoint,
        total_steps,
        lambda position: _go_on_at(position, sampler, rows.dataset, checkpoint),
    )
    if state is not None and ended:
        return {"step": state.step}
    chunking = Chunking(config.batch.chunk_size, config.batch.chunk_tokens)
    if state is not None and not chunking.is_settled:
        chunking.tokens = state.position.get("chunk_tokens")
    task = ContrastiveTask(config, world, rows.dataset, held_out, sampler, checkpoint, chunking)
    if state is not None:
        with together():
            _require_same_tokenizer(state, task.tokenizer, checkpoint, config)
    _say_arithmetic(config, world, rows.num_main, total_steps)
    return Loop(task, config, world, total_steps, state, stop).run()


def _go_on_at(
    position: dict[str, Any],
    sampler: GlobalBatchSampler,
    dataset: PairDataset,
    checkpoint: Path | None,
) -> None:
    was, now = position["data"], dataset.report.fingerprint
    if was != now:
        raise CheckpointError(
            f"{checkpoint} was written under other data: the content of data.train or data.text "
            f"has changed (fingerprint was {was[:12]}, is {now[:12]}). "
            "Restore the files, or choose another output_dir for a new run"
        )
    sampler.load_state_dict(position["sampler"])


def _require_same_tokenizer(
    state: RunState, now: str, checkpoint: Path | None, config: ContrastiveConfig
) -> None:
    """Files below one path can change; that of the model's tokenizer means other inputs."""
    was, option = state.position["tokenizer"], "model.name_or_path"
    if was != now and not is_allowed(option, config.checkpoint.allow_changes):
        raise CheckpointError(
            f"{checkpoint} was written with another tokenizer, or another image processor, than "
            f"{option} {config.model.name_or_path} has now (fingerprint was {was[:12]}, is "
            f"{now[:12]}). Restore its files, or name {option} in checkpoint.allow_changes"
        )


class ContrastiveTask:
    """The contrastive job as the loop sees it.

    Args:
        config: the job's configuration.
        world: this process's place.
        dataset: training rows.
        held_out: rows to evaluate on, or None.
        sampler: names this rank's rows of each global batch.
        checkpoint: a folder to take parameters and optimizer state from, or None.
        chunking: cuts batches into chunks.
    """

    def __init__(
        self,
        config: ContrastiveConfig,
        world: World,
        dataset: PairDataset,
        held_out: HeldOut | None,
        sampler: GlobalBatchSampler,
        checkpoint: Path | None,
        chunking: Chunking,
    ) -> None:
        self.batches_per_step = config.batch.gradient_accumulation_steps
        self._config = config
        self._sampler = sampler
        self._data = dataset.report.fingerprint
        self._container, self._preprocessor = build_biencoder(config)
        self._embedder = self._container.encoder
        self.tokenizer = fingerprints(self._embedder, self._preprocessor)["tokenizer"]
        if not self._preprocessor.has_vision:
            with together():
                require_text(dataset)
        self._guide = open_guide(config, world)
        if self._guide is not None:
            with together():
                self._guide.require_readable(dataset)
        self._documents = open_document_tower(config, world)
        if self._documents is not None:
            self._documents.index(
                [d for row in dataset for d in row.documents], batch_size=config.eval.batch_size
            )
        self._evaluator = evaluator_of(config, held_out, self._preprocessor, self._guide)
        load_start(checkpoint, config, self._container)
        self.engine = engine_for(
            config, world, self._container, self._embedder.blocks(), part_of=part_of
        )
        if checkpoint is not None:
            with together():
                load_optimizer(checkpoint, self.engine, averages=config.ema.decay is not None)
        self._consumed = sampler.position
        self._batches: Iterator[PairBatch] = load_batches(
            dataset,
            sampler,
            self._preprocessor,
            num_workers=config.data.num_workers,
            prefetch_factor=config.data.prefetch_factor,
            timeout_seconds=config.data.worker_timeout_seconds,
            guide=None if self._guide is None else self._guide.preprocessor,
            fixed_documents=self._documents is not None,
        )
        self._objective = objective_of(config.loss)
        self._chunking = chunking
        self._keeper = Keeper(config.batch.replay, weighs=not chunking.is_settled)
        self._calibration = {"train/temperature": config.loss.initial_temperature}

    def before_step(self) -> None:
        """Nothing is due."""

    def next_batch(self) -> PairBatch:
        batch = next(self._batches)
        self._consumed += 1
        return batch

    def sample_ids(self, batch: PairBatch) -> list[str]:
        return batch.query_ids

    def accumulate(self, batch: PairBatch, *, weight: float, last: bool) -> StepReport:
        loss = self._config.loss
        result = gradcache_step(
            self.engine,
            self._chunking(batch.queries),
            self._chunking(batch.documents)
            if self._documents is None
            else self._documents.vectors(batch.content_M),
            Pairs(
                batch.positive_BK,
                batch.content_M if loss.mask_same_content else None,
                self._by_guide(batch),
            ),
            num_real_queries=batch.num_real_queries,
            weight=weight,
            last=last,
            objective=self._objective,
            exchange=loss.exchange,
            keeper=self._keeper,
        )
        if last and result.is_finite and not self._chunking.is_settled:
            self._chunking.settle(self.engine, self._keeper)
        self._calibration = {"train/temperature": 1.0 / result.scale}
        if result.bias is not None:
            self._calibration["train/bias"] = result.bias
        figures = {"train/accuracy": result.accuracy}
        if self._config.batch.replay != "all":
            figures["replay/kept_chunks"] = result.num_kept_chunks
        if isinstance(self._sampler.order, TextOrder):
            figures["train/text_share"] = self._sampler.order.text_share(self._consumed - 1)
        suspects = [batch.query_ids[i] for i in result.bad_queries]
        suspects += [batch.document_ids[i] for i in result.bad_documents]
        return StepReport(
            loss=result.loss,
            rows=result.num_queries,
            tokens=result.num_tokens,
            figures=figures,
            suspects=list(dict.fromkeys(suspects)),
        )

    def _by_guide(self, batch: PairBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self._guide is None or batch.for_guide is None:
            return None
        queries, documents = batch.for_guide
        return self._guide.embed(queries), self._guide.embed(documents)

    def step_figures(self) -> dict[str, float]:
        return self._calibration

    def evaluate(self) -> dict[str, float]:
        if self._evaluator is None:
            return {}
        encoder: Engine | Towers = self.engine
        if self._documents is not None:
            encoder = Towers(self.engine, self._documents)
        return self._evaluator(encoder, *self._scale_and_bias()).figures

    def _scale_and_bias(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """After the step; parameters may be sharded, and only a forward pass shows them whole."""
        inputs = self._preprocessor.queries(["scale"])
        inputs = {key: value.to(self.engine.device) for key, value in inputs.items()}
        with self.engine.inference():
            _, log_scale = self.engine("query", **inputs)
        return scale_and_bias(log_scale.cpu())

    def position(self) -> dict[str, Any]:
        return {
            "sampler": self._sampler.state_dict(self._consumed),
            "data": self._data,
            "tokenizer": self.tokenizer,
            "chunk_tokens": self._chunking.tokens,
        }

    def export(self, folder: Path) -> None:
        full = self.engine.full_parameters(trainable_only=adapters_alone(self._config))
        encoder = {
            name.removeprefix("encoder."): tensor
            for name, tensor in full.items()
            if name.startswith("encoder.")
        }

        def write() -> None:
            loss = self._config.loss
            temperature, bias = loss.initial_temperature, full.get("logit_scale.bias")
            if loss.learnable_temperature:
                temperature = 1.0 / float(scale_from_log(full["logit_scale.log_scale"]))
            with worded_disk_errors(folder):
                export_embedder(
                    self._embedder, self._preprocessor, encoder, folder,
                    temperature=temperature, bias=None if bias is None else float(bias),
                    ema_decay=self._config.ema.decay,
                    document_encoder=self._config.document_model,
                )  # fmt: skip

        from_main(write)


def part_of(name: str) -> str:
    """The part of a container's parameter that may have a learning rate of its own."""
    return "temperature" if name.startswith("logit_scale.") else part_of_tower(name)


def adapters_alone(config: ContrastiveConfig) -> bool:
    """Whether an adapter's files hold all that is trained of the encoder."""
    return config.lora.enabled and config.model.unfrozen is None


def _say_arithmetic(
    config: ContrastiveConfig, world: World, num_rows: int, total_steps: int
) -> None:
    batch = config.batch
    # Of fewer rows than a batch, every batch is all of them.
    rows = min(batch.rows(world.world_size), num_rows)
    accumulated = batch.gradient_accumulation_steps
    logger.info(
        "%d rows; a step sees %d rows (%s) in chunks of %s; %d steps, %.2f epochs",
        *(num_rows, rows * accumulated, batch.arithmetic(world.world_size), batch.chunks),
        *(total_steps, total_steps * accumulated * rows / num_rows),
    )
