"""The same global batches give the same training on 1, 2 and 4 ranks and on every engine.

Twenty clipped AdamW steps in fp32. Every run sums the same numbers in another order, so runs
differ by rounding, which AdamW carries on from step to step. Measured over all engines and world
sizes: against plain replication on one process losses differ by 2.4e-7, norms by 2.8e-6 and
weights by 5.7e-7 of the way that they went; against float64 by 1.8e-7, 1.5e-6 and 2.1e-6. The
tolerances below are about five times that.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pixelrag.distributed.env import World
from pixelrag.gradcache import gradcache_step
from tests.distributed.harness import Results, run_alone, run_cases
from tests.distributed.toy import make_rank_batch, make_row, relative_error
from tests.distributed.trials import (
    DEFAULTS,
    as_float64,
    build,
    model_for,
    own_chunks,
    reference_for,
)

pytestmark = pytest.mark.distributed

NUM_STEPS, GLOBAL_BATCH, CHUNK_SIZE = 20, 16, 4
LOSSES, NORMS, WAY = 1e-6, 1e-5, 1e-5
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "zero0": {"engine": "zero0"},
    "zero1": {"engine": "zero1"},
    "zero2": {"engine": "zero2"},
    "zero3": {"engine": "zero3"},
    "fsdp2": {"engine": "fsdp2"},
}


def _rows(step: int) -> list:
    """The global batch of a step; every other row's documents have images."""
    return [
        make_row(
            step,
            index,
            negatives=2,
            query_images=False,
            document_images="some" if index % 2 else "none",
        )
        for index in range(GLOBAL_BATCH)
    ]


def train(world: World, overrides: dict[str, Any]) -> dict[str, Any]:
    """Losses, norms, and on rank 0 the final weights, flat and in the order of their names."""
    case = DEFAULTS | overrides
    engine = build(case, model_for(case), world)
    losses, norms = [], []
    share = GLOBAL_BATCH // world.world_size
    for step in range(NUM_STEPS):
        rows = _rows(step)[world.rank * share : (world.rank + 1) * share]
        part = make_rank_batch(rows, torch.float32)
        chunks = own_chunks(part, CHUNK_SIZE)
        losses.append(gradcache_step(engine, *chunks, part.positive_B).loss)
        norms.append(engine.step(1.0))
    weights = engine.full_parameters()
    return {
        "losses": losses,
        "norms": norms,
        "weights": {name: weight.tolist() for name, weight in weights.items()},
    }


def float64_training() -> dict[str, Any]:
    """The same in one float64 process by plain autograd."""
    reference = reference_for(DEFAULTS)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = reference.loss(as_float64([make_rank_batch(_rows(step), torch.float32)]))
        reference.backward(loss)
        losses.append(loss.item())
        norms.append(reference.step(1.0))
    return {"losses": losses, "norms": norms, "weights": reference.weights()}


@pytest.fixture(scope="module")
def runs() -> dict[int, Results]:
    target = "tests.distributed.test_world_size:train"
    return {
        1: run_alone(target, WAYS),
        2: run_cases(target, WAYS, nproc=2),
        4: run_cases(target, WAYS, nproc=4),
    }


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return float64_training()


def _way(weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    initial = reference_for(DEFAULTS).initial
    return {
        name: torch.as_tensor(weight, dtype=torch.float64) - initial[name]
        for name, weight in weights.items()
    }


def _assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got["losses"] == pytest.approx(wanted["losses"], rel=LOSSES)
    assert got["norms"] == pytest.approx(wanted["norms"], rel=NORMS)
    assert relative_error(_way(got["weights"]), _way(wanted["weights"])) <= WAY


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", WAYS)
def test_same_training(
    runs: dict[int, Results], expected: dict[str, Any], name: str, world_size: int
) -> None:
    results = runs[world_size][name]
    _assert_same(results[0], expected)
    _assert_same(results[0], runs[1]["ddp"][0])
    for result in results:
        assert result["losses"] == results[0]["losses"]
        assert result["norms"] == results[0]["norms"]


def test_the_training_moves(expected: dict[str, Any]) -> None:
    """Guards the comparison: the loss falls, and clipping acts in some steps but not in all."""
    assert expected["losses"][-1] < 0.5 * expected["losses"][0]
    assert min(expected["norms"]) < 1.0 < max(expected["norms"])
