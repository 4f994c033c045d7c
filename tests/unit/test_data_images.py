"""Images are decoded to the last row; what is broken is told from what is merely unusual."""

import errno
import os
import struct
import threading
import warnings
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from pixelrag.data import images
from pixelrag.data.images import check_image, check_images, image_progress_bar, strict_decoding


def noise(size: tuple[int, int] = (48, 40), mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(kind: str, image: Image.Image | None = None) -> bytes:
    buffer = BytesIO()
    (image or noise()).save(buffer, kind)
    return buffer.getvalue()


def verdict(path: Path) -> str | None:
    with strict_decoding():
        return check_image(path)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds one compressed byte."""
    out = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for name, body in ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0")), (b"IEND", b"")):
        out += struct.pack(">I", len(body)) + name + body
        out += struct.pack(">I", zlib.crc32(name + body))
    return out


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_whole_images_pass(tmp_path, kind):
    path = tmp_path / "image.bin"  # the name says nothing: the content does
    path.write_bytes(encoded(kind))
    assert verdict(path) is None


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "I", "F"])
def test_every_mode_that_becomes_rgb_passes(tmp_path, mode):
    image = noise(mode="L").convert("I").convert(mode) if mode == "I;16" else noise(mode=mode)
    path = tmp_path / "image"
    image.save(path, "TIFF" if mode in ("I", "F") else "PNG")
    with Image.open(path) as reread:
        reread.convert("RGB")  # this is what training will do
    assert verdict(path) is None


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.filterwarnings("error")
def test_truncated_anywhere_is_reported_or_harmless(tmp_path, kind):
    whole = encoded(kind)
    pixels = np.asarray(Image.open(BytesIO(whole)).convert("RGB"))
    path = tmp_path / "image"
    num_reported = 0
    for length in {*range(1, len(whole), max(1, len(whole) // 60)), len(whole) - 1}:
        path.write_bytes(whole[:length])
        if verdict(path) is not None:
            num_reported += 1
            continue
        # Only a cut behind the last pixel may pass.
        decoded = Image.open(BytesIO(whole[:length])).convert("RGB")
        assert np.array_equal(np.asarray(decoded), pixels), length
    assert num_reported > 50


def test_kinds_of_broken_files_are_told_apart(tmp_path):
    cases = {
        "empty": (b"", "is empty (0 bytes)"),
        "text": (b"hello, I am no image", "is no image of a known format"),
        "html": (b"<!DOCTYPE html><html>404</html>", "is no image of a known format"),
        "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no image of a known"),
        "no width": (png_header(0, 5), ""),
        "no height": (png_header(5, 0), ""),
        "short": (png_header(50, 50), "cannot be decoded: "),
        "bomb": (png_header(30_000, 2_000), "has more than 50,000,000 pixels"),
        "huge bomb": (png_header(60_000, 60_000), "has more than 50,000,000 pixels"),
    }
    for name, (content, reason) in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        found = verdict(path)
        assert found is not None, name
        assert reason in found, (name, found)
    assert verdict(tmp_path / "absent") == "does not exist"
    assert verdict(tmp_path / "text" / "below-a-file").startswith("cannot be read: Not a directory")
    assert verdict(tmp_path / ("n" * 300)).startswith("cannot be read: File name too long")
    assert verdict(tmp_path) == "not a file"


def test_a_named_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert verdict(tmp_path / "pipe") == "not a file"


def test_exhausted_file_handles_are_not_blamed_on_the_image(tmp_path, monkeypatch):
    noise().save(tmp_path / "a.png")

    def refuse(*args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        verdict(tmp_path / "a.png")


def test_settings_of_pillow_are_set_and_restored_even_after_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    whole = encoded("JPEG")
    path = tmp_path / "cut.jpg"
    path.write_bytes(whole[: len(whole) // 2])
    assert "cannot be decoded" in verdict(path)
    assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES) == (None, True)
    filters = list(warnings.filters)
    with pytest.raises(KeyError), strict_decoding():
        raise KeyError
    assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES) == (None, True)
    assert warnings.filters == filters


def test_many_images_in_parallel_each_once_with_progress(tmp_path, monkeypatch):
    paths = []
    for i in range(100):
        paths.append(tmp_path / f"{i}.png")
        paths[-1].write_bytes(encoded("PNG") if i % 10 else b"broken")
    seen, threads = [], set()

    def counting(path):
        seen.append(path)
        threads.add(threading.current_thread().name)
        return check_image(path)

    monkeypatch.setattr(images, "check_image", counting)
    reports = []
    bad = check_images(paths, lambda done, total: reports.append((done, total)), workers=3)
    assert list(bad) == paths[::10]
    assert sorted(seen) == sorted(paths)
    assert threads <= {f"pixelrag-images_{i}" for i in range(3)}
    assert reports == [(32, 100), (64, 100), (96, 100), (100, 100)]
    assert check_images([]) == {}


def test_progress_bar_is_silent_off_a_terminal(tmp_path, capsys):
    noise().save(tmp_path / "a.png")
    with image_progress_bar() as progress:
        assert check_images([tmp_path / "a.png"], progress) == {}
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""
