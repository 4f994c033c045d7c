"""Files that are whole or as they were."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from pixelrag.retrieval import durable


def killed_at(name: str, path: Path) -> None:
    """A child that puts a file and is killed when it comes to a call of `os`, or in the writing."""
    child = os.fork()
    if child == 0:

        def kill(*args: object, **kwargs: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def write(temporary: Path) -> None:
            temporary.write_bytes(b"new")
            if name == "write":
                kill()

        if name != "write":
            setattr(os, name, kill)
        durable.put(path, write)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("name", ["write", "fsync", "replace"])
def test_killed_before_the_renaming_the_old_file_stays(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old content")
    killed_at(name, path)
    assert path.read_bytes() == b"old content"
    durable.put(path, lambda temporary: temporary.write_bytes(b"newer") and None)
    assert path.read_bytes() == b"newer"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_fails_leaves_the_old_file_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old content")

    def write(temporary: Path) -> None:
        temporary.write_bytes(b"ha")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        durable.put(path, write)
    assert path.read_bytes() == b"old content"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_content_reaches_the_disk_before_the_name(tmp_path: Path, monkeypatch) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, name=name, real=real: (calls.append(name), real(*a))[1]
        )
    durable.put_text(tmp_path / "file", "text é")
    assert calls == ["fsync", "replace", "fsync"]
    assert (tmp_path / "file").read_text(encoding="utf-8") == "text é"
