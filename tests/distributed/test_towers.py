"""A tower that only some ranks use: exact where parameters are whole, else one named error.

Two equally shaped towers are the dangerous case: their collectives fit each other, so that ranks
exchange each other's weights or gradients and no library complains.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from pixelrag.distributed.env import World
from pixelrag.engine import build_engine
from pixelrag.errors import EngineError
from tests.distributed.harness import DETAIL, Results, run_cases
from tests.distributed.towers import double, make_input, make_towers
from tests.distributed.toy import make_optimizer, norm_ratio, relative_error
from tests.distributed.trials import every_mode

pytestmark = pytest.mark.distributed

MODES = every_mode("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")
NEED_THE_SAME_FORWARDS = [n for n in MODES if n.startswith(("zero3", "fsdp2", "zero2-per_chunk"))]
# What ranks 0 and 1 use in each chunk.
PATTERNS = {
    "each another": [["left"], ["right"]],
    "one none": [["left right", "left right"], ["left", "left"]],
    "later chunk": [["left", "right", "left"], ["left", "left", "left"]],
    "only first chunk": [["left right", "left"], ["left right", "left"]],
    "only last chunk": [["left", "left right"], ["left", "left right"]],
    "nobody": [["left", "left"], ["left", "left"]],
}
UNLIKE = ("each another", "one none", "later chunk")


def one_step(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Gradient errors of one step, or the engine's refusal; with ``before``, of a second step."""
    module, reference = make_towers(), double(make_towers())
    engine = build_engine(
        module,
        make_optimizer,
        name=case["engine"],
        device=world.device,
        blocks=[module.left, module.right] if case["units"] else [],
        grad_sync=case["grad_sync"],
        params=case["params"],
    )
    if case["before"]:  # a step that uses everything, whose gradients must not come back
        engine.backward(engine("any", x_BS=make_input(world.rank, 9), use="left right"), last=True)
        engine.step(0.0)
        reference.load_state_dict(_double_weights(engine, reference))
    uses = case["pattern"][world.rank]
    try:
        for index, use in enumerate(uses):
            loss = engine("any", x_BS=make_input(world.rank, index), use=use)
            engine.backward(loss, last=index == len(uses) - 1)
    except EngineError as error:
        return {"refused": str(error)}
    for rank in range(world.world_size):
        for index, use in enumerate(case["pattern"][rank]):
            reference("any", x_BS=make_input(rank, index).double(), use=use).backward()
    expected = {
        n: p.new_zeros(p.shape) if p.grad is None else p.grad
        for n, p in reference.named_parameters()
    }
    got = engine.gradients()
    return {"gradient": relative_error(got, expected), "ratio": norm_ratio(got, expected)}


def _double_weights(engine, reference) -> dict[str, Any]:
    import torch.distributed as dist

    box = [{name: weight.double() for name, weight in engine.full_parameters().items()}]
    dist.broadcast_object_list(box, 0)
    return box[0]


def _parts_ranks(mode: str, pattern: str, units: bool) -> bool:
    """Unlike numbers of gathers, with which ranks part inside a forward: see `PARTING`.

    ("later chunk": what one rank still holds the other must gather.)
    """
    unlike = pattern in ("one none", "later chunk")
    return unlike and (mode.startswith("zero3") or (units and mode.startswith("fsdp2")))


CASES = {
    f"{mode}, {pattern}, {'units' if units else 'one unit'}": MODES[mode]
    | {"pattern": uses, "units": units, "before": pattern not in UNLIKE}
    for mode in MODES
    for pattern, uses in PATTERNS.items()
    for units in (True, False)
    if units or mode.startswith("fsdp2")  # no other engine has units
    if not _parts_ranks(mode, pattern, units)
}
PARTING = {
    name: every_mode(name)[f"{name}-deferred-sharded"]
    | {"pattern": PATTERNS["one none"], "units": True, "before": False}
    for name in ("zero3", "fsdp2")
}


@pytest.fixture(scope="module")
def results() -> Results:
    return run_cases("tests.distributed.test_towers:one_step", CASES, nproc=2, env=DETAIL)


@pytest.mark.parametrize("name", CASES)
def test_exact_or_refused(results: Results, name: str) -> None:
    mode, pattern, units = name.split(", ")
    may_refuse = mode in NEED_THE_SAME_FORWARDS and pattern in UNLIKE
    if mode.startswith("fsdp2") and units == "one unit":
        may_refuse = False  # one unit is gathered and reduced as a whole, whatever is used of it
    for rank, result in enumerate(results[name]):
        if may_refuse:
            assert "refused" in result, f"rank {rank}: {result}"
            assert "ranks ran different forwards" in result["refused"]
            assert "rank 0: " in result["refused"]
            assert "rank 1: " in result["refused"]
            assert "right" in result["refused"]
        else:
            assert result["gradient"] <= 1e-5, f"rank {rank}: {result}"
            assert abs(result["ratio"] - 1) <= 1e-5


@pytest.mark.parametrize("name", PARTING)
def test_ranks_that_part_inside_a_forward_end_soon(name: str) -> None:
    """Nothing can be compared before they part; all that can be asked for is that no one waits."""
    started = time.monotonic()
    target = "tests.distributed.test_towers:one_step"
    with pytest.raises(
        (EngineError, pytest.fail.Exception), match=r"[Mm]ismatch|Connection|imed out"
    ):
        run_cases(
            target,
            {name: PARTING[name]},
            nproc=2,
            env=DETAIL,
            collective_timeout_seconds=10,
        )[name]
    assert time.monotonic() - started < 60
