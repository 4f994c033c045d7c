"""TREC files and the figures made of them, checked against ir_measures (trec_eval)."""

import itertools

import ir_measures
import numpy as np
import pytest
import torch
from ir_measures import RR, R, nDCG

from pixelrag.errors import DataError
from pixelrag.evaluate.ranking import best_documents, per_query_metrics, rank_relevant
from pixelrag.evaluate.runs import qrels_text, ranks_of, read_qrels, read_run, run_text

MEASURES = {
    "recall@1": R @ 1,
    "recall@5": R @ 5,
    "recall@10": R @ 10,
    "mrr": RR,
    "ndcg@10": nDCG @ 10,
}


def _searched(depth, *, ties, seed=0):
    """Random embeddings, several positives a query; the run of the first ``depth`` documents."""
    rng = np.random.default_rng(seed)
    query, docs = (torch.from_numpy(rng.standard_normal((n, 4))) for n in (30, 20))
    if ties:  # scores of a few values only
        query, docs = query.sign(), docs.sign()
    relevant = [rng.choice(20, rng.integers(1, 5), replace=False).tolist() for _ in range(30)]
    rows, scores = best_documents(query, docs, depth, block_entries=120)
    run = {
        f"q {q}": [(f"d{row:02}", s) for row, s in zip(rows[q], scores[q], strict=True)]
        for q in range(30)
    }
    qrels = {f"q {q}": {f"d{row:02}" for row in relevant[q]} for q in range(30)}
    return rank_relevant(query, docs, relevant), run, qrels


@pytest.mark.parametrize("ties", [False, True])
def test_a_whole_run_gives_our_figures_in_any_tool(tmp_path, ties):
    ranks, run, qrels = _searched(20, ties=ties)
    ours = per_query_metrics(ranks)
    (tmp_path / "run").write_text(run_text(run, "a tag"))
    (tmp_path / "qrels").write_text(qrels_text(qrels))
    theirs = {
        (found.measure, found.query_id): found.value
        for found in ir_measures.iter_calc(
            list(MEASURES.values()),
            ir_measures.read_trec_qrels(str(tmp_path / "qrels")),
            ir_measures.read_trec_run(str(tmp_path / "run")),
        )
    }
    again = per_query_metrics(ranks_of(read_run(tmp_path / "run"), read_qrels(tmp_path / "qrels")))
    for name, measure in MEASURES.items():
        expected = [theirs[measure, f"q%20{q}"] for q in range(30)]
        assert ours[name] == pytest.approx(expected, abs=1e-9), name
        assert again[name] == pytest.approx(expected, abs=1e-9), name
        assert 0 < np.mean(expected) < 1


def test_what_a_run_lacks_counts_as_not_found(tmp_path):
    _, run, qrels = _searched(3, ties=False, seed=1)
    del run["q 7"]
    (tmp_path / "run").write_text(run_text(run, "tag"))
    (tmp_path / "qrels").write_text(qrels_text(qrels))
    ours = per_query_metrics(ranks_of(read_run(tmp_path / "run"), read_qrels(tmp_path / "qrels")))
    theirs = ir_measures.calc_aggregate(
        list(MEASURES.values()),
        ir_measures.read_trec_qrels(str(tmp_path / "qrels")),
        ir_measures.read_trec_run(str(tmp_path / "run")),
    )
    for name, measure in MEASURES.items():
        assert ours[name].mean() == pytest.approx(theirs[measure], abs=1e-9), name
    assert ours["mrr"][7] == 0.0


def test_ties_of_foreign_runs_are_broken_as_trec_eval_does(tmp_path):
    (tmp_path / "run").write_text("q Q0 a 1 0.5 t\nq Q0 b 2 0.5 t\nq Q0 c 3 0.9 t\n")
    assert [name for name, _ in read_run(tmp_path / "run")["q"]] == ["c", "b", "a"]


def test_written_scores_fall_strictly_in_float32():
    text = run_text({"q": [("a", 0.5), ("b", 0.5), ("c", 0.5 - 1e-12), ("d", 0.1)]}, "t")
    scores = [np.float32(line.split()[4]) for line in text.splitlines()]
    assert all(first > second for first, second in itertools.pairwise(scores))
    assert scores[2] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(
    ("run", "qrels", "message"),
    [
        ("q Q0 a 1 0.5\n", "q 0 a 1\n", r"run:1: 5 fields, expected 6: query Q0"),
        ("q Q0 a 1 high t\n", "q 0 a 1\n", "run:1: score 'high' is not a number"),
        ("q Q0 a 1 nan t\n", "q 0 a 1\n", "run:1: score nan is not finite"),
        ("q Q0 a 1 2 t\nq Q0 a 2 1 t\n", "q 0 a 1\n", "query q finds a document more than once"),
        ("q Q0 a 1 0.5 t\n", "q 0 a 2\n", "qrels:1: relevance '2', expected 0 or 1"),
        ("q Q0 a 1 0.5 t\n", "q 0 a 0\n", "names no relevant document"),
        ("q Q0 a 1 0.5 t\n", "x 0 a 1\n", "no query of the qrels .first 'x'. is in the run"),
    ],
)
def test_bad_files_are_named(tmp_path, run, qrels, message):
    (tmp_path / "run").write_text(run)
    (tmp_path / "qrels").write_text(qrels)
    with pytest.raises(DataError, match=message):
        ranks_of(read_run(tmp_path / "run"), read_qrels(tmp_path / "qrels"))
