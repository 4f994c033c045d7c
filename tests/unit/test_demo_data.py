"""The demo's data: real functions, no leak between the splits, pages one can read."""

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pixelrag.data.pairs import PairDataset
from pixelrag.demo import code_search
from pixelrag.demo.code_search import build_code_search, split_by_file
from pixelrag.demo.functions import Function, Library, held_out_files, read_library
from pixelrag.demo.page import TITLE_HEIGHT, PageStyle, render_page
from pixelrag.demo.publish import published_folder, write_manifest
from pixelrag.demo.tiles import COLOURS, render_tiles
from pixelrag.errors import ConfigError, DataError

LONG_BODY = (
    "    total = 0\n    for value in values:\n        total += value * value\n    return total"
)


@pytest.fixture(scope="module")
def library() -> list[Function]:
    """The functions of this interpreter's own standard library."""
    return read_library().functions


@pytest.fixture(scope="module")
def code_set(tmp_path_factory, library):
    with pytest.MonkeyPatch.context() as patch:  # reading the library once is enough
        patch.setattr(code_search, "read_library", lambda root, mask_names: Library(library, []))
        return build_code_search(tmp_path_factory.mktemp("demo") / "code")


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def one(root: Path, text: str, **options) -> list[Function]:
    return read_library(tree(root, {"m.py": text}), **options).functions


# ------------------------------------------------------------------ functions


def test_code_and_source_are_the_function_without_its_docstring(tmp_path):
    (function,) = one(
        tmp_path,
        "class Box:\n"
        "    @property\n"
        "    def area(self, scale=1.0):\n"
        '        """Return the area of the box, e.g. for a label. And more.\n\n'
        '        Not this.\n        """\n'
        "\n"
        "        # a comment\n"
        "        width = self.width*scale\n"
        "        def inner():\n"
        '            """Inner words."""\n'
        "            return width\n"
        "        return inner() * self.height * scale\n",
    )
    assert function.summary == "Return the area of the box, e.g. for a label."
    assert (function.file, function.module, function.name) == ("m.py", "m", "Box.area")
    assert function.kind == "method"
    assert function.code == (
        "def area(self, scale=1.0):\n"
        "    width = self.width * scale\n"
        "    def inner():\n"
        "        return width\n"
        "    return inner() * self.height * scale"
    )
    assert function.source == (
        "def area(self, scale=1.0):\n"
        "    # a comment\n"
        "    width = self.width*scale\n"
        "    def inner():\n"
        "        return width\n"
        "    return inner() * self.height * scale"
    )


def test_masked_names_are_masked_where_the_function_calls_itself(tmp_path):
    text = (
        "async def countdown(n):\n"
        '    """Count down to zero, slowly and surely."""\n'
        "    await asyncio.sleep(1.0)\n"
        "    if n > 0: return await countdown(n - 1) or self.countdown.__name__\n"
    )
    (plain,) = one(tmp_path, text)
    (masked,) = one(tmp_path, text, mask_names=True)
    assert plain.code.count("countdown") == 3
    assert masked.code == plain.code.replace("countdown", "f")
    assert masked.code.startswith("async def f(n):")
    assert masked.kind == "coroutine"
    assert masked.name == "countdown"


def test_what_is_no_task_is_left_out(tmp_path):
    def function(name: str, doc: str, body: str = LONG_BODY) -> str:
        return f'def {name}(values):\n    """{doc}"""\n{body}\n'

    root = tree(
        tmp_path,
        {
            "a.py": function("a", "Sum up the squares of the values.")
            + function("short_doc", "Sum.")
            + function("short_body", "Do nothing at all with what is given.", "    return 1")
            + function("example", ">>> example(something) and more of it"),
            "pkg/__init__.py": function("pkg", "Sum up the cubes.  Of values, that is.", "    x()"),
            "test/b.py": function("b", "A test of the sum of some squares."),
            "pkg/tests/c.py": function("c", "Another test of the sum of squares."),
            "site-packages/d.py": function("d", "Somebody else's sum of some squares."),
            "broken.py": "def (",
            "latin.py": "# no coding line\nx = 1\n",
            "nul.py": "x = '\x00'\n",
        },
    )
    (root / "latin.py").write_bytes(b"x = '\xe9'\n")
    library = read_library(root)
    assert [function.name for function in library.functions] == ["a"]
    assert library.unreadable == ["broken.py", "latin.py", "nul.py"]


