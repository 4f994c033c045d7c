"""Several sets in one run: exact counts, nothing twice in a batch, every batch by its number."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pixelrag.data.orders import (
    HomogeneousOrder,
    PooledOrder,
    ProportionalOrder,
    apportion,
    evenly,
    row_order,
)
from pixelrag.data.sampler import GlobalBatchSampler
from pixelrag.data.text_schedule import TextOrder, phases, steps_with_text
from pixelrag.errors import CheckpointError, ConfigError, DataError


def bounds_of(sizes) -> np.ndarray:
    return np.cumsum([0, *sizes])


def counts_of(rows, sizes) -> list[int]:
    return np.histogram(rows, bounds_of(sizes))[0].tolist()


@given(st.integers(0, 10_000), st.lists(st.floats(0.01, 1000), min_size=1, max_size=8))
def test_shares_are_whole_and_within_one_of_their_quota(total, weights):
    counts = apportion(total, weights)
    assert sum(counts) == total
    exact = [Fraction(weight) for weight in weights]
    assert all(
        abs(count - total * weight / sum(exact)) < 1
        for count, weight in zip(counts, exact, strict=True)
    )


def test_the_largest_remainders_get_what_is_left_and_ties_go_to_the_first():
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    assert apportion(7, [0.5, 2.5, 4]) == [1, 2, 4]
    assert apportion(7, [44, 5, 0.01]) == [6, 1, 0]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_spread_evenly_means_a_prefix_is_within_one_of_its_share(counts):
    parts = evenly(counts)
    total = len(parts)
    for part, count in enumerate(counts):
        assert (parts == part).sum() == count
        prefix = np.cumsum(parts == part)
        share = np.arange(1, total + 1) * count / total
        # A bound of Webster's method; the point is that it does not grow with the prefix.
        assert np.abs(prefix - share).max() <= 1 + len(counts) / 2


@st.composite
def mixtures(draw):
    """sizes, weights, batch size, seed and drop_last of several sets."""
    sizes = draw(st.lists(st.integers(8, 60), min_size=1, max_size=4))
    weights = draw(
        st.none() | st.lists(st.integers(1, 5), min_size=len(sizes), max_size=len(sizes))
    )
    return sizes, weights, draw(st.integers(2, 8)), draw(st.integers(0, 99)), draw(st.booleans())


@pytest.mark.parametrize("kind", [ProportionalOrder, HomogeneousOrder])
@settings(max_examples=40)
@given(mixtures())
def test_no_batch_names_a_row_twice_and_an_epoch_has_its_exact_counts(kind, mixture):
    sizes, weights, batch_size, seed, drop_last = mixture
    try:
        order = kind(sizes, weights, batch_size, seed, drop_last=drop_last)
    except DataError:
        return
    total = sum(sizes)
    for epoch in range(3):
        first = epoch * order.batches_per_epoch
        batches = [order.batch(first + number) for number in range(order.batches_per_epoch)]
        for rows in batches:
            assert len(set(rows.tolist())) == len(rows) <= batch_size
            assert rows.min() >= 0
            assert rows.max() < total
        if kind is ProportionalOrder:
            served = total - total % batch_size if drop_last else total
            assert counts_of(np.concatenate(batches), sizes) == apportion(served, weights or sizes)
        else:
            sets = [np.flatnonzero(counts_of(rows, sizes)).tolist() for rows in batches]
            assert all(len(of) == 1 for of in sets)
            passes = [size // batch_size if drop_last else -(-size // batch_size) for size in sizes]
            share = [sum(of == [part] for of in sets) for part in range(len(sizes))]
            assert share == apportion(sum(passes), weights or passes)
        if weights is None and not drop_last:
            assert sorted(np.concatenate(batches).tolist()) == list(range(total))


def test_whole_shares_are_met_in_every_batch():
    """PixelRAG's --img-mix a:44 b:5 with a batch of 49."""
    order = ProportionalOrder([500, 90], [44, 5], 49, seed=3)
    whole = 590 // 49
    for position in range(whole):
        assert counts_of(order.batch(position), [500, 90]) == [44, 5]


