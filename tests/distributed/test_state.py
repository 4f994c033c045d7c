"""Weights and optimizer state taken from one engine continue on any other, at any world size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pixelrag.distributed.env import World
from pixelrag.errors import CheckpointError
from tests.distributed.harness import Results, run_alone, run_cases
from tests.distributed.trials import (
    DEFAULTS,
    build,
    final_errors,
    model_for,
    one_step,
    reference_for,
)

pytestmark = pytest.mark.distributed

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "zero0": {"engine": "zero0"},
    "zero1": {"engine": "zero1"},
    "zero2": {"engine": "zero2"},
    "zero2 offload": {"engine": "zero2", "offload": True},
    "zero3": {"engine": "zero3"},
    "zero3 sub-groups": {"engine": "zero3", "zero": {"sub_group_size": 100}},
    "zero3 sharded": {"engine": "zero3", "params": "sharded", "grad_sync": "per_chunk"},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2 sharded": {"engine": "fsdp2", "params": "sharded", "grad_sync": "per_chunk"},
}


def _take(engine) -> tuple[dict, dict]:
    """Weights and state, on every rank."""
    box = [engine.full_parameters(), engine.optimizer_state()]
    dist.broadcast_object_list(box, 0)
    return box[0], box[1]


def chain(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """One step on each engine of a chain, each continuing from the one before."""
    reference = reference_for(DEFAULTS)
    weights, state, errors = None, None, {}
    for number, way in enumerate(case["ways"]):
        options = DEFAULTS | WAYS[way]
        model = model_for(options)
        if weights is not None:
            model.load_state_dict(weights)
        engine = build(options, model, world)
        if state is not None:
            engine.load_optimizer_state(state)
            kept_weights, kept_state = _take(engine)
            assert all(torch.equal(kept_weights[n], w) for n, w in weights.items())
            assert _same(kept_state, state), way
        found = one_step(engine, reference, options, number, world)
        errors = {key: max(value, errors.get(key, 0.0)) for key, value in found.items()}
        weights, state = _take(engine)
    if case["file"] and world.is_main:
        kept = {
            "weights": weights,
            "state": state,
            "expected": reference.model.state_dict(),
            "expected_state": {n: dict(s) for n, s in reference.state().items()},
        }
        torch.save(kept, case["file"])
    return errors | final_errors(engine, reference)


def _same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name][key], value)
        for name, entries in right.items()
        for key, value in entries.items()
    )


def continue_alone(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Read what two ranks wrote; continue for two steps at this world size."""
    kept = torch.load(case["file"], weights_only=True)
    options = DEFAULTS | WAYS[case["way"]]
    model = model_for(options)
    model.load_state_dict(kept["weights"])
    engine = build(options, model, world)
    engine.load_optimizer_state(kept["state"])
    reference = reference_for(DEFAULTS)
    reference.model.load_state_dict(kept["expected"])
    for name, parameter in reference.named:
        reference.optimizer.state[parameter] = kept["expected_state"][name]
    errors: dict[str, float] = {}
    for step in (10, 11):
        found = one_step(engine, reference, options, step, world)
        errors = {key: max(value, errors.get(key, 0.0)) for key, value in found.items()}
    return errors | final_errors(engine, reference)


def before_the_first_step(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """A fresh engine has no state; a state of other names or shapes is refused."""
    options = DEFAULTS | WAYS[case["way"]]
    engine = build(options, model_for(options), world)
    fresh = engine.optimizer_state()
    shape = (7, 12)  # of encoder.head.weight
    good = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(shape)}
    refused = []
    for bad in (
        {"encoder.nobody": good},
        {"encoder.head.weight": good | {"exp_avg": torch.zeros(12, 7)}},
    ):
        try:
            engine.load_optimizer_state(bad)
        except CheckpointError as error:
            refused.append(str(error))
    trainable = engine.full_parameters(trainable_only=True)
    return {"fresh": len(fresh), "refused": refused, "trainable": sorted(trainable)}


def run_named(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Run the case's function."""
    return globals()[case["function"]](world, case)


@pytest.fixture(scope="module")
def kept_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state") / "kept.pt"


@pytest.fixture(scope="module")
def results(kept_file: Path) -> Results:
    forward = list(WAYS)
    cases: dict[str, dict[str, Any]] = {
        "forward": {"function": "chain", "ways": forward, "file": None},
        "backward": {"function": "chain", "ways": forward[::-1], "file": None},
        "kept": {"function": "chain", "ways": ["zero3"], "file": str(kept_file)},
    }
    cases |= {way: {"function": "before_the_first_step", "way": way} for way in WAYS}
    return run_cases("tests.distributed.test_state:run_named", cases, nproc=2)


@pytest.fixture(scope="module")
def alone(results: Results, kept_file: Path) -> Results:
    results["kept"]
    cases = {way: {"way": way, "file": str(kept_file)} for way in WAYS}
    return run_alone("tests.distributed.test_state:continue_alone", cases)


def _assert_exact(found: list[dict[str, float]]) -> None:
    """The bar of the matrix for everything that a step measures."""
    for result in found:
        assert {"gradient", "norm_ratio", "temperature", "norm", "loss"} <= result.keys()
        misses = {key: value for key, value in result.items() if not value <= 1e-5}
        assert not misses, misses


@pytest.mark.parametrize("order", ["forward", "backward"])
def test_training_goes_on_from_engine_to_engine(results: Results, order: str) -> None:
    found = results[order]
    _assert_exact(found)
    assert {"weights", "exp_avg", "exp_avg_sq"} <= found[0].keys()


@pytest.mark.parametrize("way", WAYS)
def test_one_process_continues_what_two_began(alone: Results, way: str) -> None:
    (result,) = alone[way]
    _assert_exact([result])
    assert {"weights", "exp_avg", "exp_avg_sq"} <= result.keys()


@pytest.mark.parametrize("way", WAYS)
def test_before_the_first_step(results: Results, way: str) -> None:
    for rank, result in enumerate(results[way]):
        assert result["fresh"] == 0
        unknown, shape = result["refused"]
        assert "encoder.nobody" in unknown
        assert "encoder.head.weight/exp_avg has shape [12, 7], expected [7, 12]" in shape
        names = [name for name, _ in model_for(DEFAULTS).named_parameters()]
        assert result["trainable"] == (sorted(names) if rank == 0 else [])
