"""From a RAG configuration to what its refreshes share, and to where its index is searched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pixelrag.config.parts import LoraConfig
from pixelrag.config.rag import RagConfig
from pixelrag.config.rag_parts import IndexConfig
from pixelrag.data.passages import PassageStore
from pixelrag.distributed.env import World
from pixelrag.distributed.hosts import gather_on_host
from pixelrag.models.embedder import Embedder
from pixelrag.models.preprocess import Preprocessor
from pixelrag.retrieval.document_encoder import fingerprints
from pixelrag.retrieval.ray_config import on_ray
from pixelrag.retrieval.recipe import refresh_devices, refresh_recipe
from pixelrag.retrieval.refresh_spec import Call, RefreshSpec
from pixelrag.retrieval.sharded import shards_of_rank
from pixelrag.train.rag_data import document_encoder_config, passage_options

logger = logging.getLogger("pixelrag")


def recipe_for(
    config: RagConfig,
    passages: PassageStore,
    encoder: Embedder,
    documents: Preprocessor,
    *,
    lora: LoraConfig | None = None,
    used_gpus: Collection[int] = (),
) -> RefreshSpec:
    """What all refreshes do; in the process that starts them.

    Args:
        config: the job's configuration.
        passages: the knowledge base.
        encoder: of documents.
        documents: makes its inputs.
        lora: adapters that snapshots hold alone, if any.
        used_gpus: of this host.

    Raises:
        ConfigError: a GPU or a Ray cluster that is not there.
    """
    options = passage_options(config)
    model = document_encoder_config(config).model_dump(mode="json")
    for section, name in ((options, "source"), (options, "tokenizer"), (model, "name_or_path")):
        if name in section:
            section[name] = _absolute(section[name])
    arguments: dict[str, Any] = {
        "model_config": model,
        "lora_config": lora.model_dump(mode="json") if lora and lora.enabled else None,
        "template": config.knowledge_base.template,
        "bf16": config.engine.precision == "bf16",
    }
    gpus = torch.cuda.device_count()
    return refresh_recipe(
        config.index,
        config.refresh,
        passages=Call("pixelrag.retrieval.reopen:passages", options),
        store=passages,
        encoder=Call("pixelrag.retrieval.document_encoder:embedder", arguments),
        dim=encoder.embedding_dim,
        fingerprints=encoder_fingerprints(config, encoder, documents),
        devices=refresh_devices(config.refresh, used_gpus=used_gpus, num_gpus=gpus),
        ray=on_ray(config),
        seed=config.seed,
    )


def encoder_fingerprints(
    config: RagConfig, encoder: Embedder, documents: Preprocessor
) -> dict[str, str]:
    """What besides weights and passages decides the vectors, by name."""
    bf16 = config.engine.precision == "bf16"
    return fingerprints(encoder, documents, template=config.knowledge_base.template, bf16=bf16)


def training_gpus(world: World) -> list[int]:
    """Numbers of the GPUs that ranks of this host train on, ascending; a collective."""
    return sorted({index for index in gather_on_host(world.device.index) if index is not None})


def say_if_crowded(spec: RefreshSpec, ranks: int, threads: int, cores: int) -> None:
    """Say that refreshes will slow the training down, where they will.

    A rank that is alone loses next to nothing to workers of low priority; several wait at every
    step for the one whose core is taken.

    Args:
        spec: of the refreshes.
        ranks: on this host.
        threads: of each rank.
        cores: of this host.
    """
    workers = spec.threads * spec.devices.count("cpu") if spec.ray is None else 0
    if ranks > 1 and workers and ranks * threads + workers > cores:
        logger.info(
            "refresh: %d ranks of %d threads and workers of %d in all share %d cores: the ranks "
            "will wait for one another while it runs. Leave it a core, or set refresh.workers ray",
            *(ranks, threads, workers, cores),
        )


def shards_for(index: IndexConfig, world: World) -> Callable[[int], Iterable[int]]:
    """Which of a generation's index files this rank opens, by how many there are.

    By how many there are, not by the configuration: a resumed run may have another number.
    """
    if index.holders == "ray":  # one rank asks for all; its own files are for when nobody answers
        return range if world.is_main else lambda count: ()
    if index.num_shards == 1:
        return range
    return partial(shards_of_rank, rank=world.rank, world_size=world.world_size)


def search_device(index: IndexConfig, device: torch.device) -> dict[str, Any]:
    """Options of `Generation` that say where a rank searches."""
    if index.device == "cuda":
        return {"device": str(device)}
    if device.type != "cuda" or (index.device, index.holders) != ("auto", "ranks"):
        return {"device": "cpu"}
    # Two generations are alive in a switch; together they take a tenth of the GPU at most.
    total = torch.cuda.get_device_properties(device).total_memory
    return {"device": str(device), "device_bytes": total // 20}


def _absolute(name: str) -> str:
    """A path that holds in every folder; what is no path stays as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name
