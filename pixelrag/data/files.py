"""The data files behind a path: the file itself, or those of a folder by PixelRAG's conventions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pixelrag.data.lines import StrPath
from pixelrag.errors import DataError

Part = Literal["train", "eval", "test", "text"]


def data_files(path: StrPath, part: Part) -> list[Path]:
    """The JSONL files of a path.

    Args:
        path: a file, taken as it is; or a folder.
        part: what of a folder: `train`, `eval` or `test` is `<part>_hn.jsonl` (with mined hard
            negatives), else `<part>.jsonl`. `text` is every `*/filtered_hn.jsonl`, else every
            `*.jsonl`, by name.

    Raises:
        DataError: the folder has no such file.
    """
    folder = Path(path)
    if not folder.is_dir():
        return [folder]
    patterns = ["*/filtered_hn.jsonl", "*.jsonl"]
    if part != "text":
        patterns = [f"{part}_hn.jsonl", f"{part}.jsonl"]
    for pattern in patterns:
        if found := sorted(folder.glob(pattern)):
            return found
    raise DataError(f"{folder} is a folder without {' or '.join(patterns)}; name the JSONL file")


def files_of(paths: Sequence[StrPath], part: Part) -> list[Path]:
    """`data_files` of several paths, one after the other."""
    return [file for path in paths for file in data_files(path, part)]
