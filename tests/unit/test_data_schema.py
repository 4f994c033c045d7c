"""One line of a data file: what is taken, what is refused, and that all faults are named."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixelrag.data.schema import (
    Document,
    RowError,
    decode_line,
    parse_corpus_entry,
    parse_row,
)

FILE = Path("/data/set/train.jsonl")


def parse(row: object):
    return parse_row(row, FILE, 12)


def faults(row: object) -> list[str]:
    with pytest.raises(RowError) as caught:
        parse(row)
    assert str(caught.value).startswith("/data/set/train.jsonl:12: ")
    return caught.value.reasons


def test_image_row_of_pixelrag_with_all_its_extra_keys():
    row = parse(
        {
            "query": "a query",
            "chunk_path": "tiles/../tiles/7.png",
            "neg_chunk_paths": ["tiles/9.png", "/elsewhere/8.png"],
            "source_dataset": "miniv8",
            "retrieve_top20": [{"rank": 1, "path": "x", "score": 0.5, "article_id": 3}],
            "positive_score": 0.9,
        }
    )
    assert row.query == "a query"
    assert row.sample_id == "train.jsonl:12"
    assert row.positive.image == Path("/data/set/tiles/7.png")
    assert row.positive.text is None
    paths = [negative.image for negative in row.negatives]
    assert paths == [Path("/data/set/tiles/9.png"), Path("/elsewhere/8.png")]


def test_text_row_keeps_its_text_as_it_is():
    row = parse({"query": " q ", "passage": "  p\n", "neg_passages": ["n1", "n2", "n3"]})
    assert (row.query, row.positive.text) == (" q ", "  p\n")
    assert [negative.text for negative in row.negatives] == ["n1", "n2", "n3"]
    assert all(negative.image is None for negative in row.negatives)


@pytest.mark.parametrize("none", [{}, {"neg_passages": None}, {"neg_passages": []}])
def test_absent_null_and_empty_negatives_are_none(none):
    row = parse({"query": "q", "passage": "p", "chunk_path": None, "neg_chunk_paths": []} | none)
    assert row.negatives == ()


def test_a_negative_named_twice_counts_once():
    row = parse({"query": "q", "passage": "p", "neg_passages": ["b", "a", "b"]})
    assert [negative.text for negative in row.negatives] == ["b", "a"]


def test_several_positives_of_either_kind_keep_their_order_and_count_once():
    row = parse(
        {
            "query": "q",
            "chunk_path": "7.png",
            "pos_passages": ["b", "a", "b"],
            "pos_chunk_paths": ["7.png", "8.png"],
            "neg_chunk_paths": ["9.png"],
        }
    )
    named = [document.text or document.image.name for document in row.positives]
    assert named == ["7.png", "b", "a", "8.png"]
    assert row.positive is row.positives[0]
    assert row.documents == row.positives + row.negatives


def test_no_positive_may_stand_among_the_negatives():
    row = {"query": "q", "passage": "a", "pos_passages": ["b"], "neg_passages": ["b"]}
    assert faults(row) == ["names its positive document among its negatives"]
    row |= {"pos_passages": "b"}
    assert faults(row) == ['pos_passages is a list of strings, got a string ("b")']


def swift(positives: list, negatives: list | None = None, **more) -> dict:
    """A row of ms-swift's form; a document is a text, or a path in a list."""

    def side(name: str, documents: list) -> dict:
        images = [document if isinstance(document, list) else [] for document in documents]
        texts = [
            "<image>" if image else text for image, text in zip(images, documents, strict=True)
        ]
        messages = [
            [{"role": "system", "content": "s"}, {"role": "user", "content": text}]
            for text in texts
        ]
        return {f"{name}_messages": messages, f"{name}_images": images}

    query = [{"role": "system", "content": "s"}, {"role": "user", "content": "a query"}]
    row = {"messages": query} | side("positive", positives)
    return row | (side("negative", negatives) if negatives else {}) | more