def test_weighted_rows_of_a_set_are_served_equally_often():
    order = ProportionalOrder([40, 7], [1, 1], 8, seed=5)
    for epochs, part, size in [(2, 0, 40), (1, 1, 7)]:  # 23 and 24 of an epoch's 47 rows
        served = Counter(
            row - bounds_of([40, 7])[part]
            for position in range(epochs * order.batches_per_epoch)
            for row in order.batch(position).tolist()
            if (row >= 40) == bool(part)
        )
        assert set(served) == set(range(size))
        assert max(served.values()) - min(served.values()) <= 1


def test_local_parts_of_a_proportional_batch_have_rows_of_both_sets():
    order = ProportionalOrder([64, 64], None, 16, seed=0)
    parts = [GlobalBatchSampler(128, 16, rank, 4, order=order).local_batch(0) for rank in range(4)]
    assert all(counts_of(part, [64, 64]) == [2, 2] for part in parts)


def test_orders_of_rows():
    assert row_order(4, "file", 0).tolist() == [0, 1, 2, 3]
    assert row_order(4, "reversed", 0).tolist() == [3, 2, 1, 0]
    assert [PooledOrder(5, 2, 0, order="reversed").batch(i).tolist() for i in range(4)] == [
        [4, 3],
        [2, 1],
        [0],
        [4, 3],
    ]
    mixed = HomogeneousOrder([3, 2], None, 2, 0, order="file")
    assert [mixed.batch(i).tolist() for i in range(3)] == [[0, 1], [3, 4], [2]]


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (ProportionalOrder, ([50, 3], [1, 1], 8), "b.jsonl has 3 usable rows.*asks for 4 of them"),
        (ProportionalOrder, ([50, 50], [1, 1e-9], 8), "b.jsonl has so small a share"),
        (HomogeneousOrder, ([50, 50], [1, 1e-9], 8), "b.jsonl has so small a share"),
    ],
)
def test_shares_that_cannot_be_served_name_the_set(kind, arguments, message):
    with pytest.raises(DataError, match=message):
        kind(*arguments, 0, names=["a.jsonl", "b.jsonl"])
    with pytest.raises(DataError, match=r"b\.jsonl has 3 usable rows, expected at least 8"):
        HomogeneousOrder([50, 3], None, 8, 0, drop_last=True, names=["a.jsonl", "b.jsonl"])
    with pytest.raises(ConfigError, match="got 1 weights for 2 sets"):
        kind([50, 50], [1], 8, 0)


def test_a_run_with_other_shares_cannot_be_continued():
    def sampler(weights):
        return GlobalBatchSampler(90, 9, order=ProportionalOrder([50, 40], weights, 9, 0))

    state = sampler([1, 2]).state_dict(7)
    resumed = sampler([1, 2])
    resumed.load_state_dict(state)
    assert resumed.position == 7
    with pytest.raises(CheckpointError, match=r"weights was \[1.0, 2.0\], is None"):
        sampler(None).load_state_dict(state)
    with pytest.raises(CheckpointError, match="other options of data"):
        GlobalBatchSampler(90, 9).load_state_dict(state)


def text_order(mix="batches", *, steps=24, batch=8, sizes=(40, 30), per_step=1, **share):
    return TextOrder(
        PooledOrder(sizes[0], batch, 0), *sizes, batch, 0, phases(steps, per_step, **share), mix=mix
    )


def texts_of(order, count, size=40) -> list[int]:
    return [int((order.batch(position) >= size).sum()) for position in range(count)]


def test_text_comes_first_and_then_no_more():
    order = text_order(warmup_steps=3, per_step=2)
    assert texts_of(order, 20) == [8, 8, 8, 6, 8, 8] + [0] * 14
    assert [order.batch(6 + i).tolist() for i in range(5)] == [
        PooledOrder(40, 8, 0).batch(i).tolist() for i in range(5)
    ]
    assert [order.phase(i).name for i in (0, 5, 6, 99)] == [
        *["text warm-up"] * 2,
        *["main data"] * 2,
    ]


