"""From an image file to the patches that Qwen3-VL's vision tower reads. Needs no torchvision."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from pixelrag.data.archives import image_source
from pixelrag.data.images import FORMATS, MAX_ASPECT, MAX_PIXELS, strict_decoding
from pixelrag.errors import DataError


def load_rgb(path: Path) -> Image.Image:
    """Decode an image as a viewer would show it: upright by its EXIF tag, on white, in RGB.

    Raises:
        DataError: missing, truncated, too large or not an image; names the file.
    """
    try:
        with strict_decoding(), Image.open(image_source(path), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(
                    f"{path} has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}; "
                    "cut it into tiles"
                )
            return _on_white(ImageOps.exif_transpose(image))
    except (DataError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except Exception as error:
        # Decoders raise anything at all on broken files.
        reason = str(error) or type(error).__name__
        raise DataError(
            f"{path} cannot be decoded: {reason}. `pixelrag validate` lists every such row"
        ) from error


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return _from_wide(image)
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _from_wide(image: Image.Image) -> Image.Image:
    """16-bit greys by their high byte; Pillow's own conversion would clip them to white."""
    values = np.asarray(image)
    if np.issubdtype(values.dtype, np.floating):
        values = np.nan_to_num(values)  # a shade that is none is black
        values = values * 255 if values.size and values.max() <= 1 else values
    elif values.size and values.max() > 255:
        values = values // 257
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8)).convert("RGB")


def fit_size(
    height: int, width: int, *, factor: int, min_tokens: int, max_tokens: int
) -> tuple[int, int]:
    """Height and width to scale an image to: multiples of `factor` within the token budget.

    Follows Qwen's `smart_resize` (sides rounded, then scaled into the budget), and also holds the
    upper bound where that one does not, for very long images.

    Args:
        height, width: pixels, each at least 1.
        factor: pixels on a side of one token (32 for Qwen3-VL).
        min_tokens, max_tokens: tokens an image becomes; the upper bound wins.

    Raises:
        ValueError: one side is more than 200 times the other.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(f"one side is more than {MAX_ASPECT} times the other")
    area = factor * factor
    rows = max(1, round(height / factor))
    columns = max(1, round(width / factor))
    if rows * columns > max_tokens:
        shrink = math.sqrt(height * width / (max_tokens * area))
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif rows * columns < min_tokens:
        grow = math.sqrt(min_tokens * area / (height * width))
        rows = math.ceil(height * grow / factor)
        columns = math.ceil(width * grow / factor)
    # Rounding a side up to one token, or both up to the minimum, may pass the bound again.
    while rows * columns > max_tokens:
        if rows > columns:
            rows -= 1
        else:
            columns -= 1
    return rows * factor, columns * factor


def fit_image(path: Path, *, factor: int, min_tokens: int, max_tokens: int) -> Image.Image:
    """Load an image and scale it into the token budget (bicubic, antialiased).

    Raises:
        DataError: it cannot be read, or is too long and thin; names the file.
    """
    image = load_rgb(path)
    try:
        height, width = fit_size(
            image.height, image.width, factor=factor, min_tokens=min_tokens, max_tokens=max_tokens
        )
    except ValueError as error:
        raise DataError(
            f"{path} ({image.width} x {image.height} pixels): {error}; cut it into tiles"
        ) from error
    if (width, height) == image.size:
        return image
    return image.resize((width, height), Image.Resampling.BICUBIC)