def test_rows_of_ms_swift_are_the_same_rows():
    ours = {
        "query": "a query",
        "chunk_path": "7.png",
        "pos_chunk_paths": ["8.png"],
        "pos_passages": ["t"],
        "neg_chunk_paths": ["9.png", "/x/1.png"],
    }
    assert parse(swift([["7.png"], ["8.png"], "t"], [["9.png"], ["/x/1.png"]])) == parse(ours)
    assert parse(swift(["p"], ["n"])) == parse(
        {"query": "a query", "passage": "p", "neg_passages": ["n"]}
    )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (swift([["7.png"]], images=["q.png"]), "images belongs to the query"),
        (swift([["7.png", "8.png"]]), "1 times <image> in 7 characters and 2 images"),
        (swift([["7.png"]], positive_images=[["7.png"], ["8.png"]]), "1 positive_messages and 2"),
        (swift(["a <image> b"]), "positive_messages[0] has 1 times <image>"),
        (swift([]), "positive_messages names no document"),
        (swift(["p"], messages="q"), "messages is a list of messages"),
        (swift(["p"], messages=[{"role": "user"}]), "messages has one message of the user"),
        (swift(["p"], messages=[{"role": "assistant", "content": "a"}]), "one message of the user"),
        (swift(["p"], negative_messages=["n"]), "negative_messages[0] is a list of messages"),
    ],
)
def test_what_ms_swift_can_say_and_pixelrag_cannot_is_named(row, words):
    assert words in faults(row)[0]


def test_negatives_out_of_what_was_retrieved_leave_out_the_positives_article():
    hits = [
        {"rank": 1, "path": "x/A_chunk_2.png", "score": 0.9, "article_id": 3},
        {"rank": 2, "path": "x/A_chunk_1.png", "score": 0.8, "article_id": 3},
        {"rank": 3, "path": "x/other.png", "score": 0.7, "article_id": 3},
        {"rank": 4, "path": "x/B_chunk_1.png", "score": 0.6, "article_id": 4},
        {"rank": 5, "path": "x/C_chunk_1.png", "score": 0.5},
        {"rank": 6, "path": "x/B_chunk_1.png", "score": 0.4, "article_id": 4},
    ]
    row = {"query": "q", "chunk_path": "x/A_chunk_1.png", "retrieve_top20": hits}

    def negatives(row: dict) -> list[str]:
        parsed = parse_row(row, FILE, 12, retrieved=True)
        return [document.image.name for document in parsed.negatives]

    assert negatives(row) == ["B_chunk_1.png", "C_chunk_1.png"]
    assert negatives(row | {"neg_chunk_paths": ["n.png"]}) == ["n.png"]
    assert negatives({"query": "q", "chunk_path": "x.png"}) == []
    assert parse(row).negatives == ()
    with pytest.raises(RowError, match="retrieve_top20 is a list of hits"):
        parse_row(row | {"retrieve_top20": ["x.png"]}, FILE, 12, retrieved=True)


def test_key_is_one_a_document_and_tells_text_from_path():
    assert Document.of_text("a").key == Document.of_text("a").key
    assert Document.of_image("/d/a/../x.png").key == Document.of_image("/d/x.png").key
    keys = [Document.of_text("/d/x.png"), Document.of_image("/d/x.png"), Document.of_text("a ")]
    assert len({document.key for document in keys}) == 3


@pytest.mark.parametrize(("text", "image"), [(None, None), ("t", Path("i"))])
def test_a_document_is_one_of_text_and_image(text, image):
    with pytest.raises(ValueError, match="exactly one"):
        Document(text=text, image=image, key="k")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "a row is a JSON object, got a list ([1])"),
        (None, "a row is a JSON object, got null"),
        ({"passage": "p"}, "query is missing"),
        ({"query": None, "passage": "p"}, "query is missing"),
        ({"query": " \t\n", "passage": "p"}, "query is empty"),
        ({"query": 7, "passage": "p"}, "query is a string, got a number (7)"),
        ({"query": True, "passage": "p"}, "query is a string, got a boolean (true)"),
        ({"query": "q", "passage": ""}, "passage is empty"),
        ({"query": "q", "chunk_path": " "}, "chunk_path is empty"),
        ({"query": "q", "chunk_path": ["a"]}, 'chunk_path is a string, got a list (["a"])'),
        ({"query": "q"}, 'has neither passage nor chunk_path; it has "query"'),
        ({"query": "q", "passage": "p", "chunk_path": "c"}, "has both passage and chunk_path"),
        ({"query": "q", "passage": "p", "neg_passages": "n"}, "neg_passages is a list of strings"),
        ({"query": "q", "passage": "p", "neg_passages": ["n", 1]}, "neg_passages[1] is a string"),
        ({"query": "q", "passage": "p", "neg_passages": ["n", ""]}, "neg_passages[1] is empty"),
        ({"query": "q", "passage": "p", "neg_passages": ["p"]}, "its positive document among"),
        (
            {"query": "q", "chunk_path": "a.png", "neg_chunk_paths": ["./x/../a.png"]},
            "its positive document among",
        ),
        (
            {"query": "q", "passage": "p", "neg_chunk_paths": ["n.png"]},
            "has neg_chunk_paths without chunk_path",
        ),
        ({"query": "a\x00b", "passage": "p"}, "query contains a NUL at character 2"),
        ({"query": "q", "passage": "x\ud800"}, "passage contains half a surrogate pair '\\ud800'"),
        ({"query": "q", "chunk_path": "a\x00"}, "chunk_path contains a NUL at character 2"),
    ],
)
def test_one_fault(row, reason):
    (found,) = faults(row)
    assert reason in found


