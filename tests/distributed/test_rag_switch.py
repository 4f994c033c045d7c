"""Two ranks, one knowledge base: switches, shards, snapshots, and ranks that die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pixelrag.errors import EngineError
from pixelrag.retrieval.generations import Generations
from pixelrag.retrieval.history import Event
from tests.distributed.harness import Results, run_cases
from tests.distributed.rag_cases import events
from tests.distributed.trials import (
    DEFAULTS,
    as_float64,
    global_batch,
    model_for,
    reference_for,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "zero2": {"engine": "zero2"},
    "zero3": {"engine": "zero3"},
    "zero3 sharded": {"engine": "zero3", "params": "sharded", "grad_sync": "per_chunk"},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2 sharded": {"engine": "fsdp2", "params": "sharded", "grad_sync": "per_chunk"},
}
SHARDS = (1, 3)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("rag")
    names = [
        "same_step",
        "lag",
        "replay",
        "unusable",
        "failed",
        "stale",
        "resume",
        "handing_over",
        "gpus",
    ]
    cases: dict[str, dict[str, Any]] = {name: {"function": name} for name in names}
    for shards in SHARDS:
        queries = [[5, 5], [4, 1], [0, 3], [0, 0]]
        cases[f"sharded {shards}"] = {"function": "sharded", "shards": shards, "queries": queries}
    for name, options in ENGINES.items():
        cases[f"snapshot {name}"] = {"function": "snapshot", "options": options}
    for name, case in cases.items():
        case["folder"] = str(root / name.replace(" ", "_"))
    return run_cases("tests.distributed.rag_cases:run_named", cases, nproc=2)


def alike(found: list[dict[str, Any]], *keys: str) -> dict[str, Any]:
    """The first rank's result, once the second says the same of the keys."""
    for key in keys:
        assert found[0][key] == found[1][key], key
    return found[0]


def test_all_switch_at_the_same_step_and_none_waits(results: Results) -> None:
    found = results["same_step"]
    told = alike(found, "history", "number", "switched_at", "in_flight")
    assert told["number"] == 2
    assert told["in_flight"] is None
    start, switch = events(told["history"])[-2:]
    assert start == Event(3, "start")
    assert switch == Event(told["switched_at"], "switch", 2)
    assert told["age"] == told["switched_at"] - 3
    # The slow rank took half a second to open it, in which training went on.
    assert told["switched_at"] >= max(r["published_at"] for r in found) + 5
    assert max(seconds for r in found for seconds in r["seconds"]) < 0.25


def test_a_lag_pins_the_step(results: Results) -> None:
    told = alike(results["lag"], "history", "number")
    assert events(told["history"]) == [
        Event(0, "start"),
        Event(0, "switch", 1),
        Event(5, "start"),
        Event(10, "switch", 2),
        Event(10, "start"),
        Event(15, "switch", 3),
        Event(15, "start"),
    ]


def test_old_generations_go(results: Results) -> None:
    numbers = results["lag"][0]["numbers"]
    assert numbers[:2] == [2, 3]  # the fourth may have come meanwhile


def test_a_run_is_repeated_from_its_history(results: Results) -> None:
    for told in results["replay"]:
        first = events(told["first"]["history"])
        assert sum(event.kind == "failed" for event in first) == 1
        assert [event.generation for event in first if event.kind == "switch"] == [1, 2, 3]
        lost = {event.step for event in first if event.kind == "failed"}
        expected = [event for event in first if event.step not in lost]
        assert events(told["second"]["history"]) == expected
    alike([told["first"] for told in results["replay"]], "history")


def test_what_one_rank_cannot_open_nobody_uses(results: Results) -> None:
    told = [r["between"] for r in results["unusable"]]
    between = alike(told, "history", "number", "in_flight")
    assert (between["number"], between["in_flight"]) == (1, None)
    assert events(between["history"])[-1] == Event(3, "failed", 2)
    assert not any(r["settled"] for r in results["unusable"])
    after = alike([r["after"] for r in results["unusable"]], "history", "number")
    assert after["number"] == 3


def test_a_failed_refresh_is_over_on_all_ranks(results: Results) -> None:
    between = alike([r["between"] for r in results["failed"]], "history", "number", "in_flight")
    assert (between["number"], between["in_flight"]) == (1, None)
    assert events(between["history"])[-1] == Event(2, "failed", 2)
    after = alike([r["after"] for r in results["failed"]], "history", "number")
    assert after["number"] == 2


