"""From a configuration to what every refresh of a run has in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from pixelrag.config.rag_parts import IndexConfig, RefreshConfig, SearchIndexConfig
from pixelrag.errors import ConfigError
from pixelrag.retrieval.index import IndexSettings
from pixelrag.retrieval.refresh_spec import Call, OnRay, RefreshSpec

_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}


class Store(Protocol):
    """What is encoded; see `pixelrag.data.passages.PassageStore`."""

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...


def index_settings(config: SearchIndexConfig) -> IndexSettings:
    """The part of the section that decides the index's content and its searches."""
    return IndexSettings(
        factory=config.factory,
        train_rows=config.train_rows,
        ef_construction=config.ef_construction,
        ef_search=config.ef_search,
        nprobe=config.nprobe,
        refine_factor=config.refine_factor,
    )


def refresh_devices(
    config: RefreshConfig, *, used_gpus: Collection[int], num_gpus: int
) -> list[str]:
    """Where the encoding processes of this host run, one entry each.

    Args:
        config: of the refresh.
        used_gpus: numbers of those that ranks on this host train on.
        num_gpus: that this host has.

    Raises:
        ConfigError: a GPU is named that is not there.
    """
    if config.devices == "auto" or config.workers == "ray":  # there they are Ray's
        spare = [f"cuda:{number}" for number in range(num_gpus) if number not in used_gpus]
        return (spare or ["cpu"]) * config.num_workers
    for name in config.devices:
        kind, _, number = name.partition(":")
        if kind == "cuda" and int(number or 0) >= num_gpus:
            raise ConfigError(
                f"refresh.devices names {name}, but this host has {num_gpus} GPUs; name others, "
                "or say auto"
            )
    return list(config.devices) * config.num_workers


def refresh_recipe(
    index: IndexConfig,
    refresh: RefreshConfig,
    *,
    passages: Call,
    store: Store,
    encoder: Call,
    dim: int,
    fingerprints: Mapping[str, str],
    devices: list[str],
    ray: OnRay | None = None,
    seed: int = 0,
) -> RefreshSpec:
    """What every refresh of the run has in common; `Refresher` fills in number and step.

    Args:
        index, refresh: sections of the configuration.
        passages: opens ``store`` in another process (`reopen.passages`).
        store: the passages as the run has opened them.
        encoder: builds the encoder there (`document_encoder.embedder`); gets the batch size.
        dim: D of its vectors.
        fingerprints: of the encoder (`document_encoder.fingerprints`).
        devices: see `refresh_devices`.
        ray: where to encode instead; see `ray_config.on_ray`.
        seed: of what is validated.
    """
    options: dict[str, Any] = {"batch_size": refresh.batch_size}
    tolerance = refresh.parity_tolerance or _TOLERANCE[fingerprints["dtype"]]
    return RefreshSpec(
        generation=0,
        step=-1,
        passages=passages,
        encoder=Call(encoder.target, encoder.arguments | options),
        num_passages=len(store),
        dim=dim,
        fingerprints={"passages": store.fingerprint, **fingerprints},
        index=asdict(index_settings(index)),
        num_index_shards=index.num_shards,
        shard_rows=refresh.shard_rows,
        devices=devices,
        ray=ray,
        threads=refresh.threads,
        nice=refresh.nice,
        timeout_seconds=refresh.timeout_seconds,
        min_recall=refresh.min_recall,
        recall_k=refresh.recall_k,
        parity_tolerance=tolerance,
        seed=seed,
    )