def test_all_faults_of_a_row_are_named_at_once_with_the_images_left_to_check():
    row = {"query": "", "chunk_path": "a.png", "neg_chunk_paths": [3, "b.png", "a.png"]}
    with pytest.raises(RowError) as caught:
        parse(row)
    reasons = caught.value.reasons
    for words, reason in zip(("query", "[0]", "positive"), reasons, strict=True):
        assert words in reason
    assert set(caught.value.images) == {Path("/data/set/a.png"), Path("/data/set/b.png")}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{", "not valid JSON: "),
        (b'{"query": "q"} x', "not valid JSON: Extra data at column 16"),
        (b"{'query': 1}", "not valid JSON: "),
        (b'{"query": "\xff"}', "not UTF-8: byte 0xff at byte 12"),
        ('{"query": "q"}'.encode("utf-16"), "looks like UTF-16"),
        (b'\xef\xbb\xbf{"query": "q"}', "BOM"),
        (b'{"a": 1, "b": 2, "a": 3}', 'names the key "a" more than once'),
        (b'{"a": {"x": 1, "x": 2}}', 'names the key "x" more than once'),
        (b"[" * 100_000, "not valid JSON: "),
        (b"1" * 10_000, "not valid JSON: "),
    ],
)
def test_lines_that_do_not_decode(raw, reason):
    with pytest.raises(RowError) as caught:
        decode_line(raw, FILE, 3)
    assert reason in caught.value.reasons[0]
    assert str(caught.value).startswith("/data/set/train.jsonl:3: ")


def test_corpus_entries():
    assert parse_corpus_entry({"id": "a", "text": "t"}, FILE, 1) == ("a", Document.of_text("t"))
    image = Document.of_image("/data/set/i.png")
    assert parse_corpus_entry({"id": 7, "chunk_path": "i.png"}, FILE, 1) == ("7", image)
    for entry, reason in [
        ({"text": "t"}, "id is missing"),
        ({"id": True, "text": "t"}, "id is a string"),
        ({"id": "a"}, "has neither of text and chunk_path"),
        ({"id": "a", "text": "t", "chunk_path": "c"}, "has both of text and chunk_path"),
        ({"id": "a", "text": " "}, "text is empty"),
        ("a", "an entry is a JSON object"),
    ]:
        with pytest.raises(RowError, match=reason):
            parse_corpus_entry(entry, FILE, 1)


# Any JSON value whatever, with the keys that matter made likely.
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["query", "passage", "chunk_path", "neg_passages", "neg_chunk_paths", "x"]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)


@given(_json)
def test_any_json_is_a_row_or_a_row_error(value):
    raw = json.dumps(value).encode()
    row, reasons = None, []
    try:
        row = parse_row(decode_line(raw, FILE, 1), FILE, 1)
    except RowError as error:
        reasons = error.reasons
        str(error).encode()  # printable whatever the row held
    assert (row is None) == bool(reasons)
    if row is not None:
        assert row.query.strip()
        assert row.positive.key not in {negative.key for negative in row.negatives}


@given(st.binary(max_size=60))
def test_any_bytes_decode_or_raise_a_row_error(raw):
    try:
        expected = json.loads(raw.decode())
    except ValueError:
        with pytest.raises(RowError):
            decode_line(raw, FILE, 1)
    else:
        assert repr(decode_line(raw, FILE, 1)) == repr(expected)  # repr: NaN is not itself


@pytest.mark.parametrize(
    ("key", "meant"),
    [("neg_pasages", "neg_passages"), ("neg_chunk_path", "neg_chunk_paths"), ("Query", None)],
)
def test_a_misspelt_key_is_a_fault_and_other_keys_are_not(key, meant):
    row = {"query": "a", "passage": "b", key: ["c"], "source": "x", "score": 1}
    if meant is None:
        assert parse(row).query == "a"
    else:
        assert faults(row) == [f'has a key "{key}"; did you mean {meant}?']
