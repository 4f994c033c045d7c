"""Generations are whole or not there, whenever the process that makes them dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pixelrag.errors import IndexError_, ProvenanceError
from pixelrag.retrieval import index
from pixelrag.retrieval.generation import (
    Generation,
    Manifest,
    say_once,
    shard_bounds,
    write_tables,
)
from pixelrag.retrieval.generations import Generations
from pixelrag.retrieval.hits import exact_search, merge_top_k
from pixelrag.retrieval.index import IndexSettings
from pixelrag.retrieval.sharded import shards_of_rank
from tests.unit.rag_stand_ins import DIM, make_generation, vector


@pytest.fixture
def generations(tmp_path: Path) -> Generations:
    return Generations(tmp_path / "index")


def test_nothing_is_there_at_first(generations: Generations) -> None:
    assert generations.numbers() == generations.parts() == []
    assert generations.newest() == 0
    with pytest.raises(IndexError_, match="no generation; the passages must be encoded first"):
        generations.open_newest({})
    generations.empty_trash()
    assert generations.drop_old(2) == []


@pytest.mark.parametrize("shards", [1, 3])
def test_what_is_published_is_found(generations: Generations, shards: int) -> None:
    made = make_generation(generations.root, 1, shards=shards)
    made.verify()
    expected = np.stack([vector(b"1", f"row {i}") for i in range(50)])
    assert (np.asarray(made.vectors_ND) == expected).all()
    assert not made.vectors_ND.flags.writeable
    assert (len(made), made.number, made.step) == (50, 1, 10)
    hits, exact = made.search(expected[:9], 6), exact_search(expected, expected[:9], 6)
    assert (hits.rows_Qk == exact.rows_Qk).all()
    assert made.ids(hits.rows_Qk[:, 0]) == [f"id-{i}" for i in range(9)]


def test_one_shard_searches_its_own_rows(generations: Generations) -> None:
    make_generation(generations.root, 1, shards=3)
    bounds = shard_bounds(50, 3)
    one = generations.open(1, shards=lambda count: [1])
    hits = one.search(np.asarray(one.vectors_ND[:9]), 4)
    assert hits.rows_Qk.min() >= bounds[1]
    assert hits.rows_Qk.max() < bounds[2]


def test_every_index_file_is_dealt_out(generations: Generations) -> None:
    """By how many there are: a run that goes on may name another number."""
    made = make_generation(generations.root, 1, shards=3)
    queries = np.asarray(made.vectors_ND[:9])
    parts = []
    for rank in range(2):
        deal = partial(shards_of_rank, rank=rank, world_size=2)
        parts.append(generations.open(1, shards=deal).search(queries, 50))
    merged = merge_top_k(parts, 50)
    assert (merged.rows_Qk == made.search(queries, 50).rows_Qk).all()


def test_where_a_generation_is_searched(generations: Generations, monkeypatch, caplog) -> None:
    made = make_generation(generations.root, 1, shards=2)
    size = made.manifest.files["index-0-of-2.faiss"]["size"] * 2
    monkeypatch.setattr(index, "_on_gpu", lambda i, where: (i, "" if where == "cpu" else "no"))
    say_once.cache_clear()
    with caplog.at_level("INFO", logger="pixelrag"):
        for room in (size, size - 1, size, size - 1):
            generations.open(1, device="cuda:1", device_bytes=room)
        generations.open(1, device="cpu")
    assert [r.getMessage() for r in caplog.records] == [
        "index: searched on the CPU (no)",
        "index: searched on the CPU (0.00 GiB of index files are too much for the GPU beside the "
        "training)",
    ]
    with pytest.raises(IndexError_, match=r"'Flat': no\. Set"):
        generations.open(1, device="cuda:1")


def test_ids_of_rows_that_are_not_there(generations: Generations) -> None:
    made = make_generation(generations.root, 1)
    for row in (-1, 50):
        with pytest.raises(IndexError_, match=f"no row {row}, it has 50"):
            made.ids([row])


def test_ids_keep_every_letter(tmp_path: Path, generations: Generations) -> None:
    made = make_generation(generations.root, 1, rows=4)
    ids = ["", "ä b", "日本", "x" * 300]
    write_tables(made.path, ids, DIM, IndexSettings())
    assert made.ids(range(4)) == ids


def test_foreign_names_are_left_alone(generations: Generations) -> None:
    make_generation(generations.root, 3)
    for name in ("notes.txt", "gen-000009", "gen-7", "gen-abc", ".DS_Store", "gen-000004.part"):
        (generations.root / name).write_text("a file")
    (generations.root / "gen-000005.bak").mkdir()
    assert generations.numbers() == [3]
    assert generations.parts() == []
    generations.drop_old(0)
    assert generations.numbers() == []
    assert len(list(generations.root.iterdir())) == 7


def test_a_foreign_file_inside_a_generation_is_not_read(generations: Generations) -> None:
    made = make_generation(generations.root, 1)
    (made.path / "extra.bin").write_bytes(b"?")
    generations.open(1).verify()


def test_old_ones_go_but_what_is_pinned_stays(generations: Generations) -> None:
    for number in range(1, 6):
        make_generation(generations.root, number)
    kept = generations.open(3)
    assert generations.drop_old(2, pinned=[1]) == [2, 3]
    assert generations.numbers() == [1, 4, 5]
    # Who reads a deleted one goes on reading.
    assert kept.search(np.asarray(kept.vectors_ND[:1]), 1).rows_Qk[0, 0] == 0


def test_what_was_made_after_a_step_goes(generations: Generations) -> None:
    for number in (1, 2, 3):
        make_generation(generations.root, number)
    assert generations.drop_after(20) == [3]
    assert generations.numbers() == [1, 2]


def damage(file: Path, how: str) -> None:
    content = file.read_bytes()
    if how == "flipped":
        middle = len(content) * 2 // 3
        flipped = bytes([content[middle] ^ 0x40])
        file.write_bytes(content[:middle] + flipped + content[middle + 1 :])
    elif how == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif how == "longer":
        file.write_bytes(content + b"\0")
    else:
        file.unlink()


@pytest.mark.parametrize("how", ["truncated", "longer", "missing"])
@pytest.mark.parametrize("name", ["vectors.npy", "index.faiss", "ids.npz", "metadata.npz"])
def test_a_file_of_another_size_is_refused_at_once(generations, name: str, how: str) -> None:
    made = make_generation(generations.root, 1)
    damage(made.path / name, how)
    with pytest.raises(IndexError_, match=name.replace(".", r"\.")):
        generations.open(1)


@pytest.mark.parametrize("name", ["vectors.npy", "index.faiss", "ids.npz", "summary.json"])
def test_a_flipped_byte_is_found_by_the_hash(generations: Generations, name: str) -> None:
    made = make_generation(generations.root, 1)
    damage(made.path / name, "flipped")
    with pytest.raises(IndexError_, match=rf"{name} is altered .* the generation is damaged"):
        generations.open(1).verify()


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_a_damaged_generation_is_passed_over(generations, how: str, caplog) -> None:
    make_generation(generations.root, 1)
    newest = make_generation(generations.root, 2)
    damage(newest.path / "index.faiss", how)
    assert generations.open_newest({"passages": "p"}).number == 1
    assert "gen-000002" in caplog.text
    damage(generations.path(1) / "vectors.npy", how)
    with pytest.raises(IndexError_, match="none of the 2 generations is whole"):
        generations.open_newest({})


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"format": 2}', '{"format": 1, "generation": 1}', "null"],
)
def test_a_manifest_that_is_none(generations: Generations, text: str) -> None:
    made = make_generation(generations.root, 1)
    (made.path / "manifest.json").write_text(text)
    with pytest.raises(IndexError_, match=r"manifest\.json"):
        generations.open(1)
    (made.path / "manifest.json").unlink()
    with pytest.raises(IndexError_, match="not a whole generation"):
        generations.open(1)


def test_a_manifest_with_a_field_of_another_kind(generations: Generations) -> None:
    made = make_generation(generations.root, 1)
    file = made.path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"files": []}))
    with pytest.raises(IndexError_, match="files is not a dict"):
        Manifest.read(made.path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_passages": 49}, r"vectors\.npy: float32 \[50, 16\], expected float32 \[49, 16\]"),
        ({"dim": 8}, r"expected float32 \[50, 8\]"),
        ({"index_files": ["other.faiss"]}, "other.faiss is not in its manifest"),
    ],
)
def test_a_manifest_that_says_something_else(generations, changes, says) -> None:
    made = make_generation(generations.root, 1)
    file = made.path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(IndexError_, match=says):
        generations.open(1)


def test_another_runs_generation_is_refused(generations: Generations) -> None:
    make_generation(generations.root, 1)
    expected = {"passages": "q", "weights": "w1", "pooling": "cls"}
    with pytest.raises(ProvenanceError) as caught:
        generations.open_newest(expected)
    assert "passages: it has p, the run q" in str(caught.value)
    assert "pooling: it has none, the run cls" in str(caught.value)
    assert "weights" not in str(caught.value)


def test_published_ones_never_change(generations: Generations) -> None:
    made = make_generation(generations.root, 1)
    generations.part(1).mkdir()
    (generations.part(1) / "manifest.json").write_bytes((made.path / "manifest.json").read_bytes())
    with pytest.raises(IndexError_, match="published generations never change"):
        generations.publish(1)
    generations.open(1).verify()


def test_what_is_not_sealed_is_not_published(generations: Generations) -> None:
    generations.part(1).mkdir(parents=True)
    with pytest.raises(IndexError_, match="not a whole generation"):
        generations.publish(1)
    assert generations.numbers() == []


def test_two_runs_do_not_share_a_folder(generations: Generations) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from pixelrag.retrieval.generations import Generations\n"
        "with Generations(Path(sys.argv[1])).owned(): print('held')\n"
    )
    command = [sys.executable, "-c", script, str(generations.root)]
    with generations.owned():
        done = subprocess.run(command, capture_output=True, text=True)
        assert f"another run (process {os.getpid()}) makes generations there" in done.stderr
    assert subprocess.run(command, capture_output=True, text=True).stdout == "held\n"


# Every change to the file system is counted; number `at` kills the process instead (kill -9), so
# that each state between two changes is seen. Writing is cut in half, as a full buffer would be.
MAKER = """
import builtins, os, pathlib, shutil, signal, sys
from pathlib import Path

