"""The collectives on three ranks in one start, and that each is the identity on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pixelrag.distributed.collectives import (
    agree_max,
    exchange,
    from_main,
    gather_objects,
    gather_with_grad,
    sum_over_ranks,
)
from pixelrag.distributed.env import World, process_group
from pixelrag.distributed.spawn import run_workers
from pixelrag.errors import DataError, EngineError, PixelragError

NUM_RANKS = 3


def on_each_rank(world: World, payload: Any) -> dict[str, Any]:
    """Every collective once."""
    rank = world.rank
    values = torch.tensor([float(rank), 1.0], requires_grad=True)
    total = sum_over_ranks(values)
    local_BD = (torch.arange(4.0).reshape(2, 2) + 10 * rank).requires_grad_()
    gathered_ND = gather_with_grad(local_BD)
    weights_ND = torch.arange(12.0).reshape(6, 2) * (rank + 1)  # each rank has a say in all rows
    (gathered_ND * weights_ND).sum().backward()
    return {
        "agree_max": agree_max([rank, -rank, 5]),
        "exchange": exchange([rank, 10 * rank]),
        "sum": [total.tolist(), total.requires_grad, values.tolist()],
        "gathered": gathered_ND.tolist(),
        "gradient": local_BD.grad.tolist(),
        "objects": gather_objects({"rank": rank}),
        "from_main": from_main(lambda: f"made by {dist.get_rank()}"),
        "error": _raised(lambda: from_main(_fail_with_data)),
        "fault": _raised(lambda: from_main(_fail_otherwise)),
    }


def _fail_with_data() -> None:
    raise DataError(f"rank {dist.get_rank()} found a bad row")


def _fail_otherwise() -> None:
    raise KeyError("a fault")


def _raised(call) -> list[Any]:
    try:
        call()
    except Exception as error:  # noqa: BLE001  (compared by the test)
        return [type(error).__name__, str(error), getattr(error, "told_by_main", False)]
    return ["nothing", "", False]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    root = Path(__file__).resolve().parents[2]
    target = "tests.unit.test_collectives:on_each_rank"
    env = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return run_workers(target, None, nproc=NUM_RANKS, device="cpu", env=env)


def test_small_agreements(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["agree_max"] == [2, 0, 5]
        assert result["exchange"] == [[0, 0], [1, 10], [2, 20]]
        assert result["objects"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def test_a_sum_leaves_its_input_alone(ranks: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(ranks):
        assert result["sum"] == [[3.0, 3.0], False, [float(rank), 1.0]]


def test_a_gather_sums_its_gradients_over_ranks(ranks: list[dict[str, Any]]) -> None:
    everything = [[10 * r + 2 * i, 10 * r + 2 * i + 1] for r in range(3) for i in range(2)]
    weights_ND = torch.arange(12.0).reshape(6, 2)
    for rank, result in enumerate(ranks):
        assert result["gathered"] == everything
        # 1 + 2 + 3 times the weights of the rank's own rows
        assert result["gradient"] == (6 * weights_ND[2 * rank : 2 * rank + 2]).tolist()


def test_what_rank_0_makes_or_meets_reaches_all(ranks: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(ranks):
        assert result["from_main"] == "made by 0"
        told = rank != 0
        assert result["error"] == ["DataError", "rank 0 found a bad row", told]
        name, text, marked = result["fault"]
        assert name == ("KeyError" if rank == 0 else "EngineError")
        assert "a fault" in text
        assert marked == told


@pytest.fixture
def alone() -> Iterator[World]:
    with process_group("cpu") as world:
        yield world


def test_one_process_is_the_identity(alone: World) -> None:
    leaf = torch.ones(2, 3, requires_grad=True)
    assert gather_with_grad(leaf) is leaf
    assert agree_max([3, -1]) == [3, -1]
    assert exchange([3, -1]) == [[3, -1]]
    assert gather_objects("one") == ["one"]
    assert sum_over_ranks(leaf).tolist() == leaf.tolist()
    assert sum_over_ranks(leaf) is not leaf
    with pytest.raises(DataError, match="rank 0 found a bad row"):
        from_main(_fail_with_data)


def test_errors_that_travel_keep_their_kind() -> None:
    assert issubclass(DataError, PixelragError)
    assert issubclass(EngineError, PixelragError)
