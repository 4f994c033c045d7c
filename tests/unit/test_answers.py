"""Answer and retrieval metrics against values worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixelrag.errors import DataError
from pixelrag.evaluate.answers import (
    answer_metrics,
    exact_match,
    normalize_answer,
    recall_by_answer,
    recall_by_gold,
    token_f1,
)
from pixelrag.evaluate.bootstrap import bootstrap_interval
from pixelrag.evaluate.ranking import summarize


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat, sat!", "cat sat"),
        ("a an the", ""),
        ("another theme", "another theme"),
        ("U.S.A.", "usa"),
        ("the-end", "theend"),
        ("  \t\n", ""),
        ("Émile Zola’s", "émile zola’s"),
        ("$1,000.50", "100050"),
    ],
)
def test_normal_form(text, expected):
    assert normalize_answer(text) == expected
    assert normalize_answer(expected) == expected


def test_exact_match_takes_any_answer():
    assert exact_match("The Eiffel Tower.", ["Paris", "eiffel tower"]) == 1
    assert exact_match("Eiffel", ["Paris", "eiffel tower"]) == 0
    assert exact_match("", ["the"]) == 1


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("the cat sat", ["cat sat down"], 0.8),  # 2 of 2 said, 2 of 3 right
        ("cat", ["dog", "cat cat cat"], 0.5),
        ("cat cat", ["cat dog"], 0.5),  # a word counts as often as both have it
        ("dog", ["cat"], 0.0),
        ("", ["cat"], 0.0),
        ("cat", ["the"], 0.0),
        ("the", ["a"], 1.0),
        ("x y", ["y x"], 1.0),
    ],
)
def test_f1(prediction, answers, expected):
    assert token_f1(prediction, answers) == pytest.approx(expected)


@given(
    said=st.text("ab the.", max_size=12),
    answers=st.lists(st.text("ab the.", min_size=1, max_size=12), min_size=1, max_size=3),
)
def test_f1_is_at_least_exact_match(said, answers):
    em, f1 = exact_match(said, answers), token_f1(said, answers)
    assert em <= f1 <= 1
    assert token_f1(answers[0], answers) == exact_match(answers[0], answers) == 1


def test_values_of_each_question():
    values = answer_metrics(["Paris", "a red cat", ""], [["paris"], ["cat", "dog"], ["x"]])
    assert values["em"].tolist() == [1, 0, 0]
    assert values["f1"].tolist() == pytest.approx([1, 2 / 3, 0])
    assert summarize(values)["em"] == pytest.approx(1 / 3)
    assert bootstrap_interval(values["f1"], num_samples=100).mean == pytest.approx(5 / 9)
    for answers, reason in (
        ([["x"]], "of 1 questions and 2 predictions"),
        ([["x"], []], "question 1 has"),
        ([["x"], "y"], "question 1 has 'y'"),  # a string is a collection of its letters
    ):
        with pytest.raises(DataError, match=reason):
            answer_metrics(["x", "y"], answers)


def test_recall_by_gold():
    rows = np.array([[4, 2, 9], [7, -1, -1], [1, 2, 3], [5, 6, 7]])
    gold = [[[2]], [[8], [7]], [[9, 3], [1, 11]], [range(40, 42)]]
    values = recall_by_gold(rows, gold, ks=(1, 2, 3))
    assert values["recall@1"].tolist() == [0, 0.5, 0.5, 0]
    assert values["recall@2"].tolist() == [1, 0.5, 0.5, 0]
    assert values["recall@3"].tolist() == [1, 0.5, 1, 0]
    for wrong, reason in (
        (gold[:3], "gold of 3 questions, searches of 4"),
        ([*gold[:3], []], "question 3 has no gold"),
        ([*gold[:3], [[]]], "question 3 has no gold"),
        ([*gold[:3], [[-1]]], "question 3 has no gold"),  # nothing found is no passage
    ):
        with pytest.raises(DataError, match=reason):
            recall_by_gold(rows, wrong, ks=(1,))
    for k in (0, 4):
        with pytest.raises(ValueError, match=f"k={k}: expected 1 to 3"):
            recall_by_gold(rows, gold, ks=(k,))


def test_recall_by_answer():
    texts = [
        ["no", "The party, in ROME!", "art"],
        ["party", "state of the art."],
        ["cafe\u0301 Noir", ""],
        [],
        ["x y", "y-x"],
    ]
    answers = [["rome"], ["art", "arts"], ["Café noir"], ["z"], ["y x", "y-x"]]
    values = recall_by_answer(texts, answers, ks=(1, 2, 3))
    assert values["answer_recall@1"].tolist() == [0, 0, 1, 0, 0]
    assert values["answer_recall@2"].tolist() == [1, 1, 1, 0, 1]
    assert values["answer_recall@3"].tolist() == [1, 1, 1, 0, 1]
    # An answer without a word is in nothing, rather than in everything.
    assert recall_by_answer([["", "x"]], [[" "]], ks=(2,))["answer_recall@2"].tolist() == [0]
    with pytest.raises(ValueError, match="k=0"):
        recall_by_answer(texts, answers, ks=(0,))
    with pytest.raises(DataError, match="of 4 questions and 5 lists"):
        recall_by_answer(texts, answers[:4])
