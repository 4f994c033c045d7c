"""How many collectives a step issues, and how many bytes they carry.

P is the size of the parameters, k the number of chunks, W the number of ranks. Deferred modes
reduce P once whatever k is; per_chunk modes reduce kP. Resident parameters are gathered once a
step, sharded ones about three times a chunk: in both forwards and in the backward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pixelrag.distributed.counting import CollectiveCounter
from pixelrag.distributed.env import World
from pixelrag.gradcache import gradcache_step
from tests.distributed.harness import Results, run_cases
from tests.distributed.toy import make_model, units_of
from tests.distributed.trials import DEFAULTS, build, every_mode, global_batch, own_chunks

pytestmark = pytest.mark.distributed

NUM_RANKS = 2
# Rows a rank that make so many chunks of one row; row i has i % 3 negatives.
ROWS_OF_CHUNKS = {3: 1, 24: 8}
MODES = every_mode("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")


def _parameter_bytes() -> int:
    return sum(p.numel() * 4 for p in make_model().parameters())


def _num_units() -> int:
    return len(units_of(make_model())) + 2  # and the logit scale, and the rest


def count_step(world: World, overrides: dict[str, Any]) -> dict[str, Any]:
    """Collectives inside ``engine.backward``, and parameter gathers of the whole step."""
    case = DEFAULTS | overrides
    engine = build(case, make_model(), world)
    backward = engine.backward
    inside: list[CollectiveCounter] = []

    def counted(loss: torch.Tensor, *, last: bool) -> None:
        with CollectiveCounter() as counter:
            backward(loss, last=last)
        inside.append(counter)

    engine.backward = counted
    for step in range(2):  # the first step also sets things up
        inside.clear()
        part = global_batch(case, step, world.world_size)[world.rank]
        queries, documents = own_chunks(part, case["chunk_size"])
        with CollectiveCounter() as whole:
            gradcache_step(engine, queries, documents, part.positive_B)
            engine.step(1.0)
    return {
        "chunks": len(inside),
        "reductions": sum(counter.gradient_reductions for counter in inside),
        "gradient_bytes": sum(counter.gradient_bytes for counter in inside),
        "gather_bytes": whole.bytes["_allgather_base_"],
    }


@pytest.fixture(scope="module")
def counts() -> Results:
    cases = {
        f"{name}-{chunks}": case | {"images": "all", "chunk_size": 1, "rows": [rows] * NUM_RANKS}
        for name, case in MODES.items()
        for chunks, rows in ROWS_OF_CHUNKS.items()
    }
    target = "tests.distributed.test_reductions:count_step"
    return run_cases(target, cases, nproc=NUM_RANKS)


@pytest.mark.parametrize("num_chunks", ROWS_OF_CHUNKS)
@pytest.mark.parametrize("name", MODES)
def test_number_of_gradient_reductions(counts: Results, name: str, num_chunks: int) -> None:
    found = counts[f"{name}-{num_chunks}"]
    engine, grad_sync, _ = name.split("-")
    each = _num_units() if engine == "fsdp2" else 1
    expected = each if grad_sync == "deferred" else each * num_chunks
    if (engine, grad_sync) == ("zero1", "per_chunk"):
        expected += 1  # DeepSpeed reduces once more at the end of the step
    assert [result["chunks"] for result in found] == [num_chunks] * NUM_RANKS
    assert [result["reductions"] for result in found] == [expected] * NUM_RANKS


@pytest.mark.parametrize("name", MODES)
def test_gradient_bytes(counts: Results, name: str) -> None:
    engine, grad_sync, _ = name.split("-")
    scatters = engine in ("zero3", "fsdp2")
    # An all-reduce works in place; a reduce-scatter has an output of 1/W. Shards are padded.
    once = _parameter_bytes() * (1 + scatters / NUM_RANKS)
    for num_chunks in ROWS_OF_CHUNKS:
        times = 1 if grad_sync == "deferred" else num_chunks
        if (engine, grad_sync) == ("zero1", "per_chunk"):
            times += 1
        found = counts[f"{name}-{num_chunks}"][0]["gradient_bytes"]
        # ZeRO-2 and -3 leave out what a chunk did not use: the vision branch of the queries.
        assert 0.95 * once * times <= found <= 1.05 * once * times
        if not scatters and grad_sync == "deferred":
            assert found == once


@pytest.mark.parametrize("name", MODES)
def test_parameter_bytes(counts: Results, name: str) -> None:
    engine, _, params = name.split("-")
    whole = _parameter_bytes() * (1 + 1 / NUM_RANKS)
    for num_chunks in ROWS_OF_CHUNKS:
        embeddings = counts[f"ddp-deferred-resident-{num_chunks}"][0]["gather_bytes"]
        found = counts[f"{name}-{num_chunks}"][0]["gather_bytes"] - embeddings
        if engine in ("ddp", "zero0"):
            assert found == 0
        elif params == "resident":
            assert 0.95 * whole <= found <= 1.05 * whole
        else:
            assert 2.5 * num_chunks * whole <= found <= 3.1 * num_chunks * whole
