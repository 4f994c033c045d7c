"""Which rows make up a batch, whatever the world and wherever a run was stopped."""

import itertools
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixelrag.data import orders
from pixelrag.data.sampler import GlobalBatchSampler
from pixelrag.errors import CheckpointError, ConfigError, DataError


def take(sampler: GlobalBatchSampler, count: int) -> list[list[int]]:
    return list(itertools.islice(sampler, count))


@st.composite
def setups(draw):
    """num_rows, global_batch_size, world_size, seed, drop_last: any that is allowed."""
    world = draw(st.integers(1, 7))
    batch = draw(st.integers(world, 40))
    drop_last = draw(st.booleans())
    rows = draw(st.integers(batch if drop_last else world, 150))
    return rows, batch, world, draw(st.integers(0, 2**40)), drop_last


def ranks_of(setup) -> list[GlobalBatchSampler]:
    rows, batch, world, seed, drop_last = setup
    return [GlobalBatchSampler(rows, batch, rank, world, seed, drop_last) for rank in range(world)]


@given(setups(), st.integers(1, 3))
def test_every_row_is_served_exactly_once_an_epoch_over_all_ranks(setup, num_epochs):
    rows, batch, _, _, drop_last = setup
    samplers = ranks_of(setup)
    length = samplers[0].batches_per_epoch
    assert length == (rows // batch if drop_last else -(-rows // batch))
    for epoch in range(num_epochs):
        parts = []
        for sampler in samplers:
            assert sampler.epoch == epoch
            parts.append(take(sampler, length))
        served = [row for part in parts for local in part for row in local]
        assert len(served) == len(set(served)) == (length * batch if drop_last else rows)
        assert set(served) <= set(range(rows))


@given(setups())
def test_global_batches_do_not_depend_on_the_world(setup):
    rows, batch, _, seed, drop_last = setup
    whole = GlobalBatchSampler(rows, batch, 0, 1, seed, drop_last)
    count = 2 * whole.batches_per_epoch + 1
    expected = take(whole, count)
    parts = [take(sampler, count) for sampler in ranks_of(setup)]
    for step in range(count):
        assert [row for part in parts for row in part[step]] == expected[step]


@given(setups())
def test_local_parts_are_near_equal_in_the_order_of_array_split(setup):
    samplers = ranks_of(setup)
    for position in range(samplers[0].batches_per_epoch):
        expected = np.array_split(samplers[0].global_batch(position), len(samplers))
        assert [s.local_batch(position) for s in samplers] == [part.tolist() for part in expected]


@given(setups(), st.data())
def test_with_costs_every_row_has_one_rank_and_no_rank_more_rows_than_before(setup, data):
    rows, batch, world, seed, drop_last = setup
    costs = np.array(data.draw(st.lists(st.floats(0.1, 1e4), min_size=rows, max_size=rows)))
    samplers = [
        GlobalBatchSampler(rows, batch, rank, world, seed, drop_last, costs=costs)
        for rank in range(world)
    ]
    for position in range(2 * samplers[0].batches_per_epoch):
        expected = samplers[0].global_batch(position).tolist()
        parts = [sampler.local_batch(position) for sampler in samplers]
        assert sorted(row for part in parts for row in part) == sorted(expected)
        for part in parts:
            assert part == [row for row in expected if row in part]
            assert len(part) <= -(-len(expected) // world)
            assert part or len(expected) < world
        if len(expected) % world == 0:
            assert {len(part) for part in parts} == {len(expected) // world}


def test_costs_are_spread_over_ranks():
    """Long-tailed costs: the costliest rank waits for nobody, whichever rows meet in a batch."""
    costs = np.exp(np.random.default_rng(0).normal(size=4096))
    worst = {}
    for name, known in (("slices", None), ("shared out", costs)):
        samplers = [GlobalBatchSampler(4096, 256, rank, 8, costs=known) for rank in range(8)]
        loads = np.array(
            [[costs[sampler.local_batch(p)].sum() for sampler in samplers] for p in range(16)]
        )
        worst[name] = (loads.max(1) / loads.mean(1)).mean()
    assert worst["slices"] > 1.2
    assert worst["shared out"] < 1.01


@given(setups(), st.data())
def test_resumed_anywhere_equals_uninterrupted_on_any_world(setup, data):
    rows, batch, _, seed, drop_last = setup
    reference = GlobalBatchSampler(rows, batch, 0, 1, seed, drop_last)
    total = 3 * reference.batches_per_epoch
    stop = data.draw(st.integers(0, total))
    expected = take(reference, total)
    first = ranks_of(setup)
    for sampler in first:
        take(sampler, stop)
    state = first[-1].state_dict()
    world = data.draw(st.integers(1, min(batch, rows)))
    rest = []
    for rank in range(world):
        resumed = GlobalBatchSampler(rows, batch, rank, world, seed, drop_last)
        resumed.load_state_dict(state)
        rest.append(take(resumed, total - stop))
    merged = [list(itertools.chain(*parts)) for parts in zip(*rest, strict=True)]
    assert expected[:stop] + merged == expected


def test_a_state_taken_while_a_batch_is_in_use_points_behind_it():
    sampler = GlobalBatchSampler(10, 3, seed=1)
    batches = iter(sampler)
    next(batches)
    second = next(batches)
    state = sampler.state_dict()
    third = next(batches)
    resumed = GlobalBatchSampler(10, 3, seed=1)
    resumed.load_state_dict(state)
    assert next(iter(resumed)) == third != second


def test_a_loader_that_ran_ahead_names_its_own_position():
    sampler = GlobalBatchSampler(10, 3, seed=1)
    batches = take(sampler, 7)
    resumed = GlobalBatchSampler(10, 3, seed=1)
    resumed.load_state_dict(sampler.state_dict(position=2))
    assert take(resumed, 5) == batches[2:]


def test_resuming_far_into_training_draws_one_permutation(monkeypatch):
    sampler = GlobalBatchSampler(1000, 10)
    sampler.load_state_dict(sampler.state_dict(position=123_456_789))
    drawn = []
    original = orders.row_order

    def counting(num_rows, order, *entropy):
        drawn.append(entropy)
        return original(num_rows, order, *entropy)

    monkeypatch.setattr(orders, "row_order", counting)
    next(iter(sampler))
    assert drawn == [(0, 1_234_567)]


def test_epochs_and_seeds_differ_and_the_order_is_pinned():
    order = GlobalBatchSampler(8, 8, seed=3)
    epochs = take(order, 3)
    other = take(GlobalBatchSampler(8, 8, seed=4), 1)
    assert len({tuple(batch) for batch in epochs + other}) == 4
    # Written down once: a checkpoint of today must go on with the same batches years from now.
    assert epochs[:2] == [[0, 4, 7, 1, 5, 6, 3, 2], [0, 6, 2, 1, 3, 7, 4, 5]]


def test_orders_are_uniform():
    """Each row comes first in about 1/6 of the epochs: within 5 standard deviations of 6,000."""
    sampler = GlobalBatchSampler(6, 6, seed=0)
    counts = np.bincount([batch[0] for batch in take(sampler, 6000)], minlength=6)
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(6000 / 6 * 5 / 6)


def test_last_batch_leaves_ranks_short_or_without_rows():
    parts = [GlobalBatchSampler(10, 4, rank, 4).local_batch(2) for rank in range(4)]
    assert [len(part) for part in parts] == [1, 1, 0, 0]
    dropped = GlobalBatchSampler(10, 4, 3, 4, drop_last=True)
    assert dropped.batches_per_epoch == 2
    assert all(len(batch) == 1 for batch in take(dropped, 9))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((100, 3, 0, 4), ConfigError, "3 rows for 4 processes.*per_device_batch_size"),
        ((100, 8, 4, 4), ConfigError, "rank 4 is not one of 4"),
        ((100, 8, 0, 4, -1), ConfigError, "seed: got -1, expected 0 or more"),
        ((3, 8, 0, 4), DataError, "3 usable rows, expected at least 4.*start fewer processes"),
        ((0, 8, 0, 1), DataError, "0 usable rows, expected at least 1"),
        ((7, 8, 0, 1, 0, True), DataError, "7 usable rows, expected at least 8.*drop_last: false"),
    ],
)
def test_setups_that_cannot_work_say_what_to_change(arguments, error, message):
    with pytest.raises(error, match=message):
        GlobalBatchSampler(*arguments)


def test_fewer_rows_than_a_batch_is_said(caplog):
    with caplog.at_level(logging.WARNING, "pixelrag"):
        sampler = GlobalBatchSampler(5, 8)
    assert "5 rows, fewer than the global batch of 8" in caplog.text
    assert sorted(take(sampler, 1)[0]) == [0, 1, 2, 3, 4]


def test_a_state_of_another_run_is_refused():
    state = GlobalBatchSampler(100, 10, seed=1).state_dict()
    for other, words in [
        (GlobalBatchSampler(101, 10, seed=1), "num_rows was 100, is 101"),
        (GlobalBatchSampler(100, 20, seed=1), "global_batch_size was 10, is 20"),
        (GlobalBatchSampler(100, 10, seed=2), "seed was 1, is 2"),
        (GlobalBatchSampler(100, 10, seed=1, drop_last=True), "drop_last was 0, is 1"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            other.load_state_dict(state)
        assert other.position == 0
    with pytest.raises(CheckpointError, match="another version"):
        GlobalBatchSampler(100, 10).load_state_dict({"epoch": 3})
