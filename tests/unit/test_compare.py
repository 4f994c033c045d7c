"""Paired comparisons: the test itself, the alignment of queries, and the command."""

import json

import numpy as np
import pytest
from scipy import stats

from pixelrag.cli import main
from pixelrag.errors import DataError
from pixelrag.evaluate.bootstrap import paired_bootstrap, randomization_test
from pixelrag.evaluate.compare import Measured, compare, compare_sets, read_measured


def test_the_p_value_is_that_of_scipy():
    rng = np.random.default_rng(2)
    before = rng.uniform(size=60)
    after = before + rng.normal(0.03, 0.1, size=60)
    expected = stats.permutation_test(
        (after, before), lambda a, b, axis: np.mean(a - b, axis=axis),
        permutation_type="samples", n_resamples=20_000, rng=np.random.default_rng(1),
    ).pvalue  # fmt: skip
    got = randomization_test(before, after)
    assert 0.01 < expected < 0.2
    assert got == pytest.approx(expected, abs=0.01)
    assert got == randomization_test(before, after)
    assert got == randomization_test(after, before)


def test_the_p_value_of_few_queries_is_exact():
    """Of 2^4 exchanges two are as far apart as four rises of one size."""
    assert randomization_test([0, 0, 0, 0], [1, 1, 1, 1]) == pytest.approx(2 / 16, abs=0.01)
    assert randomization_test([0.5, 0.1], [0.5, 0.1]) == 1.0


def test_queries_are_matched_by_name():
    values = np.random.default_rng(0).uniform(size=(2, 20))
    names = [f"q{i}" for i in range(20)]
    order = np.random.default_rng(1).permutation(20)
    straight = compare(Measured(names, {"mrr": values[0]}), Measured(names, {"mrr": values[1]}))
    mixed = compare(
        Measured([names[i] for i in order], {"mrr": values[0][order]}),
        Measured(names, {"mrr": values[1]}),
    )
    assert mixed == straight
    assert straight["mrr"].change == paired_bootstrap(values[0], values[1])


def _written(path, queries, **figures):
    measured = {"eval": {"queries": queries, "per_query": figures}}
    path.write_text(json.dumps({"measured": measured}))
    return str(path)


def test_the_command_compares_results_and_runs(tmp_path, capsys):
    names = [f"q{i}" for i in range(12)]
    before = _written(tmp_path / "a.json", names, mrr=[0.0] * 12, em=[1.0] * 12)
    after = _written(tmp_path / "b.json", names, mrr=[1.0] * 12, f1=[0.0] * 12)
    assert main(["compare", before, after]) == 0
    head, _, line = capsys.readouterr().out.splitlines()
    assert head == "eval, paired over 12 queries:"
    assert line.split()[:4] == ["mrr", "0.0000", "1.0000", "+1.0000"]
    (tmp_path / "qrels").write_text("q1 0 a 1\nq2 0 b 1\n")
    (tmp_path / "first").write_text("q1 Q0 a 1 1.0 t\nq2 Q0 a 1 2.0 t\nq2 Q0 b 2 1.0 t\n")
    (tmp_path / "second").write_text("q1 Q0 a 1 1.0 t\nq2 Q0 b 1 2.0 t\n")
    runs = [str(tmp_path / name) for name in ("first", "second")]
    assert main(["compare", *runs, "--qrels", str(tmp_path / "qrels")]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[2:]}
    assert rows["recall@1"][1:4] == ["0.5000", "1.0000", "+0.5000"]
    assert rows["mrr"][1:4] == ["0.7500", "1.0000", "+0.2500"]
    assert main(["compare", *runs]) == 3
    assert "a TREC run is judged by qrels" in capsys.readouterr().err


def test_what_cannot_be_compared_is_said(tmp_path):
    mrr = Measured(["a", "b"], {"mrr": [0.0, 1.0]})
    with pytest.raises(DataError, match="2 queries were measured on one side only, first 'b'"):
        compare(mrr, Measured(["a", "c"], {"mrr": [0.0, 1.0]}))
    with pytest.raises(DataError, match="figures of eval, the new one of no queries"):
        compare_sets({"eval": mrr}, {})
    with pytest.raises(DataError, match="no figure is common: the baseline has mrr"):
        compare(mrr, Measured(["a", "b"], {"em": [0.0, 1.0]}))
    short = '{"measured": {"eval": {"queries": ["a"], "per_query": {"mrr": [0.0, 1.0]}}}}'
    for content in ("{", "{}", "[]", short):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(DataError, match="no result of `pixelrag eval --output`"):
            read_measured(tmp_path / "bad.json")
