"""The engine's protocol: what is refused, what is left alone, what acts at once.

Each case runs on two ranks, on every engine in every mode.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pixelrag.distributed.env import World
from pixelrag.engine import Engine, build_engine
from pixelrag.errors import EngineError
from tests.distributed.harness import Results, run_cases
from tests.distributed.towers import SIZE, double, make_input, make_towers
from tests.distributed.toy import relative_error
from tests.distributed.trials import every_mode

pytestmark = pytest.mark.distributed

MODES = every_mode("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")
LEARNING_RATE = 0.1
MOMENTUM = 0.5


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Plain enough to follow by hand."""
    return torch.optim.SGD([p for _, p in named], lr=LEARNING_RATE, momentum=MOMENTUM)


def build(world: World, case: dict[str, Any], module: nn.Module) -> Engine:
    return build_engine(
        module,
        sgd,
        name=case["engine"],
        device=world.device,
        blocks=[module.left, module.right],
        grad_sync=case["grad_sync"],
        params=case["params"],
    )


def _loss(engine: Engine, index: int, use: str = "left right") -> torch.Tensor:
    return engine("any", x_BS=make_input(engine.rank, index), use=use)


class Follower:
    """The same training in one float64 process."""

    def __init__(self, num_ranks: int) -> None:
        self.module = double(make_towers())
        self.optimizer = sgd(list(self.module.named_parameters()))
        self.num_ranks = num_ranks

    def step(self, indices: list[int], max_norm: float | None = None) -> float:
        for rank in range(self.num_ranks):
            for index in indices:
                self.module(
                    "any", x_BS=make_input(rank, index).double(), use="left right"
                ).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def weight_error(self, engine: Engine) -> float | None:
        """Relative error of the engine's weights; None on other ranks than 0."""
        weights = engine.full_parameters()
        return relative_error(weights, self.module.state_dict()) if weights else None


