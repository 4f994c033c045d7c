"""`pixelrag validate`: each bad row by file, line and reason, and exit code 3."""

import json
from pathlib import Path

import pytest
from PIL import Image

from pixelrag.cli import main

RUN = ["validate", "--model.name_or_path=m", "--optim.max_steps=1"]


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Writes a JSONL file of rows (text stands for a broken line) beside two images."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8), "white").save("page.png")
    whole = Path("page.png").read_bytes()
    Path("torn.png").write_bytes(whole[: len(whole) // 2])

    def _rows(name: str, *items: object) -> str:
        lines = [item if isinstance(item, str) else json.dumps(item) for item in items]
        Path(name).write_text("\n".join(lines) + "\n", "utf-8")
        return name

    return _rows


def test_good_rows(rows, capsys):
    rows(
        "t.jsonl",
        {"query": "a", "passage": "b"},
        {"query": "c", "chunk_path": "page.png", "source_dataset": "x"},
    )
    rows("e.jsonl", {"query": "d", "passage": "e", "neg_passages": ["f"]})
    assert main([*RUN, "--data.train=t.jsonl", "--data.eval=e.jsonl"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "t.jsonl: 2 rows, 2 distinct documents, 0 bad rows",
        "e.jsonl: 1 rows, 2 distinct documents, 0 bad rows",
        "valid",
    ]


def test_each_bad_row_is_named(rows, capsys):
    good = {"query": "a", "passage": "b"}
    rows(
        "t.jsonl", good, "{", {"query": " ", "passage": "b"}, {"query": "x", "chunk_path": "no.png"}
    )
    rows("e.jsonl", {"query": "x", "chunk_path": "torn.png"})
    assert main([*RUN, "--data.train=t.jsonl,gone.jsonl", "--data.eval=e.jsonl"]) == 3
    out = capsys.readouterr().out
    for place in ("t.jsonl:2: ", "t.jsonl:3: ", "t.jsonl:4: ", "e.jsonl:1: "):
        assert sum(line.startswith(place) for line in out.splitlines()) == 1, place
    assert "no.png" in out
    assert "gone.jsonl" in out
    assert "t.jsonl: 4 rows, 1 distinct documents, 3 bad rows" in out
    assert out.endswith("not valid\n")


def test_bad_rows_that_training_would_skip_are_named_and_valid(rows, capsys):
    rows("t.jsonl", {"query": "a", "passage": "b"}, "{")
    rows("bad.jsonl", "{")
    skip = "--data.bad_rows=skip"
    assert main([*RUN, "--data.train=t.jsonl", skip]) == 0
    assert "t.jsonl:2: " in capsys.readouterr().out
    assert main([*RUN, "--data.train=bad.jsonl", skip]) == 3


def test_images_are_no_rows_of_text(rows, capsys):
    text, image = {"query": "a", "passage": "b"}, {"query": "c", "chunk_path": "page.png"}
    rows("t.jsonl", text, image)
    flags = ["--data.train=t.jsonl", "--data.text=t.jsonl", "--data.text_mix_ratio=0.5"]
    assert main([*RUN, *flags, "--data.bad_rows=skip"]) == 3
    out = capsys.readouterr().out
    assert out.count("t.jsonl:2: document") == 1
    assert "page.png is an image, and data.text is for rows of text" in out
    rows("t.jsonl", text)
    assert main([*RUN, *flags]) == 0


def test_the_corpus_is_read_too(rows, capsys):
    rows("t.jsonl", {"query": "a", "passage": "b"})
    rows("c.jsonl", {"id": "1", "text": "b"}, {"id": "1", "text": "c"})
    flags = ["--data.train=t.jsonl", "--data.eval=t.jsonl", "--eval.corpus=c.jsonl"]
    assert main([*RUN, *flags]) == 3
    assert "c.jsonl" in capsys.readouterr().out
    rows("c.jsonl", {"id": "1", "text": "b"}, {"id": "2", "text": "c"})
    assert main([*RUN, *flags]) == 0
    assert "c.jsonl: 2 distinct documents to search" in capsys.readouterr().out


def test_a_wrong_configuration_comes_first(rows, capsys):
    rows("t.jsonl", "{")
    assert main([*RUN, "--data.train=t.jsonl", "--batch.chunk_size=0"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "batch.chunk_size" in shown.err