def test_the_curriculum_takes_its_four_shares_of_the_steps_after_the_warm_up():
    order = text_order(steps=124, warmup_steps=4, curriculum=True, sizes=(4000, 4000))
    kinds = np.array(texts_of(order, 124, 4000)) > 0
    quarters = np.split(kinds[4:], 4)
    assert kinds[:4].all()
    assert [int(quarter.sum()) for quarter in quarters] == [15, 10, 6, 0]


@pytest.mark.parametrize(("mix", "unit"), [("batches", 1), ("rows", 8)])
@pytest.mark.parametrize("ratio", [0.2, 0.3, 0.37])
def test_a_share_of_text_is_exact_over_any_stretch(mix, unit, ratio):
    order = text_order(mix, warmup_steps=2, mix_ratio=ratio, sizes=(4000, 4000))
    texts = np.array(texts_of(order, 80, 4000))[2:]
    units = np.cumsum(texts > 0 if unit == 1 else texts)
    share = Fraction(str(ratio))
    assert units.tolist() == [int(n * unit * share) for n in range(1, 79)]


@settings(max_examples=30)
@given(
    st.integers(16, 60),
    st.integers(8, 40),
    st.sampled_from([0.125, 0.25, 0.4, 0.75]),
    st.integers(0, 3),
)
def test_rows_of_text_and_main_data_pass_through_all_rows(num_main, num_text, ratio, warmup):
    order = text_order("rows", sizes=(num_main, num_text), mix_ratio=ratio, warmup_steps=warmup)
    seen: list[list[int]] = [[], []]
    for position in range(60):
        rows = order.batch(position).tolist()
        assert len(set(rows)) == len(rows) == 8
        seen[0] += [row for row in rows if row < num_main]
        seen[1] += [row - num_main for row in rows if row >= num_main]
    for kind, size in zip(seen, (num_main, num_text), strict=True):
        times = Counter(kind)
        assert set(times) <= set(range(size))
        # A pass leaves out fewer rows than a batch takes, others each time.
        assert max(times.values()) <= len(kind) / (size - 7) + 1
    # Named out of order, as after a resume.
    fresh = text_order("rows", sizes=(num_main, num_text), mix_ratio=ratio, warmup_steps=warmup)
    for position in (41, 7, 59, 0):
        assert fresh.batch(position).tolist() == order.batch(position).tolist()


def test_a_run_by_epochs_passes_through_its_main_data_as_often():
    share = {"warmup_steps": 5, "mix_ratio": 0.3, "curriculum": False}
    steps = steps_with_text(14, **share)
    order = text_order(sizes=(112, 64), **share)
    kinds = [text > 0 for text in texts_of(order, steps, 112)]
    assert kinds.count(False) == 14
    assert steps_with_text(89, warmup_steps=4, mix_ratio=0, curriculum=True) == 4 + 120


def test_the_phase_stands_in_the_checkpoint_and_its_shares_must_stay():
    def sampler(**share):
        return GlobalBatchSampler(70, 8, order=text_order(**share))

    state = sampler(warmup_steps=3).state_dict(2)
    assert state["phase"] == "text warm-up"
    again = sampler(warmup_steps=3)
    again.load_state_dict(state)
    assert again.position == 2
    with pytest.raises(CheckpointError, match=r"text was .* is "):
        sampler(warmup_steps=4).load_state_dict(state)
    curriculum = sampler(curriculum=True, steps=24).state_dict()
    with pytest.raises(CheckpointError, match="text was"):
        sampler(curriculum=True, steps=48).load_state_dict(curriculum)


def test_too_few_text_rows_for_a_batch_are_said():
    with pytest.raises(DataError, match=r"data.text has 2 usable rows, fewer than the 4"):
        text_order("rows", mix_ratio=0.5, sizes=(40, 2))
    with pytest.raises(DataError, match=r"data.text has 2 usable rows, expected at least 8"):
        TextOrder(PooledOrder(40, 8, 0), 40, 2, 8, 0, phases(9, warmup_steps=1), drop_last=True)
