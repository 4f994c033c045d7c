"""Ranks and metrics against a naive float64 reference that sorts everything."""

import math

import numpy as np
import pytest
import torch

from pixelrag.errors import DataError, NonFiniteError
from pixelrag.evaluate.bootstrap import bootstrap_interval, paired_bootstrap
from pixelrag.evaluate.ranking import (
    METRIC_NAMES,
    ndcg_at,
    per_query_metrics,
    rank_relevant,
    recall_at,
    summarize,
)


def unit(rng, *shape):
    x = rng.standard_normal(shape).astype(np.float32)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def naive_ranks(query, docs, qrels):
    """Sort the whole corpus for each query; Python floats, one document at a time."""
    out = []
    for q, relevant in zip(query.astype(np.float64), qrels, strict=True):
        scores = [math.fsum(q * d) for d in docs.astype(np.float64)]
        order = sorted(range(len(docs)), key=lambda i: (-round(scores[i], 9), i))
        out.append([order.index(d) + 1 for d in sorted(set(relevant))])
    return out


def naive_metrics(ranks):
    def ndcg(r, k=10):
        ideal = sum(1 / math.log2(i + 1) for i in range(1, min(k, len(r)) + 1))
        return sum(1 / math.log2(x + 1) for x in r if x <= k) / ideal

    def mean(values):
        return math.fsum(values) / len(ranks)

    recall = {k: mean([sum(x <= k for x in r) / len(r) for r in ranks]) for k in (1, 5, 10)}
    return {
        **{f"recall@{k}": v for k, v in recall.items()},
        "mrr": mean([1 / min(r) for r in ranks]),
        "ndcg@10": mean([ndcg(r) for r in ranks]),
    }


@pytest.mark.parametrize("block_entries", [1, 7, 97, 2**22])
@pytest.mark.parametrize("multi", [False, True], ids=["one_positive", "many_positives"])
def test_equals_the_naive_reference(block_entries, multi):
    rng = np.random.default_rng(3)
    query, docs = unit(rng, 23, 6), unit(rng, 61, 6)
    docs[40] = docs[7]  # a real duplicate in the corpus
    if multi:
        qrels = [rng.choice(61, size=rng.integers(1, 14), replace=False) for _ in range(23)]
        qrels[0] = [40, 7, 40]
        relevant = qrels
    else:
        qrels = [[int(i)] for i in rng.integers(0, 61, size=23)]
        relevant = torch.tensor([q[0] for q in qrels])
    ranks = rank_relevant(
        torch.from_numpy(query), torch.from_numpy(docs), relevant, block_entries=block_entries
    )
    expected = naive_ranks(query, docs, qrels)
    assert ranks.rank_P.tolist() == [r for row in expected for r in row]
    got = summarize(per_query_metrics(ranks))
    assert tuple(got) == METRIC_NAMES
    for name, value in naive_metrics(expected).items():
        assert got[name] == pytest.approx(value, abs=1e-12), name
    assert ranks.best().tolist() == [min(row) for row in expected]


def test_hand_computed_case():
    docs = torch.eye(4)
    query = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    ranks = rank_relevant(query, docs, [[1, 3]])  # ranks 2 and 4
    assert ranks.rank_P.tolist() == [2, 4]
    assert recall_at(ranks, 1).tolist() == [0.0]
    assert recall_at(ranks, 2).tolist() == [0.5]
    ideal = 1 / math.log2(2) + 1 / math.log2(3)
    assert ndcg_at(ranks, 10)[0] == pytest.approx(
        (1 / math.log2(3) + 1 / math.log2(5)) / ideal, abs=1e-15
    )
    assert ndcg_at(ranks, 3)[0] == pytest.approx((1 / math.log2(3)) / ideal, abs=1e-15)
    # With k = 1 one relevant document on top would already be ideal.
    assert ndcg_at(rank_relevant(query, docs, [[0, 1, 2]]), 1)[0] == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dim", [3, 384])
@pytest.mark.parametrize("block_entries", [11, 1000, 2**22])
def test_a_collapsed_encoder_scores_at_chance(dtype, dim, block_entries):
    """Irrational components, so that a matmul kernel's summation order could break ties."""
    vector = torch.from_numpy(unit(np.random.default_rng(0), dim)).to(dtype)
    query, docs = vector.expand(57, dim), vector.expand(57, dim)
    relevant = torch.arange(57)
    ranks = rank_relevant(query, docs, relevant, block_entries=block_entries)
    assert ranks.rank_P.tolist() == list(range(1, 58))
    metrics = summarize(per_query_metrics(ranks))
    assert metrics["recall@1"] == pytest.approx(1 / 57)
    assert metrics["recall@10"] == pytest.approx(10 / 57)


