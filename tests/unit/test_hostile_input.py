"""What a file may hold that nobody meant: each reader gives a right result, or names file and line.

Rows of one table: how a good file is made hostile, and what becomes of it, for every reader.
"""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pixelrag.config.base import load
from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.ds_file import DeepSpeedFileError, read_deepspeed_file
from pixelrag.config.yaml_file import read_yaml
from pixelrag.data.chat import parse_text_row
from pixelrag.data.lines import parsed_lines
from pixelrag.data.pairs import PairDataset, load_corpus
from pixelrag.data.passages import load_passages
from pixelrag.data.questions import QuestionDataset
from pixelrag.data.schema import RowError
from pixelrag.data.tile_questions import load_tile_set
from pixelrag.engine.ds_config import read_ds_config, resolve
from pixelrag.errors import ConfigError, DataError, PixelragError
from pixelrag.evaluate.runs import read_qrels, read_run
from pixelrag.models.answer_cache import Manifest as CacheManifest
from pixelrag.models.answer_cache import _digest_of
from pixelrag.provenance.artifact import read_artifact
from pixelrag.retrieval.generation import Manifest
from pixelrag.train.atomic import read_manifest

BOM, CRLF = b"\xef\xbb\xbf", b"\r\n"
PAIR = {"query": "q", "passage": "p", "neg_passages": ["n"]}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def chats(path: Path) -> list[Any]:
    rows = list(parsed_lines(path, lambda obj, file, line: parse_text_row(obj, f"{file}:{line}")))
    for _, row in rows:
        if isinstance(row, RowError):
            raise row
    return [row for _, row in rows]


LINES: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "pairs": (lambda path: list(PairDataset(path)), PAIR, "query"),
    "corpus": (load_corpus, {"id": "1", "text": "t"}, "text"),
    "passages": (
        lambda path: [p.text for p in map(load_passages(str(path)).__getitem__, range(1))],
        {"id": "1", "text": "t", "title": "T"},
        "text",
    ),
    "questions": (
        lambda path: list(QuestionDataset(path)),
        {"question": "q", "answer": "a"},
        "answer",
    ),
    "chats": (chats, CHAT, "messages"),
    "texts": (chats, {"text": "t"}, "text"),
}
"""A reader of JSON lines, a good row of it, and a key whose value it needs."""


@pytest.fixture(params=LINES)
def reader(request, tmp_path):
    """Reads bytes written to a file of that kind; with a good row and the key that it needs."""
    read, row, key = LINES[request.param]
    path = tmp_path / "data.jsonl"

    def run(content: bytes) -> Any:
        path.write_bytes(content)
        return read(path)

    return run, row, key


def line(row: Any) -> bytes:
    return json.dumps(row).encode()


@pytest.mark.parametrize(
    "form",
    [
        lambda good: good,
        lambda good: good + b"\n",
        lambda good: BOM + good + CRLF,
        lambda good: good + CRLF + CRLF,
        lambda good: b" \t" + good + b" \n\n",
        lambda good: good[:-1] + b', "positive_score": NaN, "other": 1e999}',
        lambda good: good[:-1] + b', "more": ' + b"9" * 4000 + b"}",
        lambda good: good[:-1] + b', "deep": ' + b"[" * 98 + b"]" * 98 + b"}",
        lambda good: good[:-1] + b', "long": "' + b"x" * 10_000_000 + b'"}',
    ],
    ids=["plain", "end", "BOM", "CRLF", "space", "NaN", "large", "deep", "10MB"],
)
def test_these_are_the_same_row(reader, form):
    read, row, _ = reader
    assert read(form(line(row))) == read(line(row))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"\xff\xfe" + '{"a": 1}'.encode("utf-16-le"), "UTF-16"),
        (b'{"a": "\xe9"}', "not UTF-8: byte 0xe9 at byte 8"),
        (b"\x00", "not valid JSON"),
        (BOM + b"{}", "BOM"),
        (b"{", "not valid JSON"),
        (b"{} {}", "Extra data"),
        (b"[" * 100_000, "nested more than 100"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested more than 100"),
        (b"1" * 5000, "4300 digits"),
        (b"[1]", "object"),
        (b'"text"', "object"),
        (b"null", "object"),
        (b"NaN", "object"),
        (b"-0.0", "object"),
        (b"{}", ""),
    ],
)
def test_these_are_no_row(reader, bad, reason):
    read, row, _ = reader
    with pytest.raises(DataError, match=r"data\.jsonl:2") as caught:
        read(line(row) + b"\n" + bad + b"\n")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [0, -1.5, True, [], [[]], {}, {"a": 1}, [1], "", " ", "\0", "a\0", "\ud800", "\udfff\ud800"],
    ids=repr,
)
def test_wrong_types_and_unusable_texts_name_their_key(reader, value):
    read, row, key = reader
    with pytest.raises(DataError, match=rf"data\.jsonl:1: .*{key}"):
        read(line({**row, key: value}))