@pytest.mark.parametrize(
    "second",
    [
        'def other(values):\n    """Sum up - the SQUARES of the values!"""\n'
        "    total = [str(value) for value in values] + [1] * 40\n    return total, len(total)",
        f'def other(values):\n    """Say something else about the same."""\n{LONG_BODY}',
    ],
    ids=["same query", "same code under another name"],
)
def test_duplicates_in_other_files_are_dropped(tmp_path, second):
    first = f'def first(values):\n    """Sum up the squares of the values."""\n{LONG_BODY}\n'
    unique = second.replace("SQUARES", "cubes").replace("total", "sum_").replace("other", "third")
    root = tree(tmp_path, {"a.py": first, "b.py": second, "c.py": unique})
    assert [function.name for function in read_library(root).functions] == ["first", "third"]


def test_long_code_is_cut_at_a_line(tmp_path):
    body = "\n".join(f"    call_number_{i}(values)" for i in range(200))
    (function,) = one(
        tmp_path, f'def f(values):\n    """Call two hundred different things."""\n{body}\n'
    )
    assert 870 < len(function.code) <= 900
    assert re.fullmatch(r"    call_number_\d+\(values\)", function.code.split("\n")[-1])


def test_no_source_is_one_clear_error(tmp_path):
    (tmp_path / "python311.zip").touch()
    with pytest.raises(DataError, match=r"No Python source below .* compiled or zipped"):
        read_library(tmp_path)
    with pytest.raises(DataError, match="No Python source"):
        build_code_search(tmp_path / "out", root=tmp_path)
    assert not (tmp_path / "out").exists()