def test_zero_embeddings_tie_too():
    ranks = rank_relevant(torch.zeros(3, 4), torch.zeros(5, 4), torch.tensor([4, 2, 0]))
    assert ranks.rank_P.tolist() == [5, 3, 1]


def test_float32_neighbours_stay_apart():
    docs = torch.tensor([[1.0, 0.0], [np.nextafter(np.float32(1), np.float32(2)), 0.0]])
    assert rank_relevant(torch.tensor([[1.0, 0.0]]), docs, [[0]]).rank_P.tolist() == [2]


def test_scale_does_not_change_ranks():
    rng = np.random.default_rng(1)
    query, docs = torch.from_numpy(unit(rng, 9, 5)), torch.from_numpy(unit(rng, 30, 5))
    positive = torch.arange(9)
    ranks, scaled = (
        rank_relevant(q, d, positive) for q, d in ((query, docs), (query * 1e6, docs * 1e-3))
    )
    assert ranks.rank_P.tolist() == scaled.rank_P.tolist()


def test_perfect_and_k_beyond_the_corpus():
    ranks = rank_relevant(torch.eye(3), torch.eye(3), torch.arange(3))
    assert all(v == 1.0 for v in summarize(per_query_metrics(ranks)).values())
    worst = rank_relevant(-torch.eye(3), torch.eye(3), torch.arange(3))
    assert worst.best().tolist() == [3, 3, 3]
    assert recall_at(worst, 10).tolist() == [1.0] * 3


@pytest.mark.parametrize("side", ["query", "document"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_embeddings_never_become_a_metric(side, value):
    query, docs = torch.eye(3), torch.eye(3)
    (query if side == "query" else docs)[1, 2] = value
    with pytest.raises(NonFiniteError, match=rf"1 of 3 {side} embeddings.*row 1"):
        rank_relevant(query, docs, torch.arange(3))


@pytest.mark.parametrize(
    ("query", "docs", "relevant", "message"),
    [
        (torch.eye(3), torch.eye(4), [[0]] * 3, r"\[3, 3\] and documents \[4, 4\]"),
        (torch.zeros(0, 3), torch.eye(3), [], "0 queries and 3 documents"),
        (torch.eye(3), torch.eye(3), [[0], [], [1]], "query 1 has no relevant"),
        (torch.eye(3), torch.eye(3), torch.tensor([0, 1, 3]), r"query 2 names document 3.*0\.\.2"),
        (torch.eye(3), torch.eye(3), [[0], [-1], [1]], "query 1 names document -1"),
        (torch.eye(3), torch.eye(3), [[0]], "relevance for 1 queries, embeddings of 3"),
        (torch.eye(3), torch.eye(3), torch.ones(3), "torch.float32"),
    ],
)
def test_wrong_input_is_named(query, docs, relevant, message):
    with pytest.raises(DataError, match=message):
        rank_relevant(query, docs, relevant)


def test_gradients_are_not_needed():
    query = torch.eye(3, requires_grad=True)
    assert rank_relevant(query, torch.eye(3), torch.arange(3)).rank_P.tolist() == [1, 1, 1]


def test_bootstrap_matches_the_normal_interval_and_repeats():
    values = np.random.default_rng(5).normal(2.0, 3.0, size=2000)
    got = bootstrap_interval(values, seed=1)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert got.mean == pytest.approx(values.mean())
    assert got.low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert got.high == pytest.approx(values.mean() + half, abs=0.05 * half)
    assert got == bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)
    narrow = bootstrap_interval(values, seed=1, confidence=0.5)
    assert got.low < narrow.low < narrow.high < got.high


def test_pairing_makes_the_interval_narrow():
    rng = np.random.default_rng(0)
    before = rng.uniform(size=300)
    after = before + 0.01 + rng.normal(0, 0.01, size=300)
    got = paired_bootstrap(before, after)
    assert 0 < got.low < got.mean < got.high < 0.02
    shuffled = paired_bootstrap(before, rng.permutation(after))
    assert shuffled.low < 0 < shuffled.high
    same = paired_bootstrap(before, before)
    assert (same.mean, same.low, same.high) == (0.0, 0.0, 0.0)


def test_bootstrap_refuses_what_it_cannot_mean():
    with pytest.raises(DataError, match=r"\(3,\) values before and \(2,\) after"):
        paired_bootstrap([1, 2, 3], [1, 2])
    with pytest.raises(DataError, match="Q >= 1"):
        bootstrap_interval([])
    with pytest.raises(NonFiniteError, match="query 1 is nan"):
        bootstrap_interval([0.0, float("nan")])
    with pytest.raises(DataError, match="recall@1: no queries"):
        summarize({"recall@1": np.array([])})
