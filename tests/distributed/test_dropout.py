"""Dropout falls alike in GradCache's two passes, bit for bit.

That gradients are right under dropout is in `test_features`; here the embeddings of the first
pass and of the replay are compared, and the comparison is shown to notice a replay without the
kept random state.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from pixelrag.distributed.env import World
from pixelrag.distributed.rng import RandContext
from pixelrag.gradcache import gradcache_step
from tests.distributed.harness import Results, run_cases
from tests.distributed.toy import make_model
from tests.distributed.trials import DEFAULTS, build, global_batch, own_chunks

pytestmark = pytest.mark.distributed

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "zero0": {"engine": "zero0"},
    "zero1": {"engine": "zero1"},
    "zero2": {"engine": "zero2"},
    "zero3": {"engine": "zero3"},
    "zero3-sharded": {"engine": "zero3", "params": "sharded"},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-sharded": {"engine": "fsdp2", "params": "sharded"},
}


def two_passes(world: World, overrides: dict[str, Any]) -> dict[str, Any]:
    """Compare the passes' embeddings; the random stream after the step; unlike chunk counts."""
    options = dict(overrides)
    keeps_state = options.pop("keeps_state")
    case = DEFAULTS | {"dropout": 0.5, "rows": [6, 2], "images": "some"} | options
    model = make_model(dropout=case["dropout"], checkpointing=case["checkpointing"])
    engine = build(case, model, world)
    passes: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    forward = engine._forward

    def recorded(role: str, **batch: Any) -> Any:
        emb_BD, log_scale = forward(role, **batch)
        passes[torch.is_grad_enabled()].append(emb_BD.detach().clone())
        return emb_BD, log_scale

    engine._forward = recorded
    if not keeps_state:
        RandContext.replay = lambda self: contextlib.nullcontext()
    part = global_batch(case, 0, world.world_size)[world.rank]
    queries, documents = own_chunks(part, case["chunk_size"])
    torch.manual_seed(world.rank)
    gradcache_step(engine, queries, documents, part.positive_B)
    after = torch.rand(1).item()
    own = len(queries) + len(documents)
    return {
        "equal": [torch.equal(a, b) for a, b in zip(passes[False], passes[True], strict=True)],
        "forwards": len(passes[False]),
        "own": own,
        "after": after,
        "expected": _after_own_forwards(world.rank, case, queries, documents),
        "differs from eval": _differs_in_eval(engine, queries[0], passes[False][0]),
    }


def _after_own_forwards(rank: int, case: dict[str, Any], queries, documents) -> float:
    """What a rank draws next when it has run its own chunks once, and nothing else."""
    model = make_model(dropout=case["dropout"])
    torch.manual_seed(rank)
    with torch.no_grad():
        for role, chunks in (("query", queries), ("document", documents)):
            for chunk in chunks:
                model(role, **chunk)
    return torch.rand(1).item()


def _differs_in_eval(engine, chunk, emb_BD) -> bool:
    with engine.inference():
        return not torch.equal(engine("query", **chunk)[0], emb_BD)


@pytest.fixture(scope="module")
def results() -> Results:
    cases = {name: way | {"keeps_state": True} for name, way in WAYS.items()}
    cases |= {
        f"{name}, checkpointing": way | {"keeps_state": True, "checkpointing": True}
        for name, way in WAYS.items()
    }
    cases["without"] = WAYS["ddp"] | {"keeps_state": False}  # last: it breaks RandContext
    return run_cases("tests.distributed.test_dropout:two_passes", cases, nproc=2)


@pytest.mark.parametrize("checkpointing", ["", ", checkpointing"])
@pytest.mark.parametrize("name", WAYS)
def test_the_replay_is_bit_exact(results: Results, name: str, checkpointing: str) -> None:
    found = results[name + checkpointing]
    for result in found:
        assert all(result["equal"]), result["equal"]
        assert result["differs from eval"]
    # The rank with two rows runs as many forwards as the one with six.
    assert found[0]["forwards"] == found[1]["forwards"] == found[0]["own"] > found[1]["own"]


def test_the_comparison_notices_a_replay_with_other_numbers(results: Results) -> None:
    for result in results["without"]:
        assert not any(result["equal"][: result["own"]])


@pytest.mark.parametrize("name", WAYS)
def test_a_step_advances_the_random_stream_as_its_own_forwards_do(
    results: Results, name: str
) -> None:
    """Padding calls and the replay leave no trace."""
    for result in results[name]:
        assert result["after"] == result["expected"]