def test_a_key_that_stands_twice(reader):
    read, row, key = reader
    good = line(row)
    with pytest.raises(DataError, match=rf'data\.jsonl:1: names the key "{key}" more than once'):
        read(good[:-1] + f', "{key}": "other"}}'.encode())


@pytest.mark.parametrize("content", [b"", b"\n", b"\r\n\r\n", BOM, b" \n\t\n"])
def test_files_without_rows(reader, content):
    read, row, _ = reader
    if row in (CHAT, {"text": "t"}):
        assert read(content) == []  # `load_texts` refuses it, for all sources at once
        return
    with pytest.raises(DataError, match=r"data\.jsonl.* has no (rows|entries|passages)"):
        read(content)


def test_a_row_of_many_keys_is_read_in_time(reader):
    read, row, _ = reader
    many = {f"key {i}": i for i in range(100_000)}
    assert read(line({**row, **many})) == read(line(row))


def test_ids_and_texts_are_compared_as_they_are_written(tmp_path):
    """NFC and NFD of a word look alike and are two texts, as two ids are: nothing is rewritten."""
    nfc, nfd = "caf\u00e9", "cafe\u0301"
    rows = [{"id": nfc, "text": nfc}, {"id": nfd, "text": nfd}]
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join(map(line, rows)))
    assert [d.text for d in load_corpus(path).values()] == [nfc, nfd]
    store = load_passages(str(path))
    assert [store.row_of(nfc), store.row_of(nfd)] == [0, 1]
    ask = {"question": "q", "answer": "a", "passage_ids": [nfd]}
    (tmp_path / "q.jsonl").write_bytes(line(ask))
    assert QuestionDataset(tmp_path / "q.jsonl", passages=store)[0].passage_ids == (nfd,)
    (tmp_path / "one.jsonl").write_bytes(line(rows[0]))
    with pytest.raises(DataError, match=r"q\.jsonl:1: passage_ids names"):
        QuestionDataset(tmp_path / "q.jsonl", passages=load_passages(str(tmp_path / "one.jsonl")))


def test_documents_that_stand_twice(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join(line({"id": i, "text": "same"}) for i in "ab"))
    assert list(load_corpus(path)) == ["a"]
    assert len(load_passages(str(path))) == 2
    path.write_bytes(b"\n".join(line({"id": "a", "text": t}) for t in "xy"))
    for read in (load_corpus, lambda path: load_passages(str(path))):
        with pytest.raises(DataError, match=r"data\.jsonl:2: repeats the id 'a'"):
            read(path)


def test_retrieved_hits_of_any_form(tmp_path):
    path = tmp_path / "data.jsonl"
    for hits in ([{"path": "a", "article_id": []}], [{"path": 1}], {"path": "a"}, ["a"], "a", [[]]):
        path.write_bytes(line({"query": "q", "chunk_path": "x.png", "retrieve_top20": hits}))
        with pytest.raises(DataError, match=r"data\.jsonl:1: retrieve_top20"):
            PairDataset(path, retrieved_negatives=True)


# --- files of one JSON value --------------------------------------------------------------------

