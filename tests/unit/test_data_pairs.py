"""Data files as a whole: every fault of every row reported, datasets, corpora."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from pixelrag.data import pairs
from pixelrag.data.lines import BadRow, file_labels
from pixelrag.data.pairs import DataReport, PairDataset, check_files, corpus_of, load_corpus
from pixelrag.errors import ConfigError, DataError


def write(path: Path, *rows: object, end: str = "\n") -> str:
    """A JSONL file of rows; a string is written as the line itself."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + end for line in lines).encode())
    return str(path)


def text(number: int, *negatives: str) -> dict:
    return {"query": f"q{number}", "passage": f"p{number}", "neg_passages": list(negatives)}


def image_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), "red").save(path)
    return path


def test_both_kinds_of_rows_mix_in_one_file_and_negatives_are_ragged(tmp_path):
    for name in ("a.png", "b.png", "c.png"):
        image_file(tmp_path / "set" / "tiles" / name)
    elsewhere = image_file(tmp_path / "elsewhere.png")
    file = write(
        tmp_path / "set" / "train.jsonl",
        text(1, "n1", "n2"),
        {
            "query": "q2",
            "chunk_path": "tiles/a.png",
            "neg_chunk_paths": ["tiles/b.png", str(elsewhere), "../set/tiles/c.png"],
        },
        text(3),
    )
    with pytest.raises(DataError, match=rf"{elsewhere} lies outside .*data\.image_roots"):
        PairDataset([file])
    dataset = PairDataset([file], image_roots=[str(tmp_path)])
    assert len(dataset) == 3
    assert [len(row.negatives) for row in dataset] == [2, 3, 0]
    assert dataset[1].positive.image == tmp_path / "set" / "tiles" / "a.png"
    assert dataset[1].negatives[1].image == elsewhere
    assert [row.sample_id for row in dataset] == [f"train.jsonl:{i}" for i in (1, 2, 3)]
    assert dataset.report.num_rows == 3
    assert dataset.report.num_documents == 8
    assert dataset.report.bad == []


def test_bom_crlf_blank_lines_and_no_last_line_end_are_fine(tmp_path):
    path = tmp_path / "train.jsonl"
    body = "\r\n".join([json.dumps(text(1)), "", "  \t", json.dumps(text(2), ensure_ascii=False)])
    path.write_bytes(b"\xef\xbb\xbf" + body.encode())
    assert [row.sample_id for row in PairDataset(path)] == ["train.jsonl:1", "train.jsonl:4"]


def test_line_separators_of_unicode_do_not_end_a_line(tmp_path):
    passage = "one\u2028two\x85three\x0bfour"
    row = json.dumps({"query": "q", "passage": passage}, ensure_ascii=False).replace(
        "\x0b", "\\u000b"
    )
    dataset = PairDataset(write(tmp_path / "t.jsonl", row))
    assert dataset[0].positive.text == passage


