"""Knowledge bases: sources, ids, cutting, faults, changes under the run, memory."""

import json
import os
import pickle
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pixelrag.data.id_table import IdTable
from pixelrag.data.passage_sources import Passage
from pixelrag.data.passage_split import Splitter
from pixelrag.data.passages import load_passages
from pixelrag.errors import ConfigError, DataError, ModelError
from pixelrag.models.tiny_tokenizer import byte_tokenizer, wordpiece_tokenizer


def write(path: Path, *rows: object, end: str = "\n") -> str:
    """A JSONL file of rows; a string is written as the line itself."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_bytes("".join(line + end for line in lines).encode())
    return str(path)


def text(number: int, **more: object) -> dict:
    return {"id": f"d{number}", "title": f"Title {number}", "text": f"text {number}"} | more


def image_file(path: Path, color: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), color).save(path)
    return path


def test_lines_are_read_again_when_asked_for(tmp_path):
    long = "word " * 5000
    file = tmp_path / "kb.jsonl"
    lines = [
        json.dumps(text(1)),
        "",
        json.dumps({"id": 7, "text": "no title\u2028here"}, ensure_ascii=False),
        json.dumps(text(3, text=long, title=None, other=[1])),
    ]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    store = load_passages(str(file))
    assert len(store) == store.num_documents == 3
    assert store.ids == ["d1", "7", "d3"]
    assert store[0] == Passage("d1", "Title 1", "text 1", None)
    assert store[1] == Passage("7", "", "no title\u2028here", None)
    assert store[2].text == long
    assert store.lengths.tolist() == [6 + 7, 13, len(long)]
    assert [store.row_of(identity) for identity in store.ids] == [0, 1, 2]
    assert not store.has_images
    assert list(store) == [store[row] for row in range(3)]


def test_rows_that_are_none_raise(tmp_path):
    store = load_passages(write(tmp_path / "kb.jsonl", text(1), text(2)))
    for row in (-1, 2):  # -1 is what an index returns for "nothing found"
        with pytest.raises(IndexError, match="expected 0 to 1"):
            store[row]
        with pytest.raises(IndexError):
            store.id_of(row)
    with pytest.raises(DataError, match="no passage with the id 'd3'"):
        store.row_of("d3")
    assert store[np.int64(1)].id == "d2"


def test_images_and_texts_mix_in_a_file(tmp_path):
    tile = image_file(tmp_path / "kb" / "tiles" / "a.png")
    row = {"id": "a", "title": "Page 1", "chunk_path": "tiles/a.png"}
    store = load_passages(write(tmp_path / "kb" / "kb.jsonl", text(1), row))
    assert store[1] == Passage("a", "Page 1", None, tile)
    assert store.has_images
    assert store.lengths.tolist() == [13, 0]


def test_a_folder_of_tiles(tmp_path):
    for name in ("b/2.png", "a.JPG", "b/10.png"):
        image_file(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no tile")
    (tmp_path / ".hidden.png").write_text("no tile")
    seen = []
    store = load_passages(str(tmp_path), progress=lambda *numbers: seen.append(numbers))
    assert store.ids == ["a.JPG", "b/10.png", "b/2.png"]
    assert store[2].image == tmp_path / "b" / "2.png"
    assert seen == [(3, 3)]
    store.require_unchanged()
    image_file(tmp_path / "c.png")
    with pytest.raises(DataError, match="holds other files"):
        store.require_unchanged()


def test_file_names_that_are_no_text(tmp_path):
    image_file(tmp_path / "a.png")
    os.link(tmp_path / "a.png", os.fsencode(tmp_path) + b"/\xff.png")
    with pytest.raises(DataError, match=r"1 of 2[^\n]*\n[^\n]*'\\udcff.png' cannot be an id"):
        load_passages(str(tmp_path))


def test_a_data_set_on_disk(tmp_path):
    import datasets

    rows = [text(1), text(2, title=None), text(3)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    lines = load_passages(write(tmp_path / "kb.jsonl", *rows))
    store = load_passages(str(tmp_path / "saved"))
    assert list(store) == list(lines)
    assert store.fingerprint == lines.fingerprint
    again = pickle.loads(pickle.dumps(store))  # noqa: S301 - as a DataLoader does
    assert again[2] == store[2]
    plain = datasets.Dataset.from_list([{"text": "a", "n": 1}, {"text": "b", "n": 2}])
    datasets.DatasetDict({"kb": plain}).save_to_disk(tmp_path / "dict")
    store = load_passages(str(tmp_path / "dict"), dataset_split="kb")
    assert store.ids == ["0", "1"]
    assert store[1].text == "b"
    with pytest.raises(DataError, match="cannot be read as a data set"):
        load_passages(str(tmp_path / "dict"))
    datasets.Dataset.from_list([{"body": "a"}]).save_to_disk(tmp_path / "other")
    with pytest.raises(DataError, match="no column text or chunk_path; it has body"):
        load_passages(str(tmp_path / "other"))


def test_a_table_file(tmp_path):
    file = tmp_path / "kb.csv"
    file.write_text("id,title,text\nx,T,hello\ny,,world\n")
    store = load_passages(str(file))
    assert list(store) == [Passage("x", "T", "hello", None), Passage("y", "", "world", None)]


def test_every_fault_is_named(tmp_path):
    image_file(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes((tmp_path / "good.png").read_bytes()[:40])
    path = write(
        tmp_path / "kb.jsonl",
        text(1),
        "{",
        {"id": "a"},
        text(1, title="again"),
        {"id": "b", "chunk_path": "bad.png"},
        {"id": "c", "chunk_path": "none.png", "title": 7},
        {"id": "d", "title": "half \ud800", "text": "x"},
        [1],
        {"text": "x", "id": True},
        {"id": "good", "chunk_path": "good.png"},
    )
    with pytest.raises(DataError) as caught:
        load_passages(path)
    message = str(caught.value)
    assert message.startswith(f"Knowledge base {path}: 8 of 10 documents cannot be used")
    for line, reason in (
        (2, "not valid JSON"),
        (3, "neither of text and chunk_path"),
        (4, f"repeats the id 'd1' of {path}:1"),
        (5, "bad.png "),
        (6, "title is a string, got a number (7)"),
        (6, "none.png does not exist"),
        (7, "title contains half a surrogate pair"),
        (8, "a JSON object, got a list"),
        (9, "id is a string"),
    ):
        found = [row for row in message.splitlines() if row.startswith(f"  {path}:{line}: ")]
        assert any(reason in row for row in found), (line, reason, message)
    assert ":10:" not in message
    # What another process has checked is not opened again.
    only = write(tmp_path / "one.jsonl", {"id": "b", "chunk_path": "bad.png"})
    assert load_passages(only, open_images=False).ids == ["b"]
    with pytest.raises(DataError, match="1 of 1"):
        load_passages(only)


def test_sources_that_are_none(tmp_path):
    for name, reason in (
        (str(tmp_path / "none.jsonl"), "does not exist"),
        (str(tmp_path), "holds no image"),
        (write(tmp_path / "empty.jsonl", ""), "has no passages"),
        (write(tmp_path / "kb.doc", ""), "says nothing of its form"),
        (str(tmp_path / "none.parquet"), "cannot be read as a data set"),
    ):
        with pytest.raises(DataError, match=reason):
            load_passages(name)


def test_what_changes_under_the_run_is_noticed(tmp_path):
    path = tmp_path / "kb.jsonl"
    write(path, text(1), text(2), text(3))
    store = load_passages(str(path))
    store.require_unchanged()
    assert store[1].id == "d2"  # opens the file
    # Replaced: who has it open reads on in the old one, and can find out.
    write(tmp_path / "new.jsonl", text(1), text(4), text(5), text(6))
    os.replace(tmp_path / "new.jsonl", path)
    assert store[2].id == "d3"
    with pytest.raises(DataError, match="has been written to since it was opened"):
        store.require_unchanged()
    assert load_passages(str(path)).fingerprint != store.fingerprint
    # Written in place: what is read is not what was there.
    store = load_passages(str(path))
    write(path, text(1), text(7), text(5), text(6))
    with pytest.raises(DataError, match="where document 'd4' was, there is 'd7' now"):
        store[1]
    write(path, text(1))
    with pytest.raises(DataError, match="has changed since it was opened"):
        store[3]
    store = load_passages(str(path))
    write(path, text(2))  # as long as before
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match="has been written to"):
        store.require_unchanged()
    path.unlink()
    with pytest.raises(DataError, match="is not there any more"):
        store.require_unchanged()


def test_the_fingerprint_is_of_content_and_order(tmp_path):
    rows = [text(1), text(2), text(3)]

    def of(*given, name="kb.jsonl", **options):
        return load_passages(write(tmp_path / name, *given), **options).fingerprint

    same = of(*rows)
    assert of(*rows, name="elsewhere.jsonl") == same
    assert of(*[dict(reversed(row.items())) | {"extra": 1} for row in rows]) == same
    words = {"split": "words", "length": 1}
    others = [
        of(rows[1], rows[0], rows[2]),
        of(*rows[:2]),
        of(rows[0], rows[1], text(3, text="text 4")),
        of(rows[0], rows[1], text(3, title="")),
        of(rows[0], rows[1], text(3, id="d4")),
        of(rows[0], rows[1], text(3, title="Title 3text", text="3")),
        of(rows[0], rows[1], text(3, id="d3T", title="itle 3")),
        of(*rows, **words),
        of(*rows, split="words", length=50),
    ]
    assert len({same, *others}) == 10
    # Of two words each: the pieces are the same.
    assert of(*rows, split="words", length=2) == others[-1]


def test_the_fingerprint_covers_the_bytes_of_images(tmp_path):
    for folder in ("one", "two"):
        for name in ("a.png", "b.png"):
            image_file(tmp_path / folder / name, "red" if name == "a.png" else "blue")
    one, two = (load_passages(str(tmp_path / folder)) for folder in ("one", "two"))
    assert one.fingerprint == two.fingerprint
    image_file(tmp_path / "two" / "b.png", "green")
    assert load_passages(str(tmp_path / "two")).fingerprint != one.fingerprint
    (tmp_path / "two" / "a.png").unlink()
    store = load_passages(str(tmp_path / "one"), open_images=False)
    (tmp_path / "one" / "a.png").unlink()
    with pytest.raises(DataError, match=r"a\.png cannot be read"):
        _ = store.fingerprint


def test_words_with_overlap(tmp_path):
    words = [f"w{i}" for i in range(10)]
    path = write(
        tmp_path / "kb.jsonl",
        text(1, text="  ".join(words) + " \n"),
        text(2, text=" one "),
        {"id": "d3#0", "text": "a b c d"},
    )
    store = load_passages(path, split="words", length=4, overlap=1)
    assert [passage.text for passage in store] == [
        "w0  w1  w2  w3",
        "w3  w4  w5  w6",
        "w6  w7  w8  w9",
        "one",
        "a b c d",
    ]
    assert store.ids == ["d1#0", "d1#1", "d1#2", "d2#0", "d3#0#0"]
    assert [passage.title for passage in store] == ["Title 1"] * 3 + ["Title 2", ""]
    assert [store.row_of(identity) for identity in store.ids] == list(range(5))
    assert store.num_documents == 3
    assert list(store.rows_of("d1")) == [0, 1, 2]
    assert list(store.rows_of("d1#1")) == [1]
    assert list(store.rows_of("d3#0")) == [4]
    for nothing in ("d1#3", "d1#01", "d1#x", "d1#", "d1#-1", "d4", "", "#0"):
        assert list(store.rows_of(nothing)) == []
    assert store.lengths.tolist() == [len(p.title) + len(p.text) for p in store]
    whole = load_passages(path)
    assert list(whole.rows_of("d1#0")) == []
    assert list(whole.rows_of("d3#0")) == [2]


def test_images_are_never_cut(tmp_path):
    image_file(tmp_path / "a.png")
    row = {"id": "a", "chunk_path": "a.png"}
    path = write(tmp_path / "kb.jsonl", text(1, text="x y z"), row)
    store = load_passages(path, split="words", length=2)
    assert store.ids == ["d1#0", "d1#1", "a#0"]
    assert store[2] == Passage("a#0", "", None, tmp_path / "a.png")


def test_tokens_are_counted_as_the_encoder_counts_them(tmp_path):
    tokenizer = wordpiece_tokenizer()
    words = ["the", "quick", "unbelievable", "fox", "jumps,", "over", "dogs.", "import"]
    rng = np.random.default_rng(0)
    rows = [text(i, text=" ".join(rng.choice(words, 60))) for i in range(4)]
    path = write(tmp_path / "kb.jsonl", *rows)
    store = load_passages(path, split="tokens", length=20, overlap=6, tokenizer=tokenizer)
    counts = [len(tokenizer(p.text, add_special_tokens=False)["input_ids"]) for p in store]
    assert max(counts) <= 20
    # No more is left empty than a word takes ("unbelievable" is many pieces here), but at ends.
    last = {store.rows_of(row["id"])[-1] for row in rows}
    longest = max(len(tokenizer(w, add_special_tokens=False)["input_ids"]) for w in words)
    assert min(counts[i] for i in range(len(store)) if i not in last) > 20 - longest
    for row in rows:
        pieces = [store[i].text.split() for i in store.rows_of(row["id"])]
        assert sum(map(len, pieces)) > 60  # they overlap
        whole = pieces[0]
        for piece in pieces[1:]:
            shared = next(
                n
                for n in range(min(len(piece), len(whole)), -1, -1)
                if whole[-n:] == piece[:n] or n == 0
            )
            whole = whole + piece[shared:]
        assert set(whole) == set(row["text"].split())


TOKENIZERS = {"words": None, "wordpiece": wordpiece_tokenizer(), "bytes": byte_tokenizer()}


@settings(max_examples=120, deadline=None)
@given(
    body=st.text("ab é漢\n,.-", min_size=1, max_size=80).filter(str.strip),
    length=st.integers(1, 12),
    overlap=st.integers(0, 11),
    units=st.sampled_from(list(TOKENIZERS)),
)
def test_nothing_is_lost_and_nothing_is_too_long(body, length, overlap, units):
    tokenizer = TOKENIZERS[units]
    kind = "words" if tokenizer is None else "tokens"
    (spans,) = Splitter(kind, length, min(overlap, length - 1), tokenizer).spans([body])
    covered = np.zeros(len(body), bool)
    for start, end in spans:
        assert 0 <= start < end <= len(body)
        assert body[start:end] == body[start:end].strip()
        covered[start:end] = True
    assert all(covered[i] or body[i].isspace() for i in range(len(body)))
    if tokenizer is None:
        assert all(len(body[start:end].split()) <= length for start, end in spans)
        assert len({start for start, _ in spans}) == len(spans)
        return
    tokens = tokenizer(body, add_special_tokens=False, return_offsets_mapping=True)
    offsets = [(s, e) for s, e in tokens["offset_mapping"] if body[s:e].strip()]
    for start, end in spans:
        # The bytes of a character begin at one place, and may lie on both sides of a cut.
        assert len({s for s, e in offsets if start <= s and e <= end}) <= length


def test_spaces_around_passages_belong_to_none():
    splitter = Splitter("tokens", 2, 0, TOKENIZERS["bytes"])
    body = "  the quick  brown \n\n\n"
    (spans,) = splitter.spans([body])
    assert " ".join(body[start:end] for start, end in spans).split() == body.split()
    assert all(body[start:end].strip() == body[start:end] != "" for start, end in spans)


def test_scripts_without_spaces_are_cut_by_tokens(tmp_path):
    tokenizer = TOKENIZERS["bytes"]
    body = "漢字仮名交じり文" * 5  # three byte tokens a character
    path = write(tmp_path / "kb.jsonl", {"id": "j", "text": body})
    store = load_passages(path, split="tokens", length=10, tokenizer=tokenizer)
    assert "".join(passage.text for passage in store) == body
    counts = [len(tokenizer(p.text, add_special_tokens=False)["input_ids"]) for p in store]
    assert max(counts) <= 10
    assert len(store) == -(-len(body) // 3)


def test_tokens_without_a_place_in_the_text_are_no_units():
    class Prefixing:
        """As tokenizers do that put a space before every text."""

        is_fast = True

        def __call__(self, texts, **options):
            return {"offset_mapping": [[(0, 0), (0, 1), (2, 3), (3, 3), (4, 5)] for _ in texts]}

    splitter = Splitter("tokens", 2, 0, Prefixing())
    assert splitter.spans(["a b c"]) == [[(0, 3), (4, 5)]]


def test_wrong_settings_are_refused(tmp_path):
    path = write(tmp_path / "kb.jsonl", text(1))
    for options, reason in (
        ({"split": "lines"}, "split: got 'lines'"),
        ({"split": "words"}, "length: got None"),
        ({"split": "words", "length": 0}, "length: got 0"),
        ({"split": "words", "length": 3, "overlap": 3}, "overlap: got 3"),
        ({"split": "words", "length": 3, "overlap": -1}, "overlap: got -1"),
        ({"split": "tokens", "length": 3}, "needs a tokenizer"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load_passages(path, **options)

    class Slow:
        is_fast, name_or_path = False, "old/tokenizer"

    with pytest.raises(ModelError, match="old/tokenizer has no fast version"):
        load_passages(path, split="tokens", length=3, tokenizer=Slow())
    blank = write(tmp_path / "blank.jsonl", text(1), {"id": "b", "text": "\u200b\u200d"})
    with pytest.raises(DataError, match=r"blank\.jsonl:2: text yields no token"):
        load_passages(blank, split="tokens", length=3, tokenizer=TOKENIZERS["wordpiece"])


def test_threads_and_workers_read_at_once(tmp_path):
    rows = [text(i, text=f"{i} " * (i % 50 + 1)) for i in range(300)]
    store = load_passages(write(tmp_path / "kb.jsonl", *rows))
    assert store[5].id == "d5"  # opens the file
    copies = [pickle.loads(pickle.dumps(store)) for _ in range(2)]  # noqa: S301 - as a DataLoader
    del store  # and closes it

    def read(part: int) -> list[tuple[str, str | None]]:
        return [(p.id, p.text) for p in (copies[part % 2][row] for row in range(part, 300, 6))]

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(read, range(6)))
    for part, passages in enumerate(found):
        assert passages == [(row["id"], row["text"]) for row in rows[part::6]]


def test_texts_are_not_kept(tmp_path):
    rows = [text(i, text="x" * 2000) for i in range(2000)]
    path = write(tmp_path / "kb.jsonl", *rows)
    del rows
    tracemalloc.start()
    store = load_passages(path)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(store) == 2000
    assert kept < 2000 * 100 + 50_000  # of 4 MB of text
    assert peak < 4_000_000


def test_id_table():
    names = ["b", "a", "", "é漢", "a", "b", "x" * 300, "a"]
    table = IdTable(names)
    assert list(table) == names
    assert [table.find(name) for name in names] == [0, 1, 2, 3, 1, 0, 6, 1]
    assert table.find("c") is None
    assert table.find("half \ud800") is None
    assert table.repeated() == [(4, 1), (5, 0), (7, 1)]
    assert len(IdTable([])) == 0
    assert IdTable([]).find("a") is None
    with pytest.raises(IndexError):
        table[-1]


def test_id_table_tells_equal_hashes_apart(monkeypatch):
    monkeypatch.setattr("pixelrag.data.id_table._hash", lambda encoded: len(encoded) % 2)
    names = [f"{'y' * (i % 5)}{i}" for i in range(50)] + ["y1"]
    table = IdTable(names)
    assert [table.find(name) for name in names] == [*range(50), 1]
    assert IdTable([*names, "0"]).repeated() == [(50, 1), (51, 0)]
    assert table.find("y2") is None
