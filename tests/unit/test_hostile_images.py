"""Images and archives that would harm, or mean something else than they seem to."""

import io
import json
import os
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pixelrag.data.archives import ArchiveError, image_source
from pixelrag.data.images import MAX_ASPECT, check_image, check_images, strict_decoding
from pixelrag.data.pairs import PairDataset, check_files, load_corpus
from pixelrag.data.passages import load_passages
from pixelrag.data.roots import Roots
from pixelrag.data.token_store import TokenStore
from pixelrag.errors import DataError
from pixelrag.models.images import fit_image, load_rgb
from tests.unit.token_stores import token_store


def verdict(path: Path) -> str | None:
    with strict_decoding():
        return check_image(path)


def png(width: int, height: int, body: bytes, *, depth: int = 8, kind: int = 2) -> bytes:
    out = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    for name, part in ((b"IHDR", header), (b"IDAT", zlib.compress(body)), (b"IEND", b"")):
        out += struct.pack(">I", len(part)) + name + part
        out += struct.pack(">I", zlib.crc32(name + part))
    return out


# --- images -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\0" * 100, "no image of a known format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "no image of a known format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image of a known format"),
        (png(100_000, 100_000, b""), "more than 50,000,000 pixels"),
        (png(0, 5, b""), ""),
        (png(20_000, 2, bytes(2 * 60_001)), "one side more than 200 times"),
        (png(8, 8, b"\0"), "cannot be"),
        (png(8, 8, bytes(range(256)) * 2)[:60], "cannot be"),
        (b"GIF89a\0\0\0\0\0\0\0;", ""),
        (b"P6\n0 0\n255\n", ""),
        (b"P6\n-1 5\n255\n", ""),
        (b"P6\n99999999 99999999\n255\n", "more than 50,000,000 pixels"),
        (b"BM" + b"\xff" * 60, ""),
    ],
)
def test_each_is_refused_before_training_meets_it(tmp_path, content, reason):
    path = tmp_path / "a.png"
    path.write_bytes(content)
    said = verdict(path)
    assert said is not None
    assert reason in said
    with pytest.raises(DataError, match=r"a\.png"):
        fit_image(path, factor=32, min_tokens=1, max_tokens=64)


def test_what_passes_the_check_is_what_training_reads(tmp_path):
    """First frame of an animation, ink as light, wide greys by their high byte, upright by EXIF."""
    path = tmp_path / "a"
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    for kind in ("GIF", "WEBP", "TIFF"):
        options = {"lossless": True} if kind == "WEBP" else {}
        frames[0].save(path, kind, save_all=True, append_images=frames[1:], **options)
        assert verdict(path) is None
        assert load_rgb(path).getpixel((4, 4)) == (255, 0, 0), kind
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(path, "JPEG", quality=100)
    assert verdict(path) is None
    assert np.allclose(load_rgb(path).getpixel((4, 4)), (255, 0, 0), atol=4)
    path.write_bytes(
        png(4, 1, b"\0" + struct.pack(">4H", 0, 0x7FFF, 0x8000, 0xFFFF), depth=16, kind=0)
    )
    assert verdict(path) is None
    assert [load_rgb(path).getpixel((x, 0))[0] for x in range(4)] == [0, 127, 127, 255]
    Image.fromarray(np.array([[np.nan, np.inf], [0.5, -np.inf]], np.float32)).save(path, "TIFF")
    assert verdict(path) is None
    assert np.asarray(load_rgb(path))[..., 0].tolist() == [[0, 255], [0, 0]]
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 4), "red").save(path, "JPEG", exif=exif)
    assert verdict(path) is None
    assert load_rgb(path).size == (4, 8)


def test_a_side_may_be_two_hundred_times_the_other_and_no_more(tmp_path):
    path = tmp_path / "a.png"
    Image.new("L", (MAX_ASPECT * 3, 3)).save(path)
    assert verdict(path) is None
    Image.new("L", (MAX_ASPECT * 3 + 1, 3)).save(path)
    assert "600" in verdict(path) or "601" in verdict(path)


