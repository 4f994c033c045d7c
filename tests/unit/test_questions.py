"""Question files: what a row may look like, and every fault of every row."""

import json
import logging
from pathlib import Path

import pytest

from pixelrag.data.passages import load_passages
from pixelrag.data.questions import Question, QuestionDataset, with_answer
from pixelrag.errors import ConfigError, DataError


def write(path: Path, *rows: object) -> str:
    """A JSONL file of rows; a string is written as the line itself."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_what_a_row_may_look_like(tmp_path):
    first = write(
        tmp_path / "a" / "q.jsonl",
        {"question": "q1", "answers": ["x", "y", "x"], "passage_ids": ["7", 8, "7"]},
        "",
        {"question": "q2", "answer": "z", "answers": None, "passage_ids": None, "more": 1},
    )
    second = write(tmp_path / "b" / "q.jsonl", {"question": "q3", "answers": ["w"]})
    dataset = QuestionDataset([first, second])
    assert list(dataset) == [
        Question("q1", ("x", "y"), ("7", "8"), "a/q.jsonl:1"),
        Question("q2", ("z",), (), "a/q.jsonl:3"),
        Question("q3", ("w",), (), "b/q.jsonl:1"),
    ]
    assert len(dataset) == 3
    assert dataset[2].text == "q3"
    assert (dataset.report.num_rows, dataset.report.num_documents) == (3, 2)
    assert QuestionDataset([second, first]).report.fingerprint != dataset.report.fingerprint
    assert QuestionDataset(Path(second))[0].sample_id == "q.jsonl:1"


def test_a_line_moved_to_the_next_file_is_other_data(tmp_path):
    lines = [json.dumps({"question": f"q{i}", "answer": "a"}) + "\n" for i in range(3)]
    fingerprints = set()
    for cut in (1, 2):
        for name, part in (("a.jsonl", lines[:cut]), ("b.jsonl", lines[cut:])):
            (tmp_path / name).write_text("".join(part))
        dataset = QuestionDataset([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
        fingerprints.add(dataset.report.fingerprint)
    assert len(fingerprints) == 2


FAULTS = [
    ("{", "not valid JSON"),
    ([1], "a row is a JSON object, got a list"),
    ({"answers": ["a"]}, "question is missing"),
    ({"question": " ", "answers": ["a"]}, "question is empty"),
    ({"question": "q"}, "has neither of answers and answer"),
    ({"question": "q", "answers": ["a"], "answer": "a"}, "has both of answers and answer"),
    ({"question": "q", "answers": []}, "answers is empty"),
    ({"question": "q", "answers": "a"}, "answers is a list of strings, got a string"),
    ({"question": "q", "answers": ["a", 3]}, "answers[1] is a string, got a number"),
    ({"question": "q", "answers": ["a", ""]}, "answers[1] is empty"),
    ({"question": "q", "answer": ["a"]}, "answer is a string, got a list"),
    ({"question": "q", "answer": "a", "passage_ids": "7"}, "passage_ids is a list of strings"),
    ({"question": "q", "answer": "a", "passage_ids": [True]}, "passage_ids[0] is a string"),
    ({"question": 1, "answer": "a\ud800"}, "answer contains half a surrogate pair"),
]


def test_every_fault_is_named(tmp_path, caplog):
    good = {"question": "q", "answers": ["a"]}
    path = write(tmp_path / "q.jsonl", good, *[row for row, _ in FAULTS], good)
    with pytest.raises(DataError) as caught:
        QuestionDataset(path)
    message = str(caught.value)
    assert message.startswith(f"{len(FAULTS)} of {len(FAULTS) + 2} rows cannot be used")
    for line, (_, reason) in enumerate(FAULTS, start=2):
        assert f"{path}:{line}: {reason}" in message
    with caplog.at_level(logging.WARNING):
        dataset = QuestionDataset(path, "skip")
    assert [question.sample_id for question in dataset] == ["q.jsonl:1", "q.jsonl:16"]
    assert "Skipping bad rows" in caplog.text
    assert dataset.report.num_bad_rows == len(FAULTS)


def test_gold_passages_must_be_in_the_knowledge_base(tmp_path):
    kb = write(tmp_path / "kb.jsonl", {"id": "7", "text": "a b c"}, {"id": "8", "text": "d"})
    rows = [
        {"question": "q1", "answer": "a", "passage_ids": ["7"]},
        {"question": "q2", "answer": "a", "passage_ids": ["7", "9"]},
        {"question": "q3", "answer": "a", "passage_ids": ["8#0"]},
    ]
    path = write(tmp_path / "q.jsonl", *rows)
    passages = load_passages(kb, split="words", length=2)
    with pytest.raises(DataError, match=r"1 of 3[^\n]*\n[^\n]*q\.jsonl:2: passage_ids names '9'"):
        QuestionDataset(path, passages=passages)
    kept = QuestionDataset(path, "skip", passages=passages)
    assert [question.text for question in kept] == ["q1", "q3"]
    with pytest.raises(DataError, match="2 of 3"):
        QuestionDataset(path, passages=load_passages(kb))
    assert len(QuestionDataset(path)) == 3


def test_files_that_are_none(tmp_path):
    path = write(tmp_path / "q.jsonl", {"question": "q", "answer": "a"})
    with pytest.raises(DataError, match="does not exist"):
        QuestionDataset(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="has no rows"):
        QuestionDataset(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(DataError, match="each once"):
        QuestionDataset([path, path])
    with pytest.raises(DataError, match="name at least one"):
        QuestionDataset([])
    with pytest.raises(DataError, match="No row is left"):
        QuestionDataset(write(tmp_path / "bad.jsonl", "{"), "skip")
    with pytest.raises(ConfigError, match="bad_rows"):
        QuestionDataset(path, "ignore")


def test_each_answer_has_its_turn_and_the_same_one_again():
    question = Question("q", ("a", "b", "c"), ("p",), "t.jsonl:1")
    drawn = [with_answer(question, 0, epoch, 7).answers[0] for epoch in range(300)]
    assert drawn == [with_answer(question, 0, epoch, 7).answers[0] for epoch in range(300)]
    assert all(60 < drawn.count(answer) < 140 for answer in "abc")
    other = [with_answer(question, 0, epoch, 8).answers[0] for epoch in range(300)]
    assert other != drawn
    assert [with_answer(question, 1, epoch, 7).answers[0] for epoch in range(300)] != drawn
    assert with_answer(question, 0, 0, 0).passage_ids == ("p",)
    alone = Question("q", ("a",), (), "t.jsonl:1")
    assert with_answer(alone, 0, 0, 0) is alone
