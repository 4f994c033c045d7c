"""Rows as tensors: a packed sample is computed as it would be alone, and learnt from the same."""

import itertools
import os
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from pixelrag.data.pack_plan import PackPlan, RowSettings
from pixelrag.data.packed_batch import (
    IGNORE_INDEX,
    PackedBatch,
    PackedCollator,
    PackedSteps,
    count_supervised,
)
from pixelrag.data.packed_sampler import PackedSampler
from pixelrag.data.step_loader import load_steps
from pixelrag.data.text_encoder import Tokens
from pixelrag.data.token_store import TokenStoreBuilder
from pixelrag.errors import DataError
from tests.unit.token_stores import random_masks, token_store

PAD = 999


def batches(plan: PackPlan, epoch: int = 0, places: int = 3, **options) -> list[PackedBatch]:
    collate = PackedCollator(plan, PAD, **options)
    rows = range(plan.num_rows)
    return [collate(epoch, rows[start : start + places]) for start in range(0, len(rows), places)]


def documents(batch: PackedBatch):
    """(sample id, ids, labels, positions) of each document of an isolated batch."""
    bounds = batch.cu_seqlens.tolist()
    width = batch.input_ids.shape[1]
    for start, stop in itertools.pairwise(bounds):
        row = start // width
        part = slice(start, stop)
        document = batch.document_ids.flatten()[part].unique().tolist()
        assert len(document) == 1
        if document[0] >= 0:
            yield (
                batch.sample_ids[row][document[0]],
                batch.input_ids.flatten()[part].tolist(),
                batch.labels.flatten()[part].tolist(),
                batch.position_ids.flatten()[part].tolist(),
            )


def test_an_isolated_row_to_the_letter():
    builder = TokenStoreBuilder()
    builder.add(Tokens(np.array([1, 2, 3], np.int32), np.array([True, False, True])), 0, 1)
    builder.add(Tokens(np.array([4, 5, 6, 7], np.int32), np.array([False, True, True, True])), 0, 2)
    plan = PackPlan(builder.build(["a"]), RowSettings(9, separator_id=8))
    (batch,) = batches(plan, fixed_width=True)
    ignore = IGNORE_INDEX
    assert batch.input_ids.tolist() == [[4, 5, 6, 7, 8, 1, 2, 3, PAD]]
    assert batch.labels.tolist() == [[ignore, 5, 6, 7, ignore, ignore, ignore, 3, ignore]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, -1]]
    assert batch.attention_mask.tolist() == [[True] * 8 + [False]]
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 9]
    assert batch.cu_seqlens.dtype == torch.int32
    assert (batch.max_seqlen, batch.num_supervised, batch.num_tokens) == (5, 4, 8)
    assert batch.sample_ids == (("a:2", "a:1"),)


@pytest.mark.parametrize("mask_first_token", [False, True])
def test_a_concatenated_row_to_the_letter(mask_first_token):
    builder = TokenStoreBuilder()
    builder.add(Tokens(np.array([1, 2, 3], np.int32), np.array([True, False, True])), 0, 1)
    builder.add(Tokens(np.array([4, 5, 6, 7], np.int32), np.array([True] * 4)), 0, 2)
    options = {"attention": "concatenated", "separator_id": 8, "mask_first_token": mask_first_token}
    plan = PackPlan(builder.build(["a"]), RowSettings(9, **options))
    (batch,) = batches(plan, fixed_width=True)
    ignore, first = IGNORE_INDEX, IGNORE_INDEX if mask_first_token else 1
    assert batch.input_ids.tolist() == [[4, 5, 6, 7, 8, 1, 2, 3, PAD]]
    assert batch.labels.tolist() == [[ignore, 5, 6, 7, ignore, first, ignore, 3, ignore]]
    assert batch.position_ids.tolist() == [list(range(9))]
    assert batch.document_ids.tolist() == [[0] * 8 + [-1]]
    assert batch.cu_seqlens.tolist() == [0, 8, 9]
    assert batch.num_supervised == (4 if mask_first_token else 5)


