"""Arrays in numpy's files, read so that whatever is wrong with a file is a ValueError."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def map_array(path: Path) -> np.ndarray[Any, Any]:
    """The array of an .npy file, mapped: no larger than its file, and read where it is used.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file, holds objects, or less than it says.
    """
    with _as_value_error():
        return np.lib.format.open_memmap(path, mode="r")


def read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of an .npz file by name, as `np.savez` writes them: stored, so that none can be
    larger than the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file, holds objects, or less than it says.
    """
    with _as_value_error():
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("its arrays are compressed; a small file may unpack to any size")
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}


@contextlib.contextmanager
def _as_value_error() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:
        # What Python's tokenizer (numpy reads headers by it) and zipfile raise is a zoo.
        reason = str(error) or type(error).__name__
        raise ValueError(f"not a whole file of arrays: {reason}") from error
