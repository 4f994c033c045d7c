"""Whether an image file can be trained on: it is decoded, not merely opened.

A header says nothing about the rest of the file, so every image is decoded once. Pillow lets go of
the interpreter lock while it decodes, so threads are enough.
"""

import contextlib
import errno
import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageFile, ImageOps

from pixelrag.data.archives import ArchiveError, image_source
from pixelrag.data.roots import Roots

# A full-page screenshot of 1,280 x 20,000 has 26 million; decoded, this limit takes 200 MB.
MAX_PIXELS = 50_000_000
# Beyond this ratio of sides Qwen3-VL's own preprocessing gives up as well.
MAX_ASPECT = 200
# Formats that Pillow decodes by itself. EPS, for one, would start Ghostscript on the user's file.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# Modes whose way to RGB is known to work; any other is tried.
_TO_RGB = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
# The machine is out of something: no image is to blame.
_MACHINE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_BLOCK = 32

Progress = Callable[[int, int], None]
"""Called as `progress(done, total)`, from one thread."""

_settings_lock = threading.RLock()


@contextlib.contextmanager
def strict_decoding(max_pixels: int = MAX_PIXELS) -> Iterator[None]:
    """Make Pillow refuse truncated files and images above `max_pixels`, then restore its settings.

    The settings are global to the process, and other libraries loosen them.
    """
    with _settings_lock, warnings.catch_warnings():
        before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
        Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = max_pixels, False
        # What Pillow mutters about a file is either an error as well or of no matter.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
        # Above the limit Pillow only warns, and raises above twice the limit.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = before


def check_image(path: Path) -> str | None:
    """Decode one image, of a file or in an archive. Returns what is wrong with it, or None.

    Call inside `strict_decoding`.

    Raises:
        OSError, MemoryError: the machine ran out of memory or file handles.
    """
    try:
        source = image_source(path)
        # A named pipe would block for ever, so look before opening.
        if source == path and not stat.S_ISREG(path.stat().st_mode):
            return "not a file"
        with Image.open(source, formats=FORMATS) as image:
            if min(image.size) < 1:
                return f"has no pixels ({image.width} x {image.height})"
            if max(image.size) > MAX_ASPECT * min(image.size):
                size = f"{image.width} x {image.height} pixels"
                return f"has {size}, one side more than {MAX_ASPECT} times the other; cut it"
            image.load()
            # As training does: broken EXIF data would stop it at this image.
            ImageOps.exif_transpose(image, in_place=True)
            if image.mode not in _TO_RGB:
                image.convert("RGB")
    except FileNotFoundError:
        return "does not exist"
    except ArchiveError as error:
        return f"cannot be read: {error}"
    except Image.UnidentifiedImageError:
        if (len(source.getbuffer()) if isinstance(source, BytesIO) else path.stat().st_size) == 0:
            return "is empty (0 bytes)"
        return f"is no image of a known format ({', '.join(FORMATS)})"
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        return f"has more than {MAX_PIXELS:,} pixels; cut it into tiles"
    except MemoryError:
        raise
    except Exception as error:
        # A broken file makes decoders raise anything at all: what they raise is the report.
        if isinstance(error, OSError) and error.errno in _MACHINE:
            raise
        if isinstance(error, OSError) and error.strerror:
            return f"cannot be read: {error.strerror}"
        return f"cannot be decoded: {error or type(error).__name__}"
    return None


def check_images(
    paths: Sequence[Path],
    progress: Progress | None = None,
    workers: int | None = None,
    *,
    roots: Roots | None = None,
) -> dict[Path, str]:
    """Decode every image in parallel.

    Args:
        paths: distinct paths.
        progress: told about every few images.
        workers: threads (default: one a core, at most 16).
        roots: where images may lie; one that lies elsewhere is not opened. None: anywhere.

    Returns:
        What is wrong, for the broken images only.
    """
    bad: dict[Path, str] = {}
    if not paths:
        return bad
    # Blocks keep the queue small: a million futures would weigh a gigabyte.
    blocks = [paths[start : start + _BLOCK] for start in range(0, len(paths), _BLOCK)]
    done = 0
    workers = workers or min(16, os.cpu_count() or 1)
    with strict_decoding(), ThreadPoolExecutor(workers, "pixelrag-images") as pool:
        checked = pool.map(lambda block: _check_block(block, roots), blocks)
        for block, reasons in zip(blocks, checked, strict=True):
            bad |= {path: reason for path, reason in zip(block, reasons, strict=True) if reason}
            done += len(block)
            if progress is not None:
                progress(done, len(paths))
    return bad


def _check_block(paths: Sequence[Path], roots: Roots | None) -> list[str | None]:
    return [(roots and roots.fault(path)) or check_image(path) for path in paths]


def count_pixels(paths: Sequence[Path], workers: int | None = None) -> dict[Path, int]:
    """Width times height of images that `check_images` has found to be whole, by their headers."""
    workers = workers or min(16, os.cpu_count() or 1)
    with strict_decoding(), ThreadPoolExecutor(workers, "pixelrag-images") as pool:
        return dict(zip(paths, pool.map(_pixels, paths), strict=True))


def _pixels(path: Path) -> int:
    with Image.open(image_source(path), formats=FORMATS) as image:
        return image.width * image.height


@contextlib.contextmanager
def image_progress_bar(description: str = "Opening images") -> Iterator[Progress]:
    """A rich progress bar on standard error for `check_images`; draws nothing off a terminal."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        progress.TextColumn(description),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