def test_where_pieces_of_a_sample_overlap_the_token_is_learnt_once():
    store = token_store([[True] * 10, [True] * 4])
    options = {"attention": "concatenated", "separator_id": 8}
    plan = PackPlan(store, RowSettings(8, overlong="split", **options))
    rows = [row for batch in batches(plan) for row in batch.labels.tolist()]
    (a, b), ignore = (store[sample].ids.tolist() for sample in (0, 1)), IGNORE_INDEX
    assert rows == [[ignore, *a[1:8]], [ignore, *b[1:], ignore, ignore, *a[8:]]]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=20),
    st.integers(2, 20),
    st.sampled_from(["truncate", "split", "drop"]),
    st.none() | st.just(PAD),
    st.booleans(),
)
def test_packed_documents_are_the_unpacked_rows(masks, row_length, overlong, separator, wide):
    store = token_store(masks)
    try:
        packed = PackPlan(store, RowSettings(row_length, True, "isolated", overlong, separator))
    except DataError:
        return
    single = PackPlan(store, RowSettings(row_length, False, "isolated", overlong))
    found, expected = Counter(), Counter()
    for batch in batches(packed, fixed_width=wide):
        assert batch.num_supervised == count_supervised(batch.labels)
        assert batch.num_supervised == int((batch.labels != IGNORE_INDEX).sum())
        assert batch.num_tokens == int(batch.attention_mask.sum())
        assert (batch.labels[:, 0] == IGNORE_INDEX).all()
        assert batch.max_seqlen == int(batch.cu_seqlens.diff().max())
        for name, ids, labels, positions in documents(batch):
            assert positions == list(range(len(ids)))
            assert labels[0] == IGNORE_INDEX
            # Without the separator that may stand at a document's end.
            sample = int(name.split(":")[1]) - 1
            ends_with_separator = separator is not None and ids[-1] == PAD and len(ids) > 1
            whole = store[sample].ids.tolist()
            if ends_with_separator and ids[:-1] in _parts(whole, len(ids) - 1):
                assert labels[-1] == IGNORE_INDEX
                ids, labels = ids[:-1], labels[:-1]
            found[name, tuple(ids), tuple(labels)] += 1
    for batch in batches(single):
        for name, ids, labels, _ in documents(batch):
            expected[name, tuple(ids), tuple(labels)] += 1
    assert found == expected


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=20),
    st.integers(2, 20),
    st.sampled_from(["truncate", "split", "drop"]),
    st.sampled_from(["isolated", "concatenated"]),
    st.booleans(),
)
def test_the_plan_counts_what_the_tensors_hold(masks, row_length, overlong, attention, mask_first):
    settings_ = RowSettings(row_length, True, attention, overlong, 3, mask_first)
    try:
        plan = PackPlan(token_store(masks), settings_)
    except DataError:
        return
    for row, batch in enumerate(batches(plan, epoch=1, places=1)):
        assert batch.num_supervised == plan.epoch(1).supervised[row]
        assert batch.num_tokens == plan.epoch(1).tokens[row]


def _parts(whole: list[int], size: int) -> list[list[int]]:
    return [whole[start : start + size] for start in range(len(whole) - size + 1)]


def test_split_pieces_teach_every_token_once_and_from_the_token_before_it():
    store = token_store([[True] * 23], vocab_size=500)
    plan = PackPlan(store, RowSettings(6, overlong="split"))
    pairs = Counter()
    for batch in batches(plan):
        for _, ids, labels, _ in documents(batch):
            pairs += Counter(
                (before, label)
                for before, label in zip(ids, labels[1:], strict=False)
                if label != IGNORE_INDEX
            )
    whole = store[0].ids.tolist()
    assert pairs == Counter(itertools.pairwise(whole))


def test_nothing_depends_on_which_tokens_they_are():
    # One token for padding, separators and the end of answers: real ends stay, as text and label.
    builder = TokenStoreBuilder()
    for number in range(4):
        ids = np.array([1, PAD, 2, PAD], np.int32)
        builder.add(Tokens(ids, np.array([False, False, True, True])), 0, number)
    plan = PackPlan(builder.build(["a"]), RowSettings(10, separator_id=PAD))
    for batch in batches(plan):
        assert batch.num_tokens == 9 * batch.num_rows
        assert batch.num_supervised == 4 * batch.num_rows
        assert int((batch.labels == PAD).sum()) == 2 * batch.num_rows


def test_a_rank_without_rows_gets_padding_that_teaches_nothing():
    plan = PackPlan(token_store(random_masks(3, 10)), RowSettings(12))
    for width in (2, 12):
        batch = PackedCollator(plan, PAD, fixed_width=width == 12)(0, [])
        assert batch.input_ids.tolist() == [[PAD] * width]
        assert (batch.num_rows, batch.num_supervised, batch.num_tokens) == (0, 0, 0)
        assert batch.cu_seqlens.tolist() == [0, width]
        assert not batch.attention_mask.any()