GENERATION = {
    **{"format": 1, "generation": 1, "step": 0, "num_passages": 1, "dim": 2},
    **{"metric": "inner_product", "index": {}, "index_files": ["index.faiss"]},
    **{"fingerprints": {}, "validation": {}, "files": {"index.faiss": {"size": 1, "sha256": "0"}}},
}
CACHE = json.loads(
    CacheManifest(
        **{"kind": "top_k", "teacher": "t", "dtype": "float32", "vocab_size": 9, "vocabulary": "v"},
        **{"max_length": 9, "overlong": "drop", "data": ("d",), "num_documents": 1},
        **{"num_tokens": 1, "parts": ("part-0.safetensors",)},
    ).to_json()
)
CHECKPOINT = {
    **{"format": 1, "info": {}, "versions": {}},
    "files": {"model.safetensors": {"size": 1, "sha256": "0"}},
}
TILES = {"tiles_dir": ".", "questions": [], "golden_mapping": {}}
WHOLE: dict[str, tuple[Callable[[Path], Any], str, dict[str, Any], type[Exception]]] = {
    "index": (lambda p: Manifest.read(p.parent), "manifest.json", GENERATION, PixelragError),
    "cache": (lambda p: CacheManifest.read(p.parent), "manifest.json", CACHE, PixelragError),
    "inspect": (lambda p: read_artifact(p.parent), "manifest.json", GENERATION, PixelragError),
    "checkpoint": (lambda p: read_manifest(p.parent), "COMPLETE", CHECKPOINT, PixelragError),
    "tiles": (load_tile_set, "tiles.json", TILES, DataError),
    "deepspeed": (read_ds_config, "ds.json", {"zero_optimization": {}}, ConfigError),
    "stage": (read_deepspeed_file, "ds.json", {"zero_optimization": {}}, DeepSpeedFileError),
}


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize(
    "bad",
    [
        *(b"", b"\n", b"\x00", b"{", b"[]", b"null", b"1", b'"x"', b"NaN", b"\xff\xfe{\x00}\x00"),
        *(b'{"a": 1, "a": 2}', b'{"a": NaN}', b'{"a": "\xe9"}', b"[" * 100_000, b"9" * 5000),
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
    ids=lambda bad: repr(bad[:12]),
)
def test_what_is_no_such_file_is_told(tmp_path, kind, bad):
    read, name, _, error = WHOLE[kind]
    (tmp_path / name).write_bytes(bad)
    with pytest.raises(error) as caught:
        read(tmp_path / name)
    assert error is DeepSpeedFileError or name in str(caught.value)


@pytest.mark.parametrize("kind", [kind for kind in WHOLE if kind != "tiles"])
def test_a_byte_order_mark_is_fine(tmp_path, kind):
    read, name, good, _ = WHOLE[kind]
    (tmp_path / name).write_bytes(BOM + json.dumps(good).encode())
    read(tmp_path / name)


@pytest.mark.parametrize("kind", ["index", "cache", "inspect", "checkpoint", "stage", "deepspeed"])
@pytest.mark.parametrize("value", [None, 0, -1, 10**400, "x", "", [], [[]], {}, {"": []}, True])
def test_a_field_of_another_type_is_told_or_harmless(tmp_path, kind, value):
    read, name, good, error = WHOLE[kind]
    for key in good:
        (tmp_path / name).write_text(json.dumps(good | {key: value}))
        with contextlib.suppress(error):
            read(tmp_path / name)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", "", "."])
def test_manifests_name_files_of_their_own_folder_alone(tmp_path, name):
    entry = {"size": 1, "sha256": "0"}
    index = GENERATION | {"files": {name: entry}, "index_files": []}
    (tmp_path / "manifest.json").write_text(json.dumps(index))
    with pytest.raises(PixelragError, match="no name of a file"):
        Manifest.read(tmp_path)
    content = {key: value for key, value in CACHE.items() if key != "digest"} | {"parts": [name]}
    content["digest"] = _digest_of(content)
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(PixelragError, match="parts are files beside it"):
        CacheManifest.read(tmp_path)
    if name in ("../x", "/etc/passwd", ".."):
        (tmp_path / "COMPLETE").write_text(json.dumps(CHECKPOINT | {"files": {name: entry}}))
        with pytest.raises(PixelragError, match="lies outside"):
            read_manifest(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        {"optimizer": {"params": [1]}},
        {"optimizer": [], "scheduler": "x", "fp16": [], "bf16": 3},
        {"zero_optimization": {"stage": [], "offload_optimizer": []}},
        {"zero_optimization": {"offload_optimizer": {"device": []}}},
        {"torch_autocast": {"enabled": []}, "data_types": [], "gradient_clipping": {}},
    ],
)
def test_a_deepspeed_file_of_other_types_contradicts_the_job(content):
    with pytest.raises(ConfigError, match="contradicts"):
        resolve(
            content, stage=2, world_size=1, bf16=False, per_chunk=False, resident=True,
            offload_optimizer=False, num_trained=1000,
        )  # fmt: skip


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 8)
)

