"""From samples to rows to steps: every token learnt once, on any ranks, wherever one resumes."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pixelrag.data.balance import imbalance, share_out
from pixelrag.data.pack_plan import PackPlan, RowSettings
from pixelrag.data.packed_sampler import PackedSampler
from pixelrag.data.packing import pack
from pixelrag.data.pieces import cut
from pixelrag.errors import CheckpointError, ConfigError, DataError
from tests.unit.token_stores import random_masks, token_store

masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=40), min_size=1, max_size=30)


def plan_of(num=60, longest=40, seed=7, **settings) -> PackPlan:
    return PackPlan(
        token_store(random_masks(num, longest)),
        RowSettings(**{"row_length": 32} | settings),
        seed=seed,
    )


# Cutting.


@settings(deadline=None)
@given(masks, st.integers(2, 12), st.sampled_from(["truncate", "split", "drop"]), st.data())
def test_cutting_keeps_counts_and_order(masks, row_length, overlong, data):
    store = token_store(masks)
    samples = None
    if data.draw(st.booleans()):
        samples = np.array(data.draw(st.permutations(range(len(masks)))), np.int64)
        samples = samples[: data.draw(st.integers(1, len(masks)))]
    pieces, report = cut(store, row_length, overlong, samples)
    expected, learnt, lost, untaught = [], 0, 0, 0
    used = range(len(masks)) if samples is None else samples.tolist()
    for sample in used:
        mask = masks[sample]
        starts = [0]
        if len(mask) > row_length and overlong == "split":
            starts = list(range(0, len(mask) - 1, row_length - 1))
        if len(mask) > row_length and overlong == "drop":
            starts = []
        covered = set()
        for start in starts:
            part = mask[start : start + row_length]
            covered |= set(range(start, start + len(part)))
            if any(part[1:]):
                opens = int(start == 0 and mask[0])
                expected.append((sample, start, len(part), sum(part[1:]), opens))
                learnt += sum(part[1:])
            else:
                untaught += 1
        lost += len(mask) - len(covered)
    arrays = (pieces.samples, pieces.starts, pieces.lengths, pieces.supervised, pieces.opens)
    assert list(zip(*(array.tolist() for array in arrays), strict=True)) == expected
    assert report.num_supervised == learnt
    assert report.num_overlong == sum(len(masks[s]) > row_length for s in used)
    assert report.tokens_lost == lost
    assert report.num_untaught == untaught
    assert (report.num_samples, report.num_pieces) == (len(used), len(expected))
    assert report.supervised_lost == sum(sum(masks[s][1:]) for s in used) - learnt
    if overlong == "split":
        assert report.supervised_lost == 0


def test_the_log_says_what_was_cut():
    store = token_store([[True] * 10, [False] * 10, [True] * 4])
    _, report = cut(store, 6, "truncate")
    assert str(report) == (
        "3 samples, 10 tokens, 8 of them learnt from; 2 samples longer than a row of 6 were "
        "truncated, which loses 8 tokens (4 to be learnt from); 1 pieces with nothing to learn "
        "were left out"
    )
    _, report = cut(store, 6, "split")
    assert "split, which loses 0 tokens (0 to be learnt from)" in str(report)


def test_nothing_left_is_an_error():
    with pytest.raises(DataError, match="No row can be made"):
        PackPlan(token_store([[True, False]]), RowSettings(8))


# Rows of an epoch.


@settings(max_examples=60, deadline=None)
@given(
    masks,
    st.integers(2, 24),
    st.sampled_from(["truncate", "split", "drop"]),
    st.sampled_from(["isolated", "concatenated"]),
    st.none() | st.just(5),
    st.booleans(),
    st.integers(0, 3),
)
def test_every_piece_has_one_place_in_every_epoch(
    masks, row_length, overlong, attention, separator_id, mask_first, epoch
):
    settings_ = RowSettings(
        row_length, True, attention, overlong, separator_id, mask_first_token=mask_first
    )
    try:
        plan = PackPlan(token_store(masks), settings_, seed=3)
    except DataError:
        return
    rows = plan.epoch(epoch)
    assert len(rows) == plan.num_rows
    assert sorted(rows.pieces.tolist()) == list(range(len(plan.pieces)))
    gap = 0 if separator_id is None else 1
    for row in range(len(rows)):
        members = rows.row(row)
        lengths = plan.pieces.lengths[members]
        tokens = int(lengths.sum()) + gap * (len(members) - 1)
        assert 0 < tokens == rows.tokens[row] <= row_length
        supervised = int(plan.pieces.supervised[members].sum())
        if attention == "concatenated" and not mask_first:
            supervised += int(plan.pieces.opens[members[1:]].sum())
        assert supervised == rows.supervised[row]
        spans = [tokens] if attention == "concatenated" else [*(lengths[:-1] + gap), lengths[-1]]
        assert rows.costs[row] == pytest.approx(tokens + 2e-5 * sum(int(s) ** 2 for s in spans))


def test_rows_are_first_fit_decreasing_of_the_epochs_order():
    plan = plan_of(separator_id=1)
    for epoch in range(3):
        drawn = plan._draw(epoch)
        expected = pack(plan.pieces.lengths[drawn] + 1, 33)
        rows = plan.epoch(epoch)
        assert [rows.row(r).tolist() for r in range(len(rows))] == [
            drawn[row].tolist() for row in expected
        ]


def test_epochs_differ_and_repeat_themselves():
    first, again = plan_of(num=400), plan_of(num=400)
    assert np.array_equal(first.epoch(5).pieces, again.epoch(5).pieces)
    assert not np.array_equal(first.epoch(4).pieces, again.epoch(5).pieces)
    assert not np.array_equal(first.epoch(5).pieces, plan_of(num=400, seed=8).epoch(5).pieces)
    other_data = PackPlan(token_store(random_masks(400, 40), seed=1), RowSettings(32), seed=7)
    assert np.array_equal(other_data.pieces.lengths, first.pieces.lengths)
    assert not np.array_equal(first.epoch(5).pieces, other_data.epoch(5).pieces)


def test_unpacked_rows_hold_one_sample_each():
    plan = plan_of(packed=False, separator_id=3)
    rows = plan.epoch(0)
    assert len(rows) == len(plan.pieces)
    assert np.array_equal(np.diff(rows.offsets), np.ones(len(rows)))
    assert np.array_equal(rows.tokens, plan.pieces.lengths[rows.pieces])
    packed = plan_of()
    assert packed.num_rows < plan.num_rows / 1.3
    assert packed.fill > plan.fill


def test_fill_counts_tokens_of_samples():
    plan = PackPlan(token_store([[True] * 6, [True] * 3, [True] * 8]), RowSettings(10))
    assert plan.num_rows == 2
    assert plan.fill == 17 / 20


@pytest.mark.parametrize(
    ("settings_", "match"),
    [
        ({"row_length": 1}, "packing.length"),
        ({"packed": False, "attention": "concatenated"}, "needs packing.enabled true"),
    ],
)
def test_settings_that_cannot_be(settings_, match):
    with pytest.raises(ConfigError, match=match):
        RowSettings(**{"row_length": 8} | settings_)


# Shares.


@settings(deadline=None)
@given(st.lists(st.floats(0.5, 100), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 6))
def test_shares_hold_every_row_once_in_as_many_micro_batches_on_all_ranks(costs, ranks, places):
    shares = share_out(np.array(costs), ranks, places)
    assert len(shares) == ranks
    steps = max(1, -(-len(costs) // (ranks * places)))
    assert all(len(rank) == steps for rank in shares)
    rows = [row for rank in shares for micro_batch in rank for row in micro_batch]
    assert sorted(rows) == list(range(len(costs)))
    assert all(len(micro_batch) <= places for rank in shares for micro_batch in rank)


def test_ranks_get_equal_costs_rather_than_equal_counts():
    # One row as dear as eight others, and room enough for any share.
    costs = np.array([8.0] + [1.0] * 8)
    shares = share_out(costs, 2, 9)
    assert sorted(len(rank[0]) for rank in shares) == [1, 8]
    assert imbalance(costs, shares) == 1


def test_ranks_take_turns_in_having_the_costliest_micro_batch():
    costs = np.array([10.0, 9.0, 2.0, 1.0])
    shares = share_out(costs, 2, 1)
    assert imbalance(costs, shares) == 1
    # What is computed at the same time costs about the same.
    assert [{costs[rank[step][0]] for rank in shares} for step in range(2)] == [{10, 9}, {2, 1}]


def test_full_batches_are_balanced_as_well():
    plan = PackPlan(
        token_store(random_masks(4000, 500, shortest=20)),
        RowSettings(512, attention_cost=1e-2),
        seed=1,
    )
    sampler = PackedSampler(plan, 4 * 2 * 4, 4, 0, 4)
    ours, plain = [], []
    for position in range(sampler.batches_per_epoch - 1):
        costs = plan.epoch(0).costs[sampler.global_batch(position)]
        ours.append(imbalance(costs, share_out(costs, 4, 4)))
        plain.append(imbalance(costs, np.arange(32).reshape(4, 2, 4).tolist()))
    assert np.mean(ours) < 1.005 < 1.05 < np.mean(plain)


# The sampler.


def samplers(plan: PackPlan, world: int, batch=6, micro=2, **options) -> list[PackedSampler]:
    return [PackedSampler(plan, batch, micro, rank, world, **options) for rank in range(world)]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_global_batches_do_not_depend_on_the_world(world, batch, micro, drop_last):
    plan = plan_of(num=25)
    if drop_last and plan.num_rows < batch:
        return
    alone = PackedSampler(plan, batch, micro, drop_last=drop_last)
    ranks = samplers(plan, world, batch, micro, drop_last=drop_last)
    for position in range(2 * alone.batches_per_epoch + 1):
        whole, parts = alone.step(position), [rank.step(position) for rank in ranks]
        rows = [row for part in parts for rows in part.micro_batches for row in rows]
        assert sorted(rows) == sorted(row for rows in whole.micro_batches for row in rows)
        assert len({len(part.micro_batches) for part in parts}) == 1
        of_epoch = plan.epoch(whole.epoch)
        assert {part.num_supervised for part in parts} == {int(of_epoch.supervised[rows].sum())}
        assert {part.num_tokens for part in parts} == {int(of_epoch.tokens[rows].sum())}
        assert whole.num_rows == len(rows)


def test_an_epoch_serves_every_row_once():
    plan = plan_of()
    sampler = PackedSampler(plan, 7, 3)
    for epoch in range(2):
        steps = list(itertools.islice(sampler, sampler.batches_per_epoch))
        assert {step.epoch for step in steps} == {epoch}
        rows = [row for step in steps for rows in step.micro_batches for row in rows]
        assert sorted(rows) == list(range(plan.num_rows))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(1, 4), st.booleans())
def test_resumed_anywhere_equals_uninterrupted(stop, world, packed):
    plan = plan_of(num=25, packed=packed)
    reference = list(itertools.islice(PackedSampler(plan, 6, 2, 0, world), 41))
    first = PackedSampler(plan, 6, 2, 0, world)
    for _ in range(stop):
        next(iter(first))
    second = PackedSampler(plan_of(num=25, packed=packed), 6, 2, 0, world)
    second.load_state_dict(first.state_dict())
    assert next(iter(second)) == reference[stop]
    assert second.state_dict(position=3)["position"] == 3


def test_resuming_needs_no_walk():
    sampler = PackedSampler(plan_of(), 6, 2)
    state = sampler.state_dict(position=10**12)
    sampler.load_state_dict(state)
    step = next(iter(sampler))
    assert step.position == 10**12
    assert step.epoch == 10**12 // sampler.batches_per_epoch


def test_the_ledger_names_every_token_consumed():
    plan = plan_of(overlong="split", longest=80)
    sampler = PackedSampler(plan, 5, 2)
    length = sampler.batches_per_epoch
    for epoch in range(2):
        entries = list(sampler.ledger(epoch * length, (epoch + 1) * length))
        stretches = Counter((entry.sample_id, entry.start, entry.stop) for entry in entries)
        expected = Counter(
            (plan.store.sample_id(sample), start, start + size)
            for sample, start, size in zip(
                plan.pieces.samples.tolist(),
                plan.pieces.starts.tolist(),
                plan.pieces.lengths.tolist(),
                strict=True,
            )
        )
        assert stretches == expected
        assert {entry.epoch for entry in entries} == {epoch}
    assert {entry.row for entry in sampler.ledger(3, 4)} == set(sampler.global_batch(3).tolist())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 8}, "seed was 7, is 8"),
        ({"num": 59}, "data was"),
        ({"row_length": 31}, "row_length was 32, is 31"),
        ({"packed": False}, "packed was True, is False"),
        ({"attention": "concatenated"}, "attention was isolated, is concatenated"),
        ({"overlong": "drop"}, "overlong was truncate, is drop"),
        ({"separator_id": 4}, "separator_id was None, is 4"),
        ({"mask_first_token": True}, "mask_first_token was False, is True"),
    ],
)
def test_a_state_of_other_rows_is_refused(change, match):
    state = PackedSampler(plan_of(), 6, 2).state_dict()
    with pytest.raises(CheckpointError, match=match):
        PackedSampler(plan_of(**change), 6, 2).load_state_dict(state)


def test_a_state_of_another_batch_size_or_form_is_refused():
    sampler = PackedSampler(plan_of(), 6, 2)
    state = sampler.state_dict()
    with pytest.raises(CheckpointError, match="global_batch_rows was 6, is 4"):
        PackedSampler(plan_of(), 4, 2).load_state_dict(state)
    with pytest.raises(CheckpointError, match="another version"):
        sampler.load_state_dict({"position": 1})
    with pytest.raises(CheckpointError, match="position is -1"):
        sampler.load_state_dict(state | {"position": -1})
    # How rows are shared out is not what they are.
    cheap = plan_of(attention_cost=0.0)
    PackedSampler(cheap, 6, 3, 1, 2).load_state_dict(state)


def test_a_plan_of_some_samples_is_not_the_plan_of_all():
    store, settings_ = token_store(random_masks(30, 40)), RowSettings(32)
    whole = PackPlan(store, settings_)
    part = PackPlan(store, settings_, samples=np.arange(20, dtype=np.int64))
    assert part.fingerprint != whole.fingerprint
    assert set(part.pieces.samples.tolist()) <= set(range(20))
    assert replace(settings_, packed=False) != settings_


def test_ranks_and_batches_out_of_range():
    with pytest.raises(ConfigError, match="rank 2 is not one of 2"):
        PackedSampler(plan_of(), 6, 2, 2, 2)
    with pytest.raises(ConfigError, match="per_device_batch_size: got 0"):
        PackedSampler(plan_of(), 6, 0)
