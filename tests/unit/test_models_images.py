"""Image files to RGB, and RGB to the size that the token budget allows."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from pixelrag.errors import DataError
from pixelrag.models.images import fit_image, fit_size, load_rgb


def _saved(image: Image.Image, path: Path, **options: object) -> Path:
    image.save(path, **options)
    return path


def test_alpha_lies_on_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    shown = load_rgb(_saved(image, tmp_path / "a.png"))
    assert shown.mode == "RGB"
    assert [shown.getpixel((x, 0)) for x in (0, 1)] == [(255, 0, 0), (255, 255, 255)]


def test_grey_with_alpha_and_palette_with_transparency(tmp_path: Path) -> None:
    grey = Image.new("LA", (1, 1), (0, 128))
    assert load_rgb(_saved(grey, tmp_path / "la.png")).getpixel((0, 0)) == (127, 127, 127)
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([10, 20, 30] + [0] * 765)
    assert load_rgb(_saved(palette, tmp_path / "p.png")).getpixel((0, 0)) == (10, 20, 30)
    clear = _saved(palette, tmp_path / "pt.png", transparency=0)
    assert load_rgb(clear).getpixel((0, 0)) == (255, 255, 255)


def test_cmyk_and_bilevel(tmp_path: Path) -> None:
    cmyk = Image.new("CMYK", (8, 8), (0, 0, 0, 0))
    colour = load_rgb(_saved(cmyk, tmp_path / "c.jpg")).getpixel((4, 4))
    assert min(colour) > 250
    bits = Image.new("1", (1, 1), 1)
    assert load_rgb(_saved(bits, tmp_path / "b.png")).getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bit_grey_keeps_its_shade(tmp_path: Path) -> None:
    values = np.array([[0, 0x8080, 0xFFFF]], dtype=np.uint16)
    shown = load_rgb(_saved(Image.fromarray(values), tmp_path / "g.png"))
    assert [shown.getpixel((x, 0))[0] for x in range(3)] == [0, 128, 255]


def test_exif_orientation_turns_the_image(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 20), "black")
    image.paste("white", (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show rotated by 90 degrees clockwise
    shown = load_rgb(_saved(image, tmp_path / "e.jpg", exif=exif, quality=95))
    assert shown.size == (20, 40)
    assert shown.getpixel((10, 5))[0] > 200
    assert shown.getpixel((10, 35))[0] < 50


def test_broken_files_are_named(tmp_path: Path) -> None:
    whole = _saved(Image.new("RGB", (64, 64), "red"), tmp_path / "whole.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "folder.png").mkdir()
    for name in ("cut.png", "text.png", "folder.png"):
        with pytest.raises(DataError, match=rf"{name} cannot be decoded"):
            load_rgb(tmp_path / name)
    with pytest.raises(DataError, match=r"gone\.png does not exist"):
        load_rgb(tmp_path / "gone.png")


def test_truncated_file_is_refused_whatever_other_libraries_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    whole = _saved(Image.fromarray(pixels), tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.jpg cannot be decoded"):
        load_rgb(tmp_path / "cut.jpg")


def test_decompression_bomb_is_refused(tmp_path: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    (tmp_path / "bomb.png").write_bytes(bomb)
    with pytest.raises(DataError, match=r"bomb\.png"):
        load_rgb(tmp_path / "bomb.png")


@given(
    height=st.integers(1, 4000),
    width=st.integers(1, 4000),
    bounds=st.tuples(st.integers(1, 2000), st.integers(1, 2000)).map(sorted),
)
def test_size_holds_the_budget(height: int, width: int, bounds: list[int]) -> None:
    lowest, highest = bounds
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match="200 times"):
            fit_size(height, width, factor=32, min_tokens=lowest, max_tokens=highest)
        return
    got = fit_size(height, width, factor=32, min_tokens=lowest, max_tokens=highest)
    assert got[0] % 32 == got[1] % 32 == 0
    assert 1 <= got[0] * got[1] // 1024 <= highest
    # Ordinary pages get the size that Qwen's own preprocessing gives them.
    theirs = smart_resize(height, width, 32, lowest * 1024, highest * 1024)
    if min(height, width) >= 32 and 0 < theirs[0] * theirs[1] <= highest * 1024:
        assert got == theirs


def test_square_stays_square_at_a_tight_budget() -> None:
    for side in range(20, 200):
        height, width = fit_size(side, side, factor=32, min_tokens=4, max_tokens=4)
        assert (height, width) == (64, 64)


def test_pixels_equal_transformers_own_resize(tmp_path: Path, tiles: list[Path]) -> None:
    processor = Qwen2VLImageProcessorPil(
        patch_size=16, size={"shortest_edge": 4096, "longest_edge": 12 * 1024}
    )
    for path in tiles:
        theirs = processor([Image.open(path)], return_tensors="np")
        fitted = fit_image(path, factor=32, min_tokens=4, max_tokens=12)
        ours = processor([fitted], do_resize=False, return_tensors="np")
        assert (ours["image_grid_thw"] == theirs["image_grid_thw"]).all()
        np.testing.assert_allclose(ours["pixel_values"], theirs["pixel_values"], atol=1e-6)


def test_long_thin_image_is_an_error(tmp_path: Path) -> None:
    path = _saved(Image.new("RGB", (2001, 10)), tmp_path / "thin.png")
    with pytest.raises(DataError, match=r"thin\.png \(2001 x 10 pixels\).*cut it into tiles"):
        fit_image(path, factor=32, min_tokens=1, max_tokens=64)
