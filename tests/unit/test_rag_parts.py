"""Settings of the knowledge base: valid, checked, and each of them acting."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from pixelrag.config.rag_parts import IndexConfig, RayConfig, RefreshConfig, refresh_conflicts
from pixelrag.distributed.env import World
from pixelrag.errors import ConfigError
from pixelrag.retrieval.recipe import index_settings, refresh_devices, refresh_recipe
from pixelrag.retrieval.refresh_spec import Call, OnRay
from pixelrag.train.rag_index import KnowledgeBase
from pixelrag.train.rag_recipe import say_if_crowded, search_device, shards_for


class FakeStore:
    fingerprint = "f"

    def __len__(self) -> int:
        return 100


def recipe(index: IndexConfig | None = None, refresh: RefreshConfig | None = None):
    return refresh_recipe(
        index or IndexConfig(),
        refresh or RefreshConfig(),
        passages=Call("a:b", {}),
        store=FakeStore(),
        encoder=Call("c:d", {"x": 1}),
        dim=4,
        fingerprints={"dtype": "fp32"},
        devices=["cpu"],
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"factory": "Flat"},
        {"train_rows": 10},
        {"ef_construction": 9},
        {"ef_search": 9},
        {"nprobe": 9},
        {"refine_factor": 9},
        {"num_shards": 2},
    ],
)
def test_index_settings_reach_the_recipe(changes) -> None:
    assert recipe(IndexConfig(**changes)) != recipe()
    if "num_shards" not in changes:
        assert index_settings(IndexConfig(**changes)) != index_settings(IndexConfig())


@pytest.mark.parametrize(
    "changes",
    [
        {"threads": 2},
        {"nice": 3},
        {"batch_size": 2},
        {"shard_rows": 5},
        {"timeout_seconds": 9},
        {"min_recall": 0.5},
        {"recall_k": 3},
        {"parity_tolerance": 0.5},
    ],
)
def test_refresh_settings_reach_the_recipe(changes) -> None:
    assert recipe(refresh=RefreshConfig(**changes)) != recipe()


def test_what_the_recipe_says() -> None:
    made = recipe()
    assert made.encoder.arguments == {"x": 1, "batch_size": 64}
    assert made.fingerprints == {"passages": "f", "dtype": "fp32"}
    assert (made.num_passages, made.dim, made.parity_tolerance) == (100, 4, 1e-3)


@pytest.mark.parametrize(
    ("devices", "num_workers", "used", "num_gpus", "expected"),
    [
        ("auto", 1, [], 0, ["cpu"]),
        ("auto", 3, [], 0, ["cpu"] * 3),
        ("auto", 1, [0, 1], 4, ["cuda:2", "cuda:3"]),
        ("auto", 2, [0], 1, ["cpu", "cpu"]),
        (["cuda:1", "cpu"], 1, [0, 1], 2, ["cuda:1", "cpu"]),
        ("cuda", 2, [], 1, ["cuda", "cuda"]),
    ],
)
def test_devices(devices, num_workers, used, num_gpus, expected) -> None:
    config = RefreshConfig(devices=devices, num_workers=num_workers)
    assert refresh_devices(config, used_gpus=used, num_gpus=num_gpus) == expected


def test_a_gpu_that_is_not_there() -> None:
    config = RefreshConfig(devices=["cpu", "cuda:2"])
    with pytest.raises(ConfigError, match=r"names cuda:2, but this host has 2 GPUs"):
        refresh_devices(config, used_gpus=[], num_gpus=2)


@pytest.mark.parametrize(
    ("ranks", "threads", "devices", "ray", "says"),
    [
        (2, 1, ["cpu"], None, True),
        (1, 2, ["cpu"], None, False),
        (2, 1, ["cuda:1"], None, False),
        (2, 1, ["cpu"], OnRay("auto", ["cpu"]), False),
        (2, 2, ["cpu", "cpu"], None, True),
        (1, 1, ["cpu"], None, False),
    ],
)
def test_crowded_cores_are_told(ranks, threads, devices, ray, says, caplog) -> None:
    spec = replace(recipe(), devices=devices, ray=ray)
    with caplog.at_level("INFO", logger="pixelrag"):
        say_if_crowded(spec, ranks, threads, cores=2)
    assert ("share 2 cores" in caplog.text) == says


@pytest.mark.parametrize(
    ("wanted", "holders", "trains_on", "expected"),
    [
        ("auto", "ranks", "cuda:1", {"device": "cuda:1", "device_bytes": 5}),
        ("auto", "ranks", "cpu", {"device": "cpu"}),
        ("auto", "ray", "cuda:1", {"device": "cpu"}),
        ("cpu", "ranks", "cuda:1", {"device": "cpu"}),
        ("cuda", "ranks", "cuda:1", {"device": "cuda:1"}),
    ],
)
def test_where_ranks_search(wanted, holders, trains_on, expected, monkeypatch) -> None:
    gpu = SimpleNamespace(total_memory=100)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: gpu)
    index = IndexConfig(device=wanted, holders=holders)
    assert search_device(index, torch.device(trains_on)) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[0, 1, 2], [0, 1, 2]]),
        ({"num_shards": 3}, [[0, 2], [1]]),
        ({"num_shards": 9}, [[0, 2], [1]]),
        ({"num_shards": 3, "holders": "ray"}, [[0, 1, 2], []]),
    ],
)
def test_which_index_files_ranks_open(options, expected) -> None:
    ranks = [World(rank, 2, rank, torch.device("cpu")) for rank in range(2)]
    assert [list(shards_for(IndexConfig(**options), rank)(3)) for rank in ranks] == expected


@pytest.mark.parametrize("address", ["", "ray://head:1", "head", "local", "head:x", "a:b:1"])
def test_addresses_that_are_none(address) -> None:
    with pytest.raises(ValidationError, match="address"):
        RayConfig(address=address)


@pytest.mark.parametrize("devices", [[], ["gpu"], "cuda:x", ["cpu:1"], 3, ["cuda:"]])
def test_devices_that_are_none(devices) -> None:
    with pytest.raises(ValidationError, match="auto, or a list"):
        RefreshConfig(devices=devices)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"trigger": "drift"}, "refresh.trigger drift without refresh.every_steps"),
        ({"deterministic_lag": 3}, "deterministic_lag 3 without refresh.every_steps"),
        ({"max_staleness": 3}, "max_staleness 3 without refresh.every_steps"),
        ({"every_steps": 5, "drift_threshold": 0.1}, "drift_threshold with refresh.trigger steps"),
        (
            {"every_steps": 5, "max_staleness": 3, "deterministic_lag": 4, "on_stale": "stop"},
            "max_staleness 3 with refresh.deterministic_lag 4",
        ),
        ({}, None),
        ({"trigger": "steps"}, None),
        ({"every_steps": 5, "trigger": "drift", "drift_threshold": 0.1}, None),
        ({"every_steps": 5, "max_staleness": 3, "deterministic_lag": 4}, None),
    ],
)
def test_settings_that_cannot_stand_together(settings, says) -> None:
    conflicts = [str(c) for c in refresh_conflicts(RefreshConfig(**settings))]
    if says is None:
        assert conflicts == []
    else:
        (conflict,) = conflicts
        assert says in conflict


def test_generations_that_checkpoints_name_stay(tmp_path) -> None:
    for step, number in ((5, 1), (10, 3)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        state = {"step": step, "position": {"index": {"generation": number}}}
        (folder / "state.json").write_text(json.dumps(state))
    (tmp_path / "checkpoint-15").mkdir()
    knowledge = object.__new__(KnowledgeBase)
    knowledge._config = SimpleNamespace(output_dir=str(tmp_path))
    assert {1, 3} == set(knowledge._named_by_checkpoints()) - {0}
