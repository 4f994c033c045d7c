"""Folders that appear whole or not at all."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pixelrag.errors import DataError

MANIFEST = "manifest.json"


@contextlib.contextmanager
def published_folder(out_dir: Path, kind: str) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `out_dir` once the block ends without error.

    A folder of the same kind that stands there is replaced. The block writes a `manifest.json` with
    `{"kind": kind, ...}`, by which that is recognised.

    Raises:
        DataError: `out_dir` is a file, or holds something else; or it cannot be written (a full
            disk, say), in which case nothing is left behind.
    """
    refuse_foreign(out_dir, kind)
    temporary: Path | None = None
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
        fresh, old = temporary / "new", temporary / "old"
        fresh.mkdir()
        yield fresh
        if out_dir.exists():
            os.replace(out_dir, old)
        try:
            os.replace(fresh, out_dir)
        except OSError:
            if old.exists():
                os.replace(old, out_dir)
            raise
    except OSError as error:
        raise DataError(
            f"{out_dir} cannot be written: {error.strerror or error}; nothing was left there"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> str:
    """Write one JSON object a line and return the SHA-256 of the file."""
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def write_manifest(folder: Path, kind: str, entries: Mapping[str, object]) -> None:
    """Write `manifest.json`; it holds no time and no path, so that equal content is equal bytes."""
    text = json.dumps({"kind": kind, **entries}, indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def refuse_foreign(out_dir: Path, kind: str) -> None:
    """Raise DataError if `published_folder` would; worth asking before long work."""
    if not out_dir.exists():
        return
    if not out_dir.is_dir():
        raise DataError(f"{out_dir} is a file; name a folder for the demo's data")
    if not any(out_dir.iterdir()):
        return
    try:
        found = json.loads((out_dir / MANIFEST).read_text(encoding="utf-8")).get("kind")
    except (OSError, ValueError, AttributeError):
        found = None
    if found != kind:
        raise DataError(
            f"{out_dir} holds something that is not the demo's ({kind}) and would be replaced; "
            "name another folder, or remove it"
        )
