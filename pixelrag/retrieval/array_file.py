"""Arrays as `np.savez` writes them: stored as they are, so none can be larger than its file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file, holds objects, or says that it holds more than it does.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("its arrays are compressed; a small file may unpack to any size")
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, EOFError, KeyError, MemoryError, NotImplementedError) as error:
        raise ValueError(f"not a whole file of arrays: {error}") from error
