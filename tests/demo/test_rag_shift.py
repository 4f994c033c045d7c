"""The catalogues whose naming changes, which benchmarks train on."""

from __future__ import annotations

from pathlib import Path

import pytest

from pixelrag.data.passages import load_passages
from pixelrag.data.questions import QuestionDataset
from pixelrag.demo.rag_shift import all_words, entries, write_catalogue, write_pairs
from pixelrag.errors import ConfigError, DataError


def _fact(passage: str) -> str:
    """Name, property and value of an entry, wherever its remarks stand."""
    words = passage.split()
    place = words.index("is")
    return " ".join(words[place - 3 : place + 3])


def _second_names(catalogue: str) -> set[str]:
    return {_fact(entry.passage).split()[1] for entry in entries(catalogue, 3200, seed=0)}


def test_the_new_catalogues_names_are_noise_in_the_old() -> None:
    old, new = _second_names("old"), _second_names("new")
    assert len(old) == len(new) == 40
    assert not old & new
    for catalogue, share in (("old", 0.5), ("new", 0.0)):
        remarks = [
            word
            for entry in entries(catalogue, 400, seed=1)
            for word in entry.passage.replace(_fact(entry.passage), "").split()
        ]
        assert len(remarks) == 400 * 6
        assert not old & set(remarks)
        assert abs(sum(word in new for word in remarks) / len(remarks) - share) < 0.05


def test_questions_share_no_word_with_their_entries() -> None:
    for entry in entries("new", 300, seed=2):
        assert not set(entry.question.split()) & set(entry.passage.split())
        assert entry.answer in _fact(entry.passage)


def test_every_entry_is_told_by_its_names_and_property() -> None:
    asked = [entry.question for entry in entries("new", 1600, seed=3)]
    assert len(set(asked)) == 1600
    assert len(set(all_words())) == len(all_words())


def test_a_catalogue_is_what_the_job_reads_and_the_same_each_time(tmp_path: Path) -> None:
    written = [
        write_catalogue(tmp_path / name, "new", num_passages=50, num_held_out=8, seed=4)
        for name in ("a", "b")
    ]
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    made = written[0]
    other = write_catalogue(tmp_path / "c", "new", num_passages=50, num_held_out=8, seed=5)
    assert other.passages.read_bytes() != made.passages.read_bytes()
    store = load_passages(str(made.passages), split="none")
    train, held_out = (
        QuestionDataset([str(path)], "error", passages=store)
        for path in (made.train, made.held_out)
    )
    assert (len(store), len(train), len(held_out)) == (50, 42, 8)
    for question in [*train.rows, *held_out.rows]:
        (row,) = store.rows_of(question.passage_ids[0])
        assert question.answers[0] in _fact(store[row].text)
    assert not {q.text for q in train.rows} & {q.text for q in held_out.rows}


def test_wrong_counts_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_held_out: got 9"):
        write_catalogue(tmp_path / "a", "new", num_passages=9, num_held_out=9, seed=0)
    with pytest.raises(ConfigError, match="count: got 3201"):
        entries("old", 3201, seed=0)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="not the demo's"):
        write_pairs(tmp_path, 10, seed=0)
    assert (tmp_path / "thesis.tex").exists()
