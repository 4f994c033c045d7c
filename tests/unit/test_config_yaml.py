"""YAML as configuration: words of YAML 1.2, keys once, plain data, mistakes with their line."""

import pytest

from pixelrag.config.base import load
from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.yaml_file import read_yaml
from pixelrag.errors import ConfigError


@pytest.fixture
def read(tmp_path):
    def _read(text: str | bytes):
        path = tmp_path / "c.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_yaml(path)

    return _read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-5", 2e-5), ("1E3", 1e3), (".5", 0.5), ("-1.5e+2", -150.0), ("7", 7), ("-7", -7),
        ("on", "on"), ("off", "off"), ("yes", "yes"), ("no", "no"), ("true", True),
        ("False", False),
        ("null", None), ("~", None), ("", None), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"),
        ("'2e-5'", "2e-5"), ("e5", "e5"), ("1_000", "1_000"), (".inf", float("inf")),
    ],
)  # fmt: skip
def test_words(read, text: str, value: object):
    got = read(f"a: {text}\n").values["a"]
    assert got == value
    assert type(got) is type(value)


def test_a_leading_zero_is_not_octal(read):
    assert read("a: 010\n").values["a"] == 10


def test_lines_of_nested_options(read):
    places = read("# comment\na:\n  b: 1\n\n  c: {d: 2}\n").places
    lines = {path: place.rpartition(" ")[2] for path, place in places.items()}
    assert lines == {("a",): "2", ("a", "b"): "3", ("a", "c"): "5", ("a", "c", "d"): "5"}


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null\n"])
def test_an_empty_file_sets_nothing(read, text: str):
    file = read(text)
    assert file.values == {}
    assert file.problems == []


def test_a_byte_order_mark_is_no_key(read):
    assert read(b"\xef\xbb\xbfa: 1\n").values == {"a": 1}


def test_anchors_and_merge_keys(read):
    file = read("a: &x {b: 1, c: 2}\nd: {<<: *x, c: 3}\n")
    assert file.values["d"] == {"b": 1, "c": 3}
    assert file.problems == []


@pytest.mark.parametrize(
    ("text", "says", "line"),
    [
        ("a:\n  b: 1\n  b: 2\n", "a.b (FILE line 3)\n      stands twice, first on line 2", 3),
        ("a: 1\nc: 2\na: {}\n", "a (FILE line 3)\n      stands twice, first on line 1", 3),
        ("a: [1\n", "no valid YAML", 2),
        ("a:\n\tb: 1\n", "no valid YAML", 2),
        ("a: 1\n---\nb: 2\n", "no valid YAML", 2),
        ("a: *nowhere\n", "no valid YAML", 1),
        ("a: !!python/object/apply:os.system [ls]\n", "no valid YAML", 1),
        ("1: x\n", "expected a name", 1),
        ("a: {? [x, y] : z}\n", "no valid YAML: found unhashable key", 1),
    ],
)
def test_mistakes_name_their_line(read, tmp_path, text: str, says: str, line: int):
    problems = read(text).problems
    assert len(problems) == 1
    assert says.replace("FILE", str(tmp_path / "c.yaml")) in str(problems[0])
    assert problems[0].where == f"{tmp_path / 'c.yaml'} line {line}"


@pytest.mark.parametrize(("text", "says"), [("- a\n", "got a list"), ("7\n", "got a int")])
def test_a_file_holds_options_by_name(read, text: str, says: str):
    assert says in str(read(text).problems[0])


def test_unreadable_files(read, tmp_path):
    assert "expected UTF-8 (byte 3 is not)" in str(read(b"a: \xff\n").problems[0])
    assert "Is a directory" in str(read_yaml(tmp_path).problems[0])
    assert "No such file" in str(read_yaml(tmp_path / "gone.yaml").problems[0])


def test_files_that_would_run_away(read, tmp_path):
    assert "nested too deeply" in str(read("a: " + "[" * 20_000).problems[0])
    path = tmp_path / "c.yaml"
    path.write_text("model: &x {name_or_path: *x}\n")
    with pytest.raises(ConfigError, match="aliases written out"):
        load(ContrastiveConfig, ["--config", str(path)])


def test_a_section_whose_lines_are_all_commented_out(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "lora:\n#  r: 4\nmodel: {name_or_path: m}\ndata: {train: t.jsonl}\noptim: {max_steps: 1}\n"
        "logging: {progress: on}\n"
    )
    config, _ = load(ContrastiveConfig, ["--config", str(path)])
    assert config.lora.r == 32
    assert config.logging.progress == "on"
    assert config.data.train == ["t.jsonl"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed: true", "got true, expected an integer"),
        ("optim: {learning_rate: true}", "got true, expected a number"),
        ("model: 3", "model (FILE line 1)\n      got 3, expected a section of options"),
        ("model: {name_or_path: 3}", "got 3, expected a text"),
        ("data: {train: [a, 3]}", "data.train[1] (FILE line 1)\n      got 3, expected a list"),
        ("data: {train: ['']}", "expected paths that are not empty"),
        ("data: {eval: [a, b, a]}", "got ['a', 'b', 'a'], expected each path once"),
        ("batch: {chunk_size: 1.5}", "got 1.5, expected an integer"),
        ("optim: {beta1: .nan}", "got nan, expected a"),
        ("lora: {target_modules: q}", "got 'q', expected a list of texts or null"),
    ],
)
def test_values_of_another_kind(tmp_path, text: str, says: str):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(ContrastiveConfig, ["--config", str(path)])
    assert says.replace("FILE", str(path)) in str(caught.value)
