"""Answers with their passages, as JSON lines and as a page."""

import json
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from pixelrag.data.passages import load_passages
from pixelrag.data.questions import Question
from pixelrag.errors import DataError
from pixelrag.evaluate.answer_page import answer_page, answer_rows, answers_jsonl


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
    for shown in ("Rivers & seas", "0.5000", "2 questions, 1 right", "<script>alert(1)</script>"):
        assert shown in text
    assert text.index("r?") < text.index("a<b?")
    assert "script" not in {tag for tag, _ in page.tags}
    assert [attrs.get("class") for tag, attrs in page.tags if tag == "li"] == [None, "gold", None]


def test_tiles_are_part_of_the_page(tmp_path: Path) -> None:
    tiles = tmp_path / "tiles"
    tiles.mkdir()
    Image.new("RGB", (4, 4), "red").save(tiles / "b.png")
    store = load_passages(str(tiles), split="none")
    answered = _answered("q?", "Nile", [0])
    answered.question = Question("q?", ("Nile",), (store.ids[0],), "q.jsonl:1")
    rows = list(answer_rows([answered], store))
    (image,) = [
        attrs for tag, attrs in _Page(answer_page(rows, {}, title="t")).tags if tag == "img"
    ]
    assert image["src"].startswith("data:image/png;base64,iVBOR")
    (tiles / "b.png").unlink()
    with pytest.raises(DataError, match=r"b\.png: cannot be read"):
        answer_page(rows, {}, title="t")