def main(root, at):
    from tests.unit.rag_stand_ins import make_generation
    from pixelrag.retrieval.generations import Generations
    import faiss
    count = 0

    def counted(owner, name, half=None):
        real = getattr(owner, name)
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == at:
                if half:
                    half(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        setattr(owner, name, call)

    real_open = builtins.open
    def torn(file, mode="r", *args, **kwargs):
        if "w" in mode:
            real_open(file, "wb").write(b"torn")
    def opened(file, mode="r", *args, **kwargs):
        nonlocal count
        if set(mode) & set("wax+"):
            count += 1
            if count == at:
                torn(file, mode)
                os.kill(os.getpid(), signal.SIGKILL)
        return real_open(file, mode, *args, **kwargs)
    builtins.open = opened
    for name in ("replace", "rename", "fsync", "unlink", "mkdir", "rmdir"):
        counted(os, name)
    counted(faiss, "write_index", lambda index, path: real_open(path, "wb").write(b"torn"))
    make_generation(Path(root), 2, step=20)
    Generations(Path(root)).drop_old(1)
    return count

if sys.argv[2] == "count":
    print(main(sys.argv[1], 0))
else:
    # One interpreter for all: each attempt in a child of its own.
    for at in map(int, sys.argv[3:]):
        child = os.fork()
        if child == 0:
            main(f"{sys.argv[1]}/{at}/index", at)
            os._exit(0)
        print(at, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def run_maker(*arguments: str) -> str:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", MAKER, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be: hundreds of fsyncs on a busy disk take half a minute."""
    memory = Path("/dev/shm")  # noqa: S108 - the folder below has a name of its own
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def test_killed_at_every_change_of_the_file_system(quick_folder: Path) -> None:
    tmp_path = quick_folder
    make_generation(tmp_path / "count" / "index", 1, step=10)
    total = int(run_maker(str(tmp_path / "count" / "index"), "count"))
    assert total > 30
    for at in range(1, total + 1):
        make_generation(tmp_path / str(at) / "index", 1, step=10)
    told = run_maker(str(tmp_path), "kill", *map(str, range(1, total + 1)))
    assert told.split() == [word for at in range(1, total + 1) for word in (str(at), "-9")]
    newest = []
    for at in range(1, total + 1):
        generations = Generations(tmp_path / str(at) / "index")
        # Whatever carries a generation's name is one, whole to the last byte.
        assert generations.numbers() in ([1], [1, 2], [2]), at
        for number in generations.numbers():
            generations.open(number).verify()
        newest.append(generations.newest())
        # And the next run can make what is missing.
        for part in generations.parts():
            generations.discard_part(part)
        generations.empty_trash()
        if generations.newest() == 1:
            make_generation(generations.root, 2)
        generations.open(2).verify()
        assert {p.name for p in generations.root.iterdir()} <= {"gen-000001", "gen-000002"}, at
    commit = newest.index(2)
    assert newest == [1] * commit + [2] * (total - commit)
    assert 0 < commit < total


def test_opened_without_reading_everything(generations: Generations) -> None:
    make_generation(generations.root, 1)
    opened = Generation(generations.path(1))
    assert opened._ids is None