def test_batches_are_as_wide_as_their_longest_row_or_as_a_row():
    plan = PackPlan(token_store(random_masks(9, 10)), RowSettings(40, packed=False))
    for batch in batches(plan):
        assert batch.input_ids.shape[1] == int(batch.attention_mask.sum(1).max())
    assert {batch.input_ids.shape[1] for batch in batches(plan, fixed_width=True)} == {40}


def test_a_packed_model_has_the_loss_and_gradient_of_separate_rows():
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).double()
    store = token_store(random_masks(12, 20), vocab_size=64)

    def gradient(packed: bool) -> tuple[float, torch.Tensor]:
        separator = 3 if packed else None
        plan = PackPlan(store, RowSettings(24, packed, separator_id=separator))
        model.zero_grad()
        total, count = 0.0, 0
        for batch in batches(plan, places=1):
            logits = model(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1),
                batch.labels[:, 1:].flatten(),
                ignore_index=IGNORE_INDEX,
                reduction="sum",
            )
            loss.backward()
            total, count = total + loss.item(), count + batch.num_supervised
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        return total / count, flat / count

    (loss, grad), (loss_alone, grad_alone) = gradient(True), gradient(False)
    assert loss == pytest.approx(loss_alone, rel=1e-12)
    assert (grad - grad_alone).norm() <= 1e-12 * grad_alone.norm()
    assert grad.norm() / grad_alone.norm() == pytest.approx(1, abs=1e-12)


# Steps.


def steps_of(rank: int = 0, world: int = 1, **settings_) -> PackedSteps:
    plan = PackPlan(token_store(random_masks(40, 20)), RowSettings(24, **settings_), seed=2)
    return PackedSteps(PackedSampler(plan, 8, 2, rank, world), PackedCollator(plan, PAD))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_count_of_a_step_is_that_of_all_ranks_and_micro_batches(world):
    ranks = [steps_of(rank, world) for rank in range(world)]
    for position in range(6):
        parts = [rank[position] for rank in ranks]
        labels = [batch.labels for part in parts for batch in part.micro_batches]
        assert {part.num_supervised for part in parts} == {sum(map(count_supervised, labels))}
        tokens = sum(batch.num_tokens for part in parts for batch in part.micro_batches)
        assert {part.num_tokens for part in parts} == {tokens}
        assert len({len(part.micro_batches) for part in parts}) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loading_starts_anywhere_and_crosses_epochs(num_workers):
    steps = steps_of()
    loaded = list(itertools.islice(load_steps(steps, 3, num_workers=num_workers), 9))
    for position, step in enumerate(loaded, start=3):
        expected = steps[position]
        assert step.position == position
        assert step.num_supervised == expected.num_supervised
        for batch, wanted in zip(step.micro_batches, expected.micro_batches, strict=True):
            assert torch.equal(batch.input_ids, wanted.input_ids)
            assert torch.equal(batch.labels, wanted.labels)
            assert batch.sample_ids == wanted.sample_ids


class _Stalling(PackedSteps):
    def __getitem__(self, position: int):
        if position == 2:
            time.sleep(60)
        return super().__getitem__(position)


class _Dying(PackedSteps):
    def __getitem__(self, position: int):
        if position == 2:
            os._exit(1)
        return super().__getitem__(position)


class _Failing(PackedSteps):
    def __getitem__(self, position: int):
        if position == 2:
            raise DataError("train.jsonl:7 is broken")
        return super().__getitem__(position)


@pytest.mark.parametrize(
    ("kind", "timeout", "match"),
    [
        (
            _Stalling,
            3,
            r"gave nothing for 3 seconds \(data.worker_timeout_seconds\).*num_workers: 0",
        ),
        (_Dying, 6, "One of 1 data workers failed: .*num_workers: 0"),
        (_Failing, 60, "^train.jsonl:7 is broken$"),
    ],
)
def test_a_worker_that_stalls_dies_or_fails_says_so(kind, timeout, match, monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    # A signal tells of a dead worker wherever the process happens to be, pytest's own code too.
    signals = torch.utils.data._utils.signal_handling
    monkeypatch.setattr(signals, "_error_if_any_worker_fails", lambda: None)
    good = steps_of()
    steps = kind(good._sampler, good._collator)
    loaded = load_steps(steps, num_workers=1, timeout_seconds=timeout)
    with pytest.raises(DataError, match=match):
        list(itertools.islice(loaded, 4))


def test_a_batch_moves_as_a_whole():
    (batch, *_) = batches(PackPlan(token_store(random_masks(3, 10)), RowSettings(12)))
    moved = batch.to("meta")
    assert moved.input_ids.device.type == moved.cu_seqlens.device.type == "meta"
    assert moved.sample_ids == batch.sample_ids
