"""Which rows a contrastive run trains on, in which order and for how long."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.data.costs import images_of, row_costs
from pixelrag.data.files import data_files, files_of
from pixelrag.data.images import count_pixels
from pixelrag.data.orders import BatchOrder, HomogeneousOrder, PooledOrder, ProportionalOrder
from pixelrag.data.pairs import PairDataset, images_in_text
from pixelrag.data.sampler import GlobalBatchSampler
from pixelrag.data.text_schedule import TextOrder, phases, steps_with_text
from pixelrag.distributed.collectives import from_main
from pixelrag.distributed.env import World
from pixelrag.errors import DataError
from pixelrag.train.inputs import open_dataset
from pixelrag.train.job import num_steps

logger = logging.getLogger("pixelrag")


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """The rows of ``data.train``, set after set, and behind them those of ``data.text``.

    Attributes:
        dataset: all of them.
        set_sizes: rows of each entry of ``data.train``.
        num_text: rows of ``data.text``.
    """

    dataset: PairDataset
    set_sizes: list[int]
    num_text: int

    @property
    def num_main(self) -> int:
        """Rows of ``data.train``."""
        return sum(self.set_sizes)


def open_training_rows(config: ContrastiveConfig) -> TrainingRows:
    """Open what ``data.train`` and ``data.text`` name; a collective.

    Raises:
        DataError: as ``open_dataset``; or a set has no usable row; or ``data.text`` has images.
    """
    data = config.data
    # Listed once: the folders may look different from another machine.
    sets, text = from_main(
        lambda: ([data_files(p, "train") for p in data.train], files_of(data.text, "text"))
    )
    dataset = open_dataset(config, [*itertools.chain(*sets), *text])
    sizes = [sum(len(dataset.files[str(file)]) for file in files) for files in sets]
    rows = TrainingRows(dataset, sizes, len(dataset) - sum(sizes))
    for name, size in [*zip(data.train, sizes, strict=True), ("data.text", rows.num_text)]:
        if size == 0 and (name != "data.text" or text):
            raise DataError(f"{name}: no usable row is left")
    if fault := next(images_in_text(dataset.rows[rows.num_main :]), None):
        raise DataError(fault)
    return rows


def build_sampler(
    config: ContrastiveConfig,
    rows: TrainingRows,
    world: World,
    costs: NDArray[np.float64] | None = None,
) -> tuple[GlobalBatchSampler, int]:
    """The sampler that ``data`` describes, and the optimizer steps of the whole run.

    Args:
        config: the job's configuration.
        rows: as `open_training_rows` returned them.
        world: this process's place.
        costs: as `estimate_costs` returned them.

    Raises:
        ConfigError, DataError: the data are too few for the batch or the weights.
    """
    data, batch = config.data, config.batch
    batch_size = batch.rows(world.world_size)
    main = _main_order(config, rows, batch_size)
    steps = num_steps(config, main.batches_per_epoch / batch.gradient_accumulation_steps)
    order: BatchOrder = main
    if data.text:
        share: dict[str, Any] = {
            "warmup_steps": data.text_warmup_steps,
            "mix_ratio": data.text_mix_ratio,
            "curriculum": data.text_curriculum,
        }
        if config.optim.max_steps is None:
            steps = steps_with_text(steps, **share)
        parts = phases(steps, batch.gradient_accumulation_steps, **share)
        order = TextOrder(
            main,
            rows.num_main,
            rows.num_text,
            batch_size,
            config.seed,
            parts,
            mix=data.text_mix,
            drop_last=data.drop_last,
        )
        for phase in parts:
            first = phase.first // batch.gradient_accumulation_steps
            logger.info("from step %d: %s, %s of text", first + 1, phase.name, phase.share)
    sampler = GlobalBatchSampler(
        len(rows.dataset),
        batch_size,
        world.rank,
        world.world_size,
        config.seed,
        data.drop_last,
        order=order,
        costs=costs,
    )
    return sampler, steps


def estimate_costs(
    config: ContrastiveConfig, rows: TrainingRows, world: World
) -> NDArray[np.float64] | None:
    """Of every row, by which ranks share a batch; None for one rank. A collective."""
    if world.world_size == 1:
        return None
    dataset, model = rows.dataset, config.model
    # Of images the headers are read: by one process, as all of them would ask one file system.
    return from_main(
        lambda: row_costs(
            dataset.rows,
            count_pixels(images_of(dataset)),
            query_max_length=model.query_max_length,
            document_max_length=model.document_max_length,
            max_visual_tokens=model.max_visual_tokens,
        )
    )


def _main_order(config: ContrastiveConfig, rows: TrainingRows, batch_size: int) -> BatchOrder:
    data = config.data
    options: dict[str, Any] = {"drop_last": data.drop_last, "order": data.order}
    if data.mixing == "pooled":
        return PooledOrder(rows.num_main, batch_size, config.seed, **options)
    kind = ProportionalOrder if data.mixing == "proportional" else HomogeneousOrder
    order = kind(rows.set_sizes, data.weights, batch_size, config.seed, names=data.train, **options)
    for name, size in zip(data.train, rows.set_sizes, strict=True):
        logger.info("%s: %d rows", name, size)
    return order
