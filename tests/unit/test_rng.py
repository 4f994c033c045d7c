"""Kept random state: a replay draws what was drawn, and leaves no trace outside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pixelrag.distributed.rng import RandContext

CPU = torch.device("cpu")


def test_a_replay_draws_the_same_numbers() -> None:
    torch.manual_seed(3)
    torch.rand(5)  # somewhere inside the stream
    kept = RandContext(CPU)
    first = [torch.rand(4), F.dropout(torch.ones(30), 0.5), torch.randperm(7)]
    with kept.replay():
        again = [torch.rand(4), F.dropout(torch.ones(30), 0.5), torch.randperm(7)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_without_the_kept_state_the_numbers_differ() -> None:
    torch.manual_seed(3)
    assert not torch.equal(F.dropout(torch.ones(30), 0.5), F.dropout(torch.ones(30), 0.5))


def test_the_stream_outside_goes_on_as_if_the_replay_never_ran() -> None:
    torch.manual_seed(3)
    RandContext(CPU)
    expected = [torch.rand(2), torch.rand(2)]
    torch.manual_seed(3)
    kept = RandContext(CPU)
    got = [torch.rand(2)]
    with kept.replay():
        torch.rand(100)
    got.append(torch.rand(2))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_replays_again_and_in_any_order() -> None:
    torch.manual_seed(3)
    kept, drawn = [], []
    for _ in range(3):
        kept.append(RandContext(CPU))
        drawn.append(torch.rand(3))
    for index in (2, 0, 1, 0):
        with kept[index].replay():
            assert torch.equal(torch.rand(3), drawn[index])


def test_an_error_in_the_body_restores_the_stream() -> None:
    torch.manual_seed(3)
    kept = RandContext(CPU)
    expected = torch.rand(2)
    torch.manual_seed(3)

    def draw_and_fail() -> None:
        with kept.replay():
            torch.rand(9)
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()
    assert torch.equal(torch.rand(2), expected)


def test_making_one_draws_nothing() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    RandContext(CPU)
    assert torch.equal(torch.rand(2), expected)