def test_a_stale_generation_stops_or_warns(results: Results) -> None:
    told = alike(results["stale"], "warn", "stop")
    assert told["warn"] == "nothing"
    assert told["stop"].startswith("5: step 5: generation 1 is 5 steps old, more than")


def test_a_run_goes_on_with_the_refresh_in_flight(results: Results) -> None:
    restored = alike([r["restored"] for r in results["resume"]], "number", "in_flight", "history")
    assert (restored["number"], restored["in_flight"]) == (1, 3)
    after = alike([r["after"] for r in results["resume"]], "number", "in_flight", "history")
    assert (after["number"], after["in_flight"]) == (2, None)
    assert events(after["history"])[-2:] == [Event(3, "start"), Event(13, "switch", 2)]


def test_a_lost_refresh_is_no_longer_in_flight(results: Results) -> None:
    lost = alike([r["lost"] for r in results["resume"]], "number", "in_flight", "history")
    assert (lost["number"], lost["in_flight"]) == (2, None)
    assert events(lost["history"])[-1] == Event(3, "failed")


def test_a_checkpoint_wants_its_own_generation(results: Results) -> None:
    for told in results["resume"]:
        for name, path in (("other", "gen-000001"), ("gone", "gen-000007")):
            assert told[name].startswith("CheckpointError")
            assert f"{path}: not the generation that the checkpoint was trained with" in told[name]


@pytest.mark.parametrize("shards", SHARDS)
def test_shards_answer_as_a_whole(results: Results, shards: int) -> None:
    found = results[f"sharded {shards}"]
    for told in found:
        assert told["equal"] == [True] * 4
        assert "query 1 of 2 is not finite" in told["raised"]
    assert sorted(s for told in found for s in told["shards"]) == list(range(shards))


def test_gpu_numbers_are_those_of_a_host(results: Results) -> None:
    for rank, told in enumerate(results["gpus"]):
        assert told == {"one host": [0, 1], "two hosts": [rank]}


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """The encoder after the reference's own two steps."""
    reference = reference_for(DEFAULTS)
    for step in range(2):
        parts = as_float64(global_batch(DEFAULTS, step, 2))
        reference.backward(reference.loss(parts, 2, None))
        reference.step(DEFAULTS["max_norm"])
    weights = reference.model.state_dict()
    return {n.removeprefix("encoder."): w for n, w in weights.items() if n.startswith("encoder.")}


@pytest.mark.parametrize("name", ENGINES)
def test_snapshots_are_whole_on_every_engine(results: Results, expected, name: str) -> None:
    main, other = results[f"snapshot {name}"]
    assert other["found"] == {}
    assert other["left"] == []
    assert main["left"] == ["weights.safetensors"] * 3
    found = {n: torch.tensor(w, dtype=torch.float64) for n, w in main["found"]["fp32"].items()}
    assert found.keys() == expected.keys()
    initial = model_for(DEFAULTS).encoder.state_dict()
    for key, weight in found.items():
        way = (expected[key] - initial[key]).norm()
        assert way > 0
        assert (weight - expected[key]).norm() <= 1e-4 * way, key
    rounded = main["found"]["bf16"]
    for key, weight in found.items():
        assert torch.tensor(rounded[key]).equal(weight.bfloat16().float()), key
    layers = {n.removeprefix("layers.") for n in expected if n.startswith("layers.")}
    assert main["found"]["layers"].keys() == layers
    assert main["head"] == ["encoder.head.bias", "encoder.head.weight"]
    assert other["head"] == []
    for told in (main, other):
        assert "no weights whose names begin with 'nobody.'" in told["refused"]
        assert max(told["errors"][key] for key in ("loss", "gradient")) <= 1e-5


def test_a_snapshot_that_cannot_be_written_stops_nobody(results: Results) -> None:
    for number, wanted in enumerate(([1, None], [1, None], [2, None])):
        told = alike([r["states"][number] for r in results["handing_over"]], "history", "number")
        assert [told["number"], told["in_flight"]] == wanted
    kinds = [e.kind for e in events(told["history"])]
    assert kinds == ["start", "switch", "start", "failed", "start", "failed", "start", "switch"]


def test_a_rank_killed_in_the_switch_ends_the_run_and_spoils_nothing(tmp_path: Path) -> None:
    case = {"killed": {"function": "killed", "folder": str(tmp_path)}}
    with pytest.raises(EngineError, match="rank 1 ended with code -9"):
        run_cases(
            "tests.distributed.rag_cases:run_named", case, nproc=2, collective_timeout_seconds=20
        )
    generations = Generations(tmp_path / "index")
    assert generations.numbers() == [1, 2]
    for number in (1, 2):
        generations.open(number).verify()
