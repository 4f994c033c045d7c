"""PixelRAG's question files: what they say, and every way in which they can be wrong."""

import json

import pytest
from PIL import Image

from pixelrag.data.tile_questions import load_tile_set
from pixelrag.errors import DataError


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes tiles and a question file; the working directory is the folder of both."""
    monkeypatch.chdir(tmp_path)
    for name in ("a_chunk_0", "a_chunk_1", "deep/b_chunk_0", "c"):
        path = tmp_path / "tiles" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32)).save(path)
    (tmp_path / "tiles" / "notes.txt").write_text("no tile")

    def _write(**changes):
        content = {
            "tiles_dir": "tiles",
            "questions": [
                {"id": 1, "problem": "one?", "answer": "eins"},
                {"id": "x", "problem": "two?", "answer": "zwei", "more": 1},
            ],
            "golden_mapping": {"1": ["a"], "x": ["c", "b"]},
        }
        path = tmp_path / "questions.json"
        path.write_text(json.dumps(content | changes))
        return path

    return _write


def test_tiles_are_found_by_their_article(written):
    found = load_tile_set(written())
    names = [tile.image.name for tile in found.tiles]
    assert names == ["a_chunk_0.png", "a_chunk_1.png", "c.png", "b_chunk_0.png"]
    assert [(q.id, q.text, q.answer, q.tiles) for q in found.questions] == [
        ("1", "one?", "eins", (0, 1)),
        ("x", "two?", "zwei", (2, 3)),
    ]
    assert len(load_tile_set(written(), max_questions=1).questions) == 1


def test_faults_are_told_all_at_once(written, tmp_path):
    (tmp_path / "tiles" / "d_chunk_0.png").write_bytes(b"broken")
    questions = [
        {"id": 1, "problem": " ", "answer": "eins"},
        {"id": 1, "problem": "two?"},
        "three",
        {"id": 4, "problem": "four?", "answer": "vier"},
    ]
    path = written(questions=questions, golden_mapping={"1": ["a"], "4": ["nowhere"]})
    with pytest.raises(DataError) as caught:
        load_tile_set(path)
    for told in (
        "questions.json:1: problem is empty",
        "questions.json:2: answer is missing",
        "questions.json:2: repeats the id '1' of question 1",
        "questions.json:3: golden_mapping[''] is a list of articles, got null",
        "questions.json:4: no tile shows an article of golden_mapping['4'], ['nowhere']",
        "d_chunk_0.png is no image of a known format",
    ):
        assert told in str(caught.value), told


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tiles_dir": "nowhere"},
            "tiles_dir nowhere does not exist; it is relative to the working",
        ),
        ({"tiles_dir": None, "questions": {}}, "wrong or missing: tiles_dir, questions"),
        ({"questions": []}, "has no questions"),
    ],
)
def test_files_of_another_form(written, changes, message):
    with pytest.raises(DataError, match=message):
        load_tile_set(written(**changes))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        load_tile_set(tmp_path / "none.json")
