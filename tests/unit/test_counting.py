"""The counter sees every collective and tells gradients from agreements."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from pixelrag.distributed.counting import CollectiveCounter
from pixelrag.distributed.env import World, process_group

# As in `collectives`: torch 2.13 renamed them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@pytest.fixture
def group() -> Iterator[World]:
    with process_group("cpu") as world:
        yield world


def test_calls_and_bytes_by_operation(group: World) -> None:
    whole, part = torch.ones(6), torch.ones(6)
    with CollectiveCounter() as counter:
        dist.all_reduce(whole)
        dist.all_reduce(torch.ones(4, dtype=torch.float64))
        all_gather(whole, part)
        reduce_scatter(part, whole)
        dist.broadcast(whole, 0)
    assert counter.calls["allreduce_"] == 2
    assert counter.bytes["allreduce_"] == 6 * 4 + 4 * 8
    assert counter.bytes["_allgather_base_"] == 2 * 6 * 4
    assert counter.calls["broadcast_"] == 1
    assert sum(counter.calls.values()) == 5
    assert counter.gradient_reductions == 3
    assert counter.gradient_bytes == 6 * 4 + 4 * 8 + 2 * 6 * 4


def test_agreements_and_norms_are_no_gradients(group: World) -> None:
    with CollectiveCounter() as counter:
        dist.all_reduce(torch.tensor([1, 2, 3]))
        dist.all_reduce(torch.tensor(1.5))
        dist.all_reduce(torch.tensor([1.5]))
        dist.barrier()
    assert counter.calls["allreduce_"] == 3
    assert counter.gradient_reductions == 0
    assert counter.gradient_bytes == 0


def test_collectives_in_a_backward_pass_count(group: World) -> None:
    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
            grad = grad.clone()
            dist.all_reduce(grad)
            return grad * 2

    leaf = torch.ones(3, requires_grad=True)
    total = Reduced.apply(leaf).sum()
    with CollectiveCounter() as counter:
        total.backward()
    assert counter.gradient_reductions == 1
    assert leaf.grad.tolist() == [2.0, 2.0, 2.0]


def test_nothing_outside_the_body_counts(group: World) -> None:
    with CollectiveCounter() as counter:
        pass
    dist.all_reduce(torch.ones(3))
    assert not counter.calls
    assert counter.gradient_reductions == 0