def misuse(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Calls out of order raise and change nothing; the step after them is the right one."""
    engine, follower = build(world, case, make_towers()), Follower(world.world_size)
    errors = []

    def refused(call) -> None:
        try:
            call()
        except EngineError as error:
            errors.append(str(error))

    refused(engine.step)
    engine.backward(_loss(engine, 0), last=False)
    refused(engine.step)
    engine.backward(_loss(engine, 1), last=True)
    refused(lambda: engine.backward(torch.zeros((), requires_grad=True), last=True))
    refused(lambda: engine.backward(torch.zeros((), requires_grad=True), last=False))
    engine.step()
    refused(engine.step)
    follower.step([0, 1])
    return {"errors": errors, "weights": follower.weight_error(engine)}


def not_finite(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """One rank's gradient is not finite: all see it, weights and momentum stay, and it goes on."""
    engine, follower = build(world, case, make_towers()), Follower(world.world_size)
    norms = []
    engine.backward(_loss(engine, 0), last=True)
    engine.step(1.0)
    follower.step([0], 1.0)
    for bad in (float("nan"), float("inf")):
        engine.backward(_loss(engine, 1), last=False)
        factor = bad if world.rank == world.world_size - 1 else 1.0
        engine.backward(_loss(engine, 2) * factor, last=True)
        norms.append(engine.step(1.0))
    kept = follower.weight_error(engine)
    engine.backward(_loss(engine, 3), last=True)
    norm, expected = engine.step(1.0), follower.step([3], 1.0)
    return {
        "finite": [torch.isfinite(torch.tensor(norm)).item() for norm in norms],
        "kept": kept,
        "norm": abs(norm / expected - 1),
        "weights": follower.weight_error(engine),
    }


def learning_rate(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """A schedule writes ``param_groups``; the very next step must use what it wrote."""
    engine, follower = build(world, case, make_towers()), Follower(world.world_size)
    for index, rate in enumerate((0.1, 0.02, 0.0, 0.05)):
        for optimizer in (engine.optimizer, follower.optimizer):
            for group in optimizer.param_groups:
                group["lr"] = rate
        engine.backward(_loss(engine, index), last=True)
        engine.step()
        follower.step([index])
    return {"weights": follower.weight_error(engine)}


def fresh_weights(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Forwards without gradients, before and after a step, see the weights of their moment."""
    engine, follower = build(world, case, make_towers()), Follower(world.world_size)
    x_BS = make_input(0, 50)

    def outputs() -> list[float]:
        with torch.no_grad():
            plain = engine("any", x_BS=x_BS, use="left right").item()
        with engine.inference():
            inside = engine("any", x_BS=x_BS, use="left right").item()
        with torch.no_grad():
            return [plain, inside, engine("any", x_BS=x_BS, use="left right").item()]

    worst = 0.0
    for index in range(3):
        with torch.no_grad():
            expected = follower.module("any", x_BS=x_BS.double(), use="left right").item()
        worst = max([worst, *(abs(value / expected - 1) for value in outputs())])
        engine.backward(_loss(engine, index), last=True)
        if index > 0:  # gathers the weights once more, which the step is about to change
            with torch.no_grad():
                engine("any", x_BS=x_BS, use="left right")
        engine.step()
        follower.step([index])
    return {"output": worst, "weights": follower.weight_error(engine)}


def inference_mode(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Eval mode inside, no graph, training mode again outside, also after an error."""
    engine = build(world, case, make_towers())
    with engine.inference():
        inside = engine.module.training
        graph = engine("any", x_BS=make_input(0), use="left").requires_grad
    try:
        with engine.inference():
            raise KeyError("an error in the evaluation")
    except KeyError:
        after = engine.module.training
    return {"inside": inside, "graph": graph, "after": after}


def two_forwards(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Siamese use: two forwards with graphs, one backward through both."""
    engine, follower = build(world, case, make_towers()), Follower(world.world_size)
    for index in (0, 2):
        first, second = _loss(engine, index), _loss(engine, index + 1)
        engine.backward(first + second, last=True)
        engine.step(2.0)
        follower.step([index, index + 1], 2.0)
    return {"weights": follower.weight_error(engine)}


def unlike_starts(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Ranks that built other weights all start from those of rank 0."""
    module, follower = make_towers(), Follower(world.world_size)
    if world.rank != 0:
        nn.init.zeros_(module.left.weight)
        module.right.bias.data += 1
    engine = build(world, case, module)
    engine.backward(_loss(engine, 0), last=True)
    engine.step()
    follower.step([0])
    return {"weights": follower.weight_error(engine)}


def run_named(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Run the case's function."""
    return globals()[case["function"]](world, case)


FUNCTIONS = (
    misuse,
    not_finite,
    learning_rate,
    fresh_weights,
    inference_mode,
    two_forwards,
    unlike_starts,
)
CASES = {
    f"{mode}, {function.__name__}": MODES[mode] | {"function": function.__name__}
    for mode in MODES
    for function in FUNCTIONS
}


@pytest.fixture(scope="module")
def results() -> Results:
    return run_cases("tests.distributed.test_protocol:run_named", CASES, nproc=2)


def _weights(found: list[dict[str, Any]]) -> float:
    assert [result["weights"] is None for result in found] == [False, True]
    return found[0]["weights"]


@pytest.mark.parametrize("mode", MODES)
def test_calls_out_of_order_raise(results: Results, mode: str) -> None:
    found = results[f"{mode}, misuse"]
    for rank, result in enumerate(found):
        before, early, again, once_more, twice = result["errors"]
        for error in (before, early, twice):
            assert f"rank {rank}: step() before backward(last=True)" in error
        for error in (again, once_more):
            assert f"rank {rank}: backward() after backward(last=True)" in error
    assert _weights(found) <= 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_that_is_not_finite_changes_nothing(results: Results, mode: str) -> None:
    found = results[f"{mode}, not_finite"]
    for result in found:
        assert result["finite"] == [False, False]
        assert result["norm"] <= 1e-5
    assert found[0]["kept"] <= 1e-6
    assert _weights(found) <= 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_a_new_learning_rate_acts_in_the_next_step(results: Results, mode: str) -> None:
    assert _weights(results[f"{mode}, learning_rate"]) <= 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_every_forward_sees_the_weights_of_its_moment(results: Results, mode: str) -> None:
    found = results[f"{mode}, fresh_weights"]
    assert max(result["output"] for result in found) <= 1e-5
    assert _weights(found) <= 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_inference(results: Results, mode: str) -> None:
    for result in results[f"{mode}, inference_mode"]:
        assert result == {"inside": False, "graph": False, "after": True}


@pytest.mark.parametrize("mode", MODES)
def test_two_forwards_before_one_backward(results: Results, mode: str) -> None:
    assert _weights(results[f"{mode}, two_forwards"]) <= 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_start_from_rank_0(results: Results, mode: str) -> None:
    assert _weights(results[f"{mode}, unlike_starts"]) <= 1e-6


def test_the_loss_depends_on_what_the_cases_change() -> None:
    """Guards the cases: another learning rate or input would show in the weights."""
    one, other = Follower(2), Follower(2)
    one.step([0])
    other.step([1])
    assert relative_error(one.module.state_dict(), other.module.state_dict()) > 1e-2
    assert make_input(0).shape == (3, SIZE)
