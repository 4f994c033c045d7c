"""Answers with their passages, as JSON lines and as a page."""

import json
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from pixelrag.data.passages import load_passages
from pixelrag.data.questions import Question
from pixelrag.errors import CheckpointError, DataError
from pixelrag.evaluate import answer_page as page_module
from pixelrag.evaluate.answer_page import answer_page, write_answers
from pixelrag.evaluate.answer_rows import AnswerRow, Hit, answer_rows, answers_jsonl


class _Page(HTMLParser):
    """What a page shows, and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.shown: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.shown.append(data)


def _answered(question: str, written: str, rows: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        question=Question(question, ("The Nile", "Nile river"), ("b",), "q.jsonl:1"),
        answer=written,
        rows=rows,
        scores=[0.5 - 0.1 * place for place in range(len(rows))],
    )


@pytest.fixture
def passages(tmp_path: Path):
    kb = tmp_path / "kb.jsonl"
    entries = [
        {"id": "a", "title": "Tom & Jerry", "text": "<script>alert(1)</script>"},
        {"id": "b", "text": "The Nile is long."},
    ]
    kb.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return load_passages(str(kb), split="none")


def test_rows_name_what_was_found_and_what_is_right(passages) -> None:
    rows = list(answer_rows([_answered("q?", "nile", [1, 0]), _answered("r?", "Po", [])], passages))
    assert [row.is_right for row in rows] == [True, False]
    assert [(hit.id, hit.gold, hit.score) for hit in rows[0].hits] == [
        ("b", True, 0.5),
        ("a", False, 0.4),
    ]
    lines = [json.loads(line) for line in answers_jsonl(rows).splitlines()]
    assert lines[0]["passages"][1]["title"] == "Tom & Jerry"
    assert lines[1] == {
        "question": "r?", "written": "Po", "answers": ["The Nile", "Nile river"], "right": False,
        "passages": [],
    }  # fmt: skip


def test_the_page_shows_text_as_text_and_wrong_answers_first(passages) -> None:
    rows = list(
        answer_rows([_answered("a<b?", "Nile", [1, 0]), _answered("r?", "Po", [0])], passages)
    )
    page = _Page(answer_page(rows, {"eval/em": 0.5}, title="Rivers & seas"))
    text = " ".join(page.shown)
    for shown in ("Rivers & seas", "0.5000", "1 wrong of 2", "<script>alert(1)</script>"):
        assert shown in text
    assert text.index("r?") < text.index("a<b?")
    assert "script" not in {tag for tag, _ in page.tags}
    assert [attrs.get("class") for tag, attrs in page.tags if tag == "li"] == [None, "gold", None]


def test_answers_are_marked_in_the_passages_as_whole_words() -> None:
    hit = Hit("b", "", "An <ox>, a fox & an OX; oxen.", None, 0.5, gold=False)
    page = answer_page([AnswerRow("q", "ox", ("ox", "(", ""), (hit,))], {}, title="t")
    assert "An &lt;<mark>ox</mark>&gt;, a fox &amp; an <mark>OX</mark>; oxen." in page


def test_a_long_page_is_cut_and_says_so(monkeypatch) -> None:
    monkeypatch.setattr(page_module, "_MAX_ROWS", 5)
    rows = [AnswerRow(f"q{n}", "a" if n % 5 else "b", ("a",), ()) for n in range(10)]
    page = answer_page(rows, {}, title="t")
    assert "2 wrong of 10, the first 1 here</h2>" in page
    assert "8 right of 10, the first 4 here</h2>" in page
    assert page.count("<details>") == 1 + 4


def test_a_tile_is_in_the_page_once_and_small(tmp_path: Path) -> None:
    tiles = tmp_path / "tiles"
    tiles.mkdir()
    Image.new("RGBA", (1120, 400), "red").save(tiles / "b.png")
    store = load_passages(str(tiles), split="none")
    answered = _answered("q?", "Nile", [0])
    answered.question = Question("q?", ("Nile",), (store.ids[0],), "q.jsonl:1")
    rows = list(answer_rows([answered, answered], store))
    tags = _Page(answer_page(rows, {}, title="t")).tags
    (image,) = [attrs for tag, attrs in tags if tag == "image"]
    assert (image["width"], image["height"]) == ("560", "200")
    assert image["href"].startswith("data:image/webp;base64,UklGR")
    assert [attrs["href"] for tag, attrs in tags if tag == "use"] == ["#tile-0"] * 2
    # Nothing is fetched: what is referred to is in the page.
    named = [v for _, attrs in tags for k, v in attrs.items() if k in ("src", "href")]
    assert all(value.startswith(("data:", "#tile-")) for value in named)
    (tiles / "b.png").unlink()
    with pytest.raises(DataError, match=r"b\.png: cannot be read"):
        answer_page(rows, {}, title="t")


def test_files_are_written_whole_or_not_at_all(tmp_path: Path, passages) -> None:
    rows = list(answer_rows([_answered("q?", "Po", [0])], passages))
    write_answers(tmp_path / "new" / "folder", rows, {"eval/em": 0.0}, title="t")
    found = sorted((tmp_path / "new" / "folder").iterdir())
    assert [path.name for path in found] == ["answers.html", "answers.jsonl"]
    assert found[1].read_text() == answers_jsonl(rows)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="file: the answers cannot be written"):
        write_answers(tmp_path / "file", rows, {}, title="t")
    assert (tmp_path / "file").read_text() == "mine"