# --- YAML ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: b: c", "line 1"),
        ("a: 1\na: 2", "stands twice"),
        ("x\0y", "no valid YAML"),
        ("a: !!int x", "no valid YAML"),
        ("a: !!bool maybe", "no valid YAML"),
        ("a: !!timestamp 99999-99-99", "no valid YAML"),
        ("a: !!binary é", "no valid YAML"),
        ("a: " + "9" * 5000, "no valid YAML"),
        ("? [a]\n: b", "no valid YAML"),
        ("a: &a [*a]", "written out"),
        ("a: " + "[" * 100_000, "nested too deeply"),
        ("- 1", "expected options by name"),
        ("1: 2", "expected a name"),
        ("a: '" + "x" * 2**20 + "'", "characters"),
        (LAUGHS, "written out"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_yaml_that_cannot_be_a_configuration(tmp_path, text, reason):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml") as caught:
        load(ContrastiveConfig, ["--config", str(path)])
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 20_000


@pytest.mark.parametrize("content", [b"", b"\n", BOM, b"# nothing\r\n", b"a: 1", BOM + b"a: 1\r\n"])
def test_yaml_with_marks_and_line_ends_of_other_systems(tmp_path, content):
    (tmp_path / "run.yaml").write_bytes(content)
    read = read_yaml(tmp_path / "run.yaml")
    assert read.problems == []
    assert read.values == ({"a": 1} if b"a: 1" in content else {})


def test_yaml_in_other_encodings_is_named(tmp_path):
    for encoding in ("utf-16", "latin-1"):
        (tmp_path / "run.yaml").write_bytes("a: é".encode(encoding))
        assert "expected UTF-8" in str(read_yaml(tmp_path / "run.yaml").problems[0])


@pytest.mark.parametrize("value", ["[" * 5000, "[" + "9" * 5000 + "]", "[!!int x]", "[\0]"])
def test_a_list_on_the_command_line(value):
    with pytest.raises(ConfigError, match=r"data\.train"):
        load(ContrastiveConfig, ["--data.train", value])


def test_a_nul_in_a_path(tmp_path):
    text = 'output_dir: "a\\0b"\ndata: {train: x}\noptim: {max_steps: 1}'
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match="output_dir: a text with a NUL"):
        load(ContrastiveConfig, ["--config", str(tmp_path / "run.yaml")])


# --- TREC files and questions about tiles -------------------------------------------------------


@pytest.mark.parametrize("mark", [b"", BOM])
@pytest.mark.parametrize("end", [b"\n", CRLF])
def test_trec_files_with_marks_and_line_ends(tmp_path, mark, end):
    path = tmp_path / "f"
    path.write_bytes(mark + b"q 0 d 1" + end + b"q 0 e 0" + end)
    assert read_qrels(path) == {"q": {"d"}}
    path.write_bytes(mark + b"q Q0 d 1 0.5 t" + end)
    assert read_run(path) == {"q": [("d", 0.5)]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"q 0 d\n", "f:1: 3 fields"),
        (b"q 0 d 1\nq 0 d 0\n", "f:2: judges document d of query q again"),
        (b"q 0 d 2\n", "f:1: relevance '2'"),
        (b"q 0 d NaN\n", "f:1: relevance"),
        (b"\xff\xfeq\x00", "cannot be read"),
        (b"\xe9 0 d 1", "cannot be read"),
        (b"", "no relevant document"),
        (b"\n\n", "no relevant document"),
    ],
)
def test_qrels_that_are_none(tmp_path, content, reason):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_qrels(tmp_path / "f")
    assert reason in str(caught.value)


@pytest.mark.parametrize("score", ["NaN", "inf", "-Infinity", "x", "1e999", "0x1"])
def test_scores_that_are_no_numbers(tmp_path, score):
    (tmp_path / "f").write_text(f"q Q0 d 1 {score} t\n")
    with pytest.raises(DataError, match="f:1: score"):
        read_run(tmp_path / "f")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tiles_dir": "a\0b"}, "tiles_dir contains a NUL"),
        ({"tiles_dir": "\ud800"}, "half a surrogate pair"),
        ({"questions": [[]]}, "problem is missing"),
        ({"questions": [{"id": {}, "problem": "p", "answer": "a"}]}, "id is a string or a number"),
        ({"questions": [{"id": 1, "problem": "\0", "answer": "a"}]}, "problem contains a NUL"),
        ({"golden_mapping": {"1": {"a": 1}}}, "is a list of articles"),
        ({"questions": []}, "no questions"),
    ],
)
def test_questions_about_tiles(tmp_path, monkeypatch, changes, reason):
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    os.mkdir("t")
    Image.new("RGB", (8, 8)).save("t/a_chunk_0.png")
    good = {
        "tiles_dir": "t",
        "questions": [{"id": 1, "problem": "p", "answer": "a"}],
        "golden_mapping": {"1": ["a"]},
    }
    Path("q.json").write_text(json.dumps(good))
    assert len(load_tile_set("q.json").questions) == 1
    Path("q.json").write_text(json.dumps(good | changes))
    with pytest.raises(DataError, match=r"q\.json") as caught:
        load_tile_set("q.json")
    assert reason in str(caught.value)