def test_half_a_library_is_one_clear_error(tmp_path, library):
    root = tree(
        tmp_path / "lib",
        {"a.py": f'def first(values):\n    """Sum up the squares of the values."""\n{LONG_BODY}\n'},
    )
    with pytest.raises(DataError, match=r"Only 1 functions with docstrings.* at least 300"):
        build_code_search(tmp_path / "out", root=root)
    with pytest.raises(DataError, match="1 functions are too few"):
        render_tiles(read_library(root).functions, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lib"]


def test_held_out_files_hardly_move_when_a_file_is_missing(library):
    files = {function.file for function in library}
    held_out = held_out_files(library, 0.25, 25)
    assert len(held_out) == round(0.25 * len(files))
    assert held_out != held_out_files(library, 0.25, 26)
    missing = sorted(files)[10]
    fewer = [function for function in library if function.file != missing]
    assert len(held_out ^ held_out_files(fewer, 0.25, 25)) <= 3


# ------------------------------------------------------------------ the text set


def test_the_set_is_of_the_size_promised(code_set):
    """3,578 functions on CPython 3.11; other versions and partial libraries have fewer or more."""
    assert code_set.num_train >= 2000
    assert code_set.num_eval == 600
    assert len(PairDataset(code_set.train_path)) == code_set.num_train
    assert len(PairDataset(code_set.eval_path)) == code_set.num_eval


def test_nothing_leaks_from_one_split_to_the_other(code_set):
    train, held_out = rows(code_set.train_path), rows(code_set.eval_path)
    files = [{row["source"].split(":")[0] for row in part} for part in (train, held_out)]
    assert not files[0] & files[1]
    everything = train + held_out

    def bodies(row: dict) -> str:
        return re.sub(r"^(async )?def \w+", "def f", row["passage"])

    for view in (lambda row: row["query"].casefold(), lambda row: row["passage"], bodies):
        seen = Counter(map(view, everything))
        assert [text for text, count in seen.items() if count > 1] == []


def test_no_function_quotes_its_own_docstring(code_set):
    everything = rows(code_set.train_path) + rows(code_set.eval_path)
    quoting = [row["source"] for row in everything if row["query"] in row["passage"]]
    assert len(quoting) <= 0.002 * len(everything), quoting


def test_same_interpreter_same_bytes_whatever_the_hash_seed(tmp_path):
    code = (
        "import sys, sysconfig, pathlib; from pixelrag.demo.code_search import build_code_search;"
        "root = pathlib.Path(sysconfig.get_paths()['stdlib'], 'email');"
        "build_code_search(sys.argv[1], root=root, min_rows=50, max_eval=20)"
    )
    for seed in ("1", "2"):
        command = [sys.executable, "-c", code, str(tmp_path / seed)]
        subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, check=True, timeout=60)
    for name in ("train.jsonl", "eval.jsonl", "manifest.json"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    manifest = json.loads((tmp_path / "1" / "manifest.json").read_text())
    assert manifest["num_train"] == len(rows(tmp_path / "1" / "train.jsonl"))
    assert manifest["num_eval"] == 20
    assert str(tmp_path) not in json.dumps(manifest)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out_fraction": 0.0}, "held_out_fraction: got 0.0"),
        ({"held_out_fraction": 1}, "held_out_fraction: got 1"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_arguments_out_of_range(library, options, message):
    with pytest.raises(ConfigError, match=message):
        split_by_file(library, **{"held_out_fraction": 0.25, "seed": 0} | options)
    with pytest.raises(ConfigError, match="max_eval: got 0"):
        build_code_search("unused", max_eval=0)


# ------------------------------------------------------------------ publishing


def test_a_folder_of_the_same_kind_is_replaced_and_any_other_refused(tmp_path):
    target = tmp_path / "out"
    for content in ("first", "second"):
        with published_folder(target, "kind") as folder:
            assert list(folder.iterdir()) == []
            (folder / content).touch()
            write_manifest(folder, "kind", {})
        assert sorted(os.listdir(target)) == sorted([content, "manifest.json"])
    with pytest.raises(DataError, match="would be replaced"), published_folder(target, "other"):
        raise AssertionError
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(DataError, match="would be replaced"):
        build_code_search(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is a file"):
        build_code_search(tmp_path / "file")


def test_a_failure_in_the_middle_leaves_what_was_there(tmp_path, monkeypatch):
    target = tmp_path / "out"
    with published_folder(target, "kind") as folder:
        write_manifest(folder, "kind", {"number": 1})

    def run_out_of_space(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError(28, os.strerror(28))

    message = "out cannot be written: No space left on device; nothing was left there"
    with pytest.raises(DataError, match=message), published_folder(target, "kind") as folder:
        run_out_of_space(folder)
    with pytest.raises(KeyError), published_folder(target, "kind"):
        raise KeyError
    replace = os.replace

    def refuse_the_new(source: Path, destination: Path) -> None:
        if source.name == "new":
            raise OSError(5, os.strerror(5))
        replace(source, destination)

    monkeypatch.setattr(os, "replace", refuse_the_new)
    with pytest.raises(DataError, match="Input/output error"), published_folder(target, "kind"):
        pass
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(target) == ["manifest.json"]


# ------------------------------------------------------------------ pages

CODE = 'def add(a, b=None):\n    # sum\n    if b is None:\n        return "a" + 1\n    return a + b'


def ink(page: Image.Image) -> np.ndarray:
    """Where something is drawn on the paper below the title bar, [height, width] bool."""
    return (np.asarray(page)[TITLE_HEIGHT:] < 128).any(axis=2)


def test_page_is_whole_tokens_wide_and_high_and_opaque():
    page = render_page(CODE, title="m", subtitle="add", colour="#c92a2a")
    assert (page.mode, page.size) == ("RGB", (448, 160))
    tall = render_page("\n".join([CODE] * 40), title="m", subtitle="add", colour="#c92a2a")
    assert tall.size == (448, 448)
    narrow = PageStyle(width=320, max_height=330, line_numbers=False)
    page = render_page(CODE * 30, title="m", subtitle="add", colour="#c92a2a", style=narrow)
    assert page.size == (320, 320)


def test_nothing_touches_the_edges_even_with_long_lines_and_titles():
    source = "\n".join("x" * n + " = " + "y, " * n for n in range(1, 120, 7))
    page = render_page(source, title="package." * 20, subtitle="name_" * 40, colour="#c92a2a")
    drawn = ink(page)
    assert not drawn[:4].any()
    assert not drawn[-4:].any()
    assert not drawn[:, :4].any()
    assert not drawn[:, -4:].any()
    title = np.asarray(page)[:TITLE_HEIGHT]
    edges = [title[:4], title[-4:], title[:, :8], title[:, -8:]]
    assert all((edge == np.array([0xC9, 0x2A, 0x2A])).all() for edge in edges)


def test_code_is_highlighted_in_several_colours_and_wrapped_not_cut():
    page = render_page(CODE, title="m", subtitle="add", colour="#c92a2a")
    colours = Counter(map(tuple, np.asarray(page)[TITLE_HEIGHT:].reshape(-1, 3).tolist()))
    dark = [colour for colour, count in colours.items() if min(colour) < 128 and count > 10]
    assert len(dark) >= 5
    # One line of 150 characters holds as much ink as the same words on three lines.
    words = ["value_one + " * 4, "value_two + " * 4, "value_six * 2"]
    plain = PageStyle(line_numbers=False)
    amounts = [
        ink(render_page(text, title="m", subtitle="s", colour="#000", style=plain)).sum()
        for text in ("".join(words), "\n".join(words))
    ]
    assert amounts[0] == amounts[1] > 1000


def test_same_input_same_pixels_and_other_input_other_pixels():
    pages = [
        np.asarray(render_page(text, title=title, subtitle="s", colour=colour)).tobytes()
        for text, title, colour in [
            (CODE, "m", "#c92a2a"),
            (CODE, "m", "#c92a2a"),
            (CODE.replace("1", "2"), "m", "#c92a2a"),
            (CODE, "n", "#c92a2a"),
            (CODE, "m", "#1c5fd0"),
        ]
    ]
    assert pages[0] == pages[1]
    assert len(set(pages)) == 4


def test_characters_outside_the_font_do_not_stop_the_page():
    page = render_page("x = 'λ→ü\t|'", title="ünï", subtitle="s", colour="#000000")
    assert ink(page).any()


def test_visual_tiles_ask_for_what_is_to_be_seen(tmp_path, library):
    tiles = render_tiles(library, tmp_path / "tiles", num_train=48, num_eval=24)
    train, held_out = rows(tiles.train_path), rows(tiles.eval_path)
    assert (tiles.num_train, tiles.num_eval) == (len(train), len(held_out)) == (48, 24)
    assert len(PairDataset([tiles.train_path, tiles.eval_path])) == 72
    files = [{row["source"].split(":")[0] for row in part} for part in (train, held_out)]
    assert not files[0] & files[1]
    named: dict[str, set[str]] = {}
    for row in train + held_out:
        length, colour, package = re.fullmatch(
            r"(short|medium|long) (\w+) page about (\w+)", row["query"]
        ).groups()
        named.setdefault(colour, set()).add(package)
        assert row["source"].split("/")[0].removesuffix(".py").split(".")[0] == package
        with Image.open(tiles.train_path.parent / row["chunk_path"]) as page:
            assert page.getpixel((2, 2)) == tuple(bytes.fromhex(COLOURS[colour][1:]))
            heights = {"short": (160, 288), "medium": (224, 448), "long": (352, 448)}
            assert heights[length][0] <= page.height <= heights[length][1]
    # A colour means one package, and every one is both trained on and held out.
    assert all(len(packages) == 1 for packages in named.values())
    for part in (train, held_out):
        counts = Counter(row["query"].split()[-1] for row in part)
        assert len(counts) == len(named) >= 4
        assert max(counts.values()) <= 2 * min(counts.values())


def test_code_tiles_ask_by_docstring(tmp_path, library):
    tiles = render_tiles(library, tmp_path / "tiles", kind="code", num_train=3, num_eval=2)
    summaries = {f"{one.file}:{one.name}": one.summary for one in library}
    for row in rows(tiles.train_path) + rows(tiles.eval_path):
        assert row["query"] == summaries[row["source"]]
    assert len(list((tmp_path / "tiles").rglob("*.png"))) == 5
    with pytest.raises(ConfigError, match="kind: got 'both'"):
        render_tiles(library, tmp_path / "tiles", kind="both")
    with pytest.raises(ConfigError, match="got 0, 5"):
        render_tiles(library, tmp_path / "tiles", num_train=0, num_eval=5)


def test_source_of_real_functions_is_python(library):
    for function in library[::10]:
        ast.parse(function.source)
        assert function.summary not in function.source or function.summary in function.code