# --- places -------------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path):
    """A data set, and a picture outside it that it may not name."""
    (tmp_path / "set" / "tiles").mkdir(parents=True)
    (tmp_path / "set2").mkdir()
    for path in ("set/tiles/in.png", "out.png", "set2/out.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / path)
    with tarfile.open(tmp_path / "out.tar", "w") as tar:
        tar.add(tmp_path / "out.png", "a.png")
    (tmp_path / "set" / "link.png").symlink_to("../out.png")
    (tmp_path / "set" / "folder").symlink_to("..")
    (tmp_path / "set" / "loop.png").symlink_to("loop.png")
    (tmp_path / "set" / "inner.png").symlink_to("tiles/in.png")
    return tmp_path


OUTSIDE = ("../out.png", "{}/out.png", "link.png", "folder/out.png", "../set2/out.png",
           "../out.tar::a.png", "tiles/../../out.png", "/etc/passwd", "../absent.png")  # fmt: skip
INSIDE = ("tiles/in.png", "{}/set/tiles/in.png", "inner.png", "./tiles//in.png",
          "../set/tiles/in.png", "folder/set/tiles/in.png")  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_row_names_an_image_outside(places, name):
    name = name.format(places)
    file, corpus = places / "set" / "train.jsonl", places / "set" / "corpus.jsonl"
    file.write_text(json.dumps({"query": "q", "chunk_path": name}))
    corpus.write_text(json.dumps({"id": "1", "chunk_path": name}))
    (fault,) = check_files(file).bad
    assert (fault.line, "lies outside" in fault.reason) == (1, True)
    assert "data.image_roots" in fault.reason
    with pytest.raises(DataError, match=r"train\.jsonl:1: image .* lies outside"):
        PairDataset(file)
    with pytest.raises(DataError, match=r"corpus\.jsonl:1: image .* lies outside"):
        load_corpus(corpus)
    with pytest.raises(DataError, match=r"corpus\.jsonl:1: image .*knowledge_base\.image_roots"):
        load_passages(str(corpus))
    if "absent" not in name and "passwd" not in name:
        allowed = [str(places)]
        assert check_files(file, image_roots=allowed).bad == []
        assert len(load_corpus(corpus, image_roots=["/"])) == 1
        assert len(load_passages(str(corpus), image_roots=allowed)) == 1
        assert check_files(file, image_roots=[str(places / "nowhere")]).num_bad_rows == 1


@pytest.mark.parametrize("name", INSIDE)
def test_every_way_to_an_image_inside_is_allowed(places, name):
    file = places / "set" / "train.jsonl"
    file.write_text(json.dumps({"query": "q", "chunk_path": name.format(places)}))
    assert check_files(file).bad == []


def test_a_linked_data_file_allows_both_its_folders(places):
    """As the cache of a hub lays them out: links in one folder, what they mean in another."""
    (places / "hub").mkdir()
    (places / "set" / "train.jsonl").write_text('{"query": "q", "chunk_path": "tiles/in.png"}\n')
    (places / "hub" / "train.jsonl").symlink_to(places / "set" / "train.jsonl")
    (places / "hub" / "tiles").symlink_to(places / "set" / "tiles")
    assert check_files(places / "hub" / "train.jsonl").bad == []


def test_links_in_circles_and_endless_names_are_told(places):
    assert "cannot be read" in verdict(places / "set" / "loop.png")
    for name in ("loop.png", "a" * 300, "a/" * 2000 + "b"):
        roots = Roots([places / "set" / "t.jsonl"])
        (said,) = check_images([places / "set" / name], roots=roots).values()
        assert "cannot be read" in said or "does not exist" in said
    file = places / "set" / "train.jsonl"
    file.write_text(json.dumps({"query": "q", "chunk_path": "a/" * 100_000}))
    assert "200,000 characters, which is no path" in check_files(file).bad[0].reason


def test_the_root_of_everything(places):
    assert Roots([], ["/"]).fault(Path("/etc/passwd")) is None
    assert Roots(["/train.jsonl"]).fault(Path("/etc/passwd")) is None
    assert Roots([places / "set" / "t.jsonl"], ["~"]).fault(Path.home() / "a.png") is None


# --- archives -----------------------------------------------------------------------------------


def header(name: str, size: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    block[124:136], block[156:157] = size.rjust(12, b"0")[:12], kind
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    "content",
    [
        b"\x1f\x8b" + bytes(50),
        b"\x28\xb5\x2f\xfd" + bytes(50),
        b"PK\x03\x04" + bytes(600),
        b"x" * 1024,
        header("a.png", b"\xff" * 12),
        header("a.png", b"\xff" * 11 + b"\0"),
        header("a.png", b"\x80" + b"\xff" * 11),
        header("a.png", b"77777777777"),
        header("x", b"0000000zzz"),
        header("././@LongLink", b"\x80" + b"\0" * 3 + b"\xff" * 8, tarfile.GNUTYPE_LONGNAME),
        header("pax", b"\xff" * 12, tarfile.XHDTYPE) + bytes(1024),
        header("pax", b"00000000020", tarfile.XHDTYPE) + b"9999999 path=x\n".ljust(512, b"\0"),
        header("../a.png", b"00000000000"),
        header("/a.png", b"00000000000"),
    ],
    ids=range(14),
)
@pytest.mark.timeout(20)
def test_archives_that_lie(tmp_path, content, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "t.tar").write_bytes(content)
    with pytest.raises(ArchiveError, match=r"t\.tar"):
        image_source(tmp_path / "t.tar::a.png")


def test_nothing_but_plain_files_is_in_an_archive(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            member = tarfile.TarInfo(f"{kind[0]}.png")
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
        member = tarfile.TarInfo("a.png")
        member.size = 5
        tar.addfile(member, io.BytesIO(b"right"))
    assert image_source(tmp_path / "t.tar::a.png").read() == b"right"
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
        with pytest.raises(ArchiveError, match="no member"):
            image_source(tmp_path / f"t.tar::{kind[0]}.png")
    found = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}
    assert found == {"t.tar", "cache"}


# --- token stores -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("offsets", lambda a: a[::-1]),
        ("offsets", lambda a: a + 1),
        ("offsets", lambda a: np.where(a == a[1], -1, a)),
        ("offsets", lambda a: a.astype(np.int32)),
        ("sources", lambda a: a - 1),
        ("sources", lambda a: a + 7),
        ("ids", lambda a: a[:-1]),
        ("ids", lambda a: a.reshape(1, -1)),
        ("supervised", lambda a: a.astype(np.uint8)),
        ("numbers", lambda a: a[:0]),
    ],
)
def test_a_store_whose_arrays_do_not_fit_is_refused(tmp_path, name, change):
    token_store([[True] * 3, [True] * 2, [False, True, True]]).save(tmp_path / "s")
    path = tmp_path / "s" / f"{name}.npy"
    np.save(path, change(np.load(path)))
    with pytest.raises(DataError, match="holds no tokens that can be read"):
        TokenStore.load(tmp_path / "s")


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"\0" * 200, b"PK\x03\x04", b"\x80\x04."])
def test_a_store_of_other_files_is_refused(tmp_path, content):
    token_store([[True] * 3]).save(tmp_path / "s")
    (tmp_path / "s" / "ids.npy").write_bytes(content)
    with pytest.raises(DataError, match="holds no tokens that can be read"):
        TokenStore.load(tmp_path / "s")


def test_arrays_that_hold_objects_run_nothing(tmp_path):
    class Mischief:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    token_store([[True] * 3]).save(tmp_path / "s")
    np.save(tmp_path / "s" / "ids.npy", np.array([Mischief()], object), allow_pickle=True)
    with pytest.raises(DataError, match="holds no tokens"):
        TokenStore.load(tmp_path / "s")
    assert not (tmp_path / "made").exists()