def every_fault(folder: Path) -> tuple[str, list[tuple[int, str]]]:
    """A file with good rows and one row of each fault; and what is to be said of it."""
    image_file(folder / "good.png")
    whole = (folder / "good.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) - 30])
    (folder / "empty.png").write_bytes(b"")
    good = {"query": "q", "chunk_path": "good.png"}
    file = write(
        folder / "bad.jsonl",
        good,  # 1
        "{",
        "[]",
        {"query": " ", "passage": 3},
        {"query": "q", "chunk_path": "absent.png"},
        "",  # 6
        {"query": "", "chunk_path": "cut.png", "neg_chunk_paths": ["empty.png", "good.png"]},
        {"query": "q", "chunk_path": "good.png", "neg_chunk_paths": ["good.png"]},
        '{"query": "q", "query": "r", "passage": "p"}',
        good,  # 10
    )
    return file, [
        (2, "not valid JSON"),
        (3, "a row is a JSON object, got a list ([])"),
        (4, "query is empty"),
        (4, "passage is a string, got a number (3)"),
        (5, f"image {folder}/absent.png does not exist"),
        (7, "query is empty"),
        (7, f"image {folder}/cut.png cannot be decoded: "),
        (7, f"image {folder}/empty.png is empty (0 bytes)"),
        (8, "names its positive document among its negatives"),
        (9, 'names the key "query" more than once'),
    ]


def test_every_fault_of_every_row_is_reported_with_its_line(tmp_path):
    file, expected = every_fault(tmp_path)
    report = check_files(file)
    assert [(fault.file, fault.line) for fault in report.bad] == [(file, n) for n, _ in expected]
    for fault, (_, reason) in zip(report.bad, expected, strict=True):
        assert reason in fault.reason
        assert str(fault) == f"{file}:{fault.line}: {fault.reason}"
    assert (report.num_rows, report.num_bad_rows, report.num_documents) == (9, 7, 1)


def test_bad_rows_error_names_them_the_count_and_both_ways_out(tmp_path):
    file, expected = every_fault(tmp_path)
    with pytest.raises(DataError) as caught:
        PairDataset(file)
    message = str(caught.value)
    assert message.startswith("7 of 9 rows cannot be used:\n")
    assert all(f"\n  {file}:{line}: " in message for line, _ in expected)
    assert "`pixelrag validate`" in message
    assert "`data.bad_rows: skip`" in message


def test_bad_rows_error_lists_twenty_at_most(tmp_path):
    rows = [{"query": "", "passage": "p"}] * 30 + [text(1)]
    with pytest.raises(DataError) as caught:
        PairDataset(write(tmp_path / "t.jsonl", *rows))
    message = str(caught.value)
    assert message.startswith("30 of 31 rows cannot be used (20 of 30 faults shown):")
    assert message.count("query is empty") == 20


def test_bad_rows_skip_keeps_the_good_ones_and_says_how_many_were_not(tmp_path, caplog):
    file, _ = every_fault(tmp_path)
    with caplog.at_level(logging.WARNING, "pixelrag"):
        dataset = PairDataset(file, "skip")
    assert [row.sample_id for row in dataset] == ["bad.jsonl:1", "bad.jsonl:10"]
    assert "7 of 9 rows cannot be used" in caplog.text


def test_nothing_is_said_about_good_data(tmp_path, caplog):
    PairDataset(write(tmp_path / "t.jsonl", text(1)), "skip")
    assert caplog.text == ""


@pytest.mark.parametrize("bad_rows", ["error", "skip"])
def test_no_usable_row_is_an_error_in_either_mode(tmp_path, bad_rows):
    file = write(tmp_path / "t.jsonl", "{", "[]")
    with pytest.raises(DataError, match=r"No row is left: 2 of 2 rows cannot be used"):
        PairDataset(file, bad_rows)


def test_faults_of_files_are_named_all_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = write(tmp_path / "good.jsonl", text(1))
    write(tmp_path / "blank.jsonl", "", " ")
    (tmp_path / "void.jsonl").touch()
    (tmp_path / "folder").mkdir()
    files = [good, "absent.jsonl", "folder", "blank.jsonl", "void.jsonl", good]
    for use in (check_files, PairDataset):
        with pytest.raises(DataError) as caught:
            use(files)
        message = str(caught.value)
        assert f"absent.jsonl does not exist (looked for in {tmp_path})" in message
        assert "folder is a folder; name the JSONL file in it" in message
        assert "blank.jsonl has no rows" in message
        assert "void.jsonl has no rows" in message
        assert f"{good} is named twice" in message
    with pytest.raises(DataError, match="no file is named"):
        PairDataset([])


def test_unreadable_file(tmp_path, monkeypatch):
    file = tmp_path / "t.jsonl"
    write(file, text(1))

    def refuse(self, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"t\.jsonl cannot be read: Permission denied"):
        PairDataset(file)


def test_each_image_is_decoded_once_however_often_it_is_named(tmp_path, monkeypatch):
    for name in "abc":
        image_file(tmp_path / f"{name}.png")
    rows = [
        {"query": "q", "chunk_path": f"{p}.png", "neg_chunk_paths": [f"{n}.png", f"./{n}.png"]}
        for p, n in ("ab", "bc", "ca", "cb")
    ]
    asked = []
    monkeypatch.setattr(pairs, "check_images", lambda paths, *_, **__: asked.append(paths) or {})
    dataset = PairDataset(write(tmp_path / "t.jsonl", *rows))
    assert asked == [[tmp_path / f"{name}.png" for name in "abc"]]
    assert dataset[0].negatives[0] is dataset[1].positive


def test_cap_keeps_the_first_negatives_and_opens_no_others(tmp_path):
    image_file(tmp_path / "a.png")
    image_file(tmp_path / "b.png")
    row = {"query": "q", "chunk_path": "a.png", "neg_chunk_paths": ["b.png", "absent.png"]}
    file = write(tmp_path / "t.jsonl", row, text(2, "x", "y", "z"))
    assert [len(row.negatives) for row in PairDataset(file, num_hard_negatives=1)] == [1, 1]
    assert [len(row.negatives) for row in PairDataset(file, num_hard_negatives=0)] == [0, 0]
    assert PairDataset(file, num_hard_negatives=1)[0].negatives[0].image == tmp_path / "b.png"
    assert check_files(file, num_hard_negatives=1).bad == []
    with pytest.raises(DataError, match=r"absent\.png does not exist"):
        PairDataset(file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bad_rows": "ignore"}, "data.bad_rows: got 'ignore', expected 'error' or 'skip'"),
        ({"num_hard_negatives": -1}, "data.num_hard_negatives: got -1, expected 0 or more"),
    ],
)
def test_arguments_out_of_range(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        PairDataset(write(tmp_path / "t.jsonl", text(1)), **arguments)


def test_files_of_one_name_are_told_apart_in_sample_ids(tmp_path):
    files = [write(tmp_path / name / "train.jsonl", text(1)) for name in ("a", "b")]
    assert [row.sample_id for row in PairDataset(files)] == ["a/train.jsonl:1", "b/train.jsonl:1"]
    assert file_labels(["x/1.jsonl", "y/2.jsonl"]) == ["1.jsonl", "2.jsonl"]
    assert file_labels(["t.jsonl", "a/t.jsonl"]) == ["t.jsonl", "a/t.jsonl"]
    assert file_labels(["a/b/t", "c/b/t"]) == ["a/b/t", "c/b/t"]


def test_another_ranks_report_spares_opening_the_images(tmp_path, monkeypatch):
    file, _ = every_fault(tmp_path)
    report = DataReport.from_json(check_files(file).to_json())
    assert report == check_files(file)
    assert isinstance(report.bad[0], BadRow)

    def refuse(*_):
        raise AssertionError("an image was opened")

    monkeypatch.setattr(pairs, "check_images", refuse)
    dataset = PairDataset(file, "skip", report=report)
    assert [row.sample_id for row in dataset] == ["bad.jsonl:1", "bad.jsonl:10"]
    with pytest.raises(DataError, match="7 of 9 rows"):
        PairDataset(file, report=report)


def test_a_report_of_other_data_is_refused(tmp_path):
    first, second = text(1), text(2)
    a = write(tmp_path / "a.jsonl", first)
    b = write(tmp_path / "b.jsonl", second)
    report = check_files([a, b])
    assert PairDataset([a, b], report=report).report is report
    write(tmp_path / "a.jsonl", first, second)
    Path(b).write_text(json.dumps(text(3)) + "\n")
    with pytest.raises(DataError, match="not the data that was checked"):
        PairDataset([a, b], report=report)


def test_fingerprint_is_of_the_content_and_its_order(tmp_path):
    a, b = write(tmp_path / "a.jsonl", text(1)), write(tmp_path / "b.jsonl", text(2))
    copy = write(tmp_path / "copy" / "c.jsonl", text(1))
    both = write(tmp_path / "both.jsonl", text(1), text(2))
    prints = [check_files(files).fingerprint for files in ([a, b], [copy, b], [b, a], a, both)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


def test_corpus_of_a_dataset_is_its_distinct_documents_in_order(tmp_path):
    file = write(tmp_path / "t.jsonl", text(1, "p2", "n"), text(2, "n"), text(3))
    assert [document.text for document in corpus_of(PairDataset(file))] == ["p1", "p2", "n", "p3"]


def test_corpus_file_matches_the_keys_of_the_rows(tmp_path, caplog):
    image_file(tmp_path / "tiles" / "a.png")
    rows = write(tmp_path / "t.jsonl", text(1), {"query": "q", "chunk_path": "tiles/a.png"})
    file = write(
        tmp_path / "tiles" / "corpus.jsonl",
        {"id": "x", "text": "p1", "title": "ignored"},
        "",
        {"id": 2, "chunk_path": "a.png"},
        {"id": "y", "text": "other"},
        {"id": "z", "text": "p1"},
    )
    with caplog.at_level(logging.INFO, "pixelrag"):
        corpus = load_corpus(file)
    assert {name: d.text for name, d in corpus.items()} == {"x": "p1", "2": None, "y": "other"}
    keys = {document.key for document in corpus.values()}
    assert all(row.positive.key in keys for row in PairDataset(rows))
    assert "1 entries repeat a document" in caplog.text


def test_corpus_faults_are_named_all_at_once(tmp_path):
    file = write(
        tmp_path / "corpus.jsonl",
        {"id": "a", "chunk_path": "absent.png"},
        {"id": "b", "text": ""},
        {"id": "b", "text": "fine"},
        {"id": "b", "text": "again"},
        {"chunk_path": "absent2.png"},
    )
    with pytest.raises(DataError) as caught:
        load_corpus(file)
    message = str(caught.value)
    assert "4 of 5 entries cannot be used" in message
    for line, reason in [
        (1, f"image {tmp_path}/absent.png does not exist"),
        (2, "text is empty"),
        (4, "repeats the id 'b' of line 3"),
        (5, "id is missing"),
        (5, f"image {tmp_path}/absent2.png does not exist"),
    ]:
        assert f"{file}:{line}: {reason}" in message
    for broken, words in [(tmp_path, "is a folder"), (tmp_path / "no", "does not exist")]:
        with pytest.raises(DataError, match=words):
            load_corpus(broken)
    with pytest.raises(DataError, match="has no entries"):
        load_corpus(write(tmp_path / "void.jsonl"))


def test_data_modules_import_no_torch():
    code = (
        "import sys, pixelrag.data.pairs, pixelrag.data.sampler; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
