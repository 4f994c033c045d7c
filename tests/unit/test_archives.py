"""Images inside tar archives: read in place, nothing written, nothing outside reached."""

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pixelrag.data import archives
from pixelrag.data.archives import ArchiveError, image_source, normal_path, opened_image
from pixelrag.data.images import check_images
from pixelrag.data.pairs import PairDataset, check_files
from pixelrag.errors import DataError
from pixelrag.models.images import load_rgb


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A cache folder of its own, and no index in memory."""
    archives._indexed.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pixelrag" / "archives"


def png(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (40, 40 + number, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def pack(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def content(path: Path) -> bytes:
    with opened_image(path) as stream:
        return stream.read()


def test_members_are_read_by_name_and_by_the_layouts_of_pixelrag(tmp_path):
    pack(tmp_path / "tiles.tar", {"./a.png": png(1), "deep/b.png": png(2)})
    pack(tmp_path / "image_shards" / "shard_812.tar", {"shard_812/c.png": png(3)})
    pack(tmp_path / "pages.tar", {"pages/d.png": png(4)})
    for path, number in {
        "tiles.tar::a.png": 1,
        "tiles.tar::./deep/b.png": 2,
        "tiles/a.png": 1,
        "tiles/deep/b.png": 2,
        "images/shard_812/c.png": 3,
        "pages/d.png": 4,
    }.items():
        found = normal_path(tmp_path / path)
        assert content(found) == png(number), path
        assert load_rgb(found).size == (40 + number, 40)
    before = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}
    assert {path.suffix for path in before if path.is_file()} == {".tar"}


def test_a_file_wins_over_the_archive_beside_it(tmp_path):
    pack(tmp_path / "tiles.tar", {"a.png": png(1)})
    (tmp_path / "tiles").mkdir()
    (tmp_path / "tiles" / "a.png").write_bytes(png(2))
    assert content(tmp_path / "tiles" / "a.png") == png(2)


def test_the_last_of_two_members_of_one_name_counts(tmp_path):
    path = pack(tmp_path / "t.tar", {"a.png": png(1)})
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo("a.png")
        info.size = len(png(2))
        tar.addfile(info, io.BytesIO(png(2)))
    assert content(Path(f"{path}::a.png")) == png(2)


def test_rows_of_archives_are_checked_like_files(tmp_path):
    broken = {"a.png": png(1), "torn.png": png(2)[:90], "empty.png": b"", "text.png": b"hello"}
    pack(tmp_path / "tiles.tar", broken)
    rows = [
        {"query": "q", "chunk_path": f"{form}{name}"}
        for form in ("tiles.tar::", "tiles/")
        for name in [*broken, "gone.png"]
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reasons = {fault.line: fault.reason for fault in check_files(tmp_path / "t.jsonl").bad}
    assert reasons.keys() == {2, 3, 4, 5, 7, 8, 9, 10}
    for line, words in [
        (2, "cannot be decoded"),
        (3, "is empty"),
        (4, "no image of a known"),
        (5, "has no member 'gone.png' (4 files in it)"),
        (10, "does not exist"),
    ]:
        assert words in reasons[line]
    dataset = PairDataset(tmp_path / "t.jsonl", "skip")
    assert [str(row.positive.image.relative_to(tmp_path)) for row in dataset] == [
        "tiles.tar::a.png",
        "tiles/a.png",
    ]


def test_offsets_are_kept_until_the_archive_changes(tmp_path, cache, monkeypatch):
    path = pack(tmp_path / "t.tar", {"a.png": png(1)})
    member = Path(f"{path}::a.png")
    assert content(member) == png(1)
    assert len(list(cache.iterdir())) == 1
    archives._indexed.cache_clear()
    monkeypatch.setattr(archives, "_scan", lambda *_: pytest.fail("scanned again"))
    assert content(member) == png(1)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    pack(path, {"b.png": png(5), "a.png": png(2)})
    assert content(member) == png(2)
    next(cache.iterdir()).write_text("{")
    archives._indexed.cache_clear()
    assert content(member) == png(2)


def test_an_index_that_cannot_be_kept_is_made_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert content(Path(f"{pack(tmp_path / 't.tar', {'a.png': png(1)})}::a.png")) == png(1)


@pytest.mark.parametrize("name", ["../out.png", "/etc/out.png", "a/../../out.png"])
def test_names_that_lead_outside_are_refused(tmp_path, name):
    path = pack(tmp_path / "t.tar", {"a.png": png(1), name: png(2)})
    with pytest.raises(ArchiveError, match="leads out of the archive; pack it anew"):
        image_source(Path(f"{path}::a.png"))
    with pytest.raises(ValueError, match="no place within"):
        normal_path(f"{path}::{name}")
    row = {"query": "q", "chunk_path": f"t.tar::{name}"}
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=r"chunk_path names .* which is no place within"):
        PairDataset(tmp_path / "t.jsonl")


def test_links_and_folders_are_no_images(tmp_path):
    (tmp_path / "secret.png").write_bytes(png(1))
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name, kind in [("link.png", tarfile.SYMTYPE), ("dir.png", tarfile.DIRTYPE)]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, str(tmp_path / "secret.png")
            tar.addfile(info)
    bad = check_images([tmp_path / "t.tar::link.png", tmp_path / "t.tar::dir.png"])
    assert all("has no member" in reason for reason in bad.values())
    assert len(bad) == 2


def test_compressed_and_truncated_archives_are_named(tmp_path):
    pack(tmp_path / "z.tar", {"a.png": png(1)}, "w:gz")
    with pytest.raises(ArchiveError, match="Compressed archives cannot be read in place"):
        image_source(tmp_path / "z.tar::a.png")
    path = pack(tmp_path / "t.tar", {"a.png": png(1), "b.png": png(2)})
    os.truncate(path, 512 + 10)
    with pytest.raises(ArchiveError, match="is truncated"):
        image_source(Path(f"{path}::a.png"))
    with pytest.raises(ArchiveError, match="cannot be read: No such file"):
        image_source(tmp_path / "gone.tar::a.png")
