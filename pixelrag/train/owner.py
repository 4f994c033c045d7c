"""Who is writing a folder: tells what a dead run left from what a live one writes.

The signature holds host name, process id and, from `/proc`, the process's start time, because ids
are reused, and its namespace, because containers count ids each for themselves. A process that is
out of sight cannot be asked: a temporary folder of one counts as alive for a day, a run's folder as
long as its signature is renewed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pixelrag.errors import CheckpointError

logger = logging.getLogger("pixelrag")

FILE = ".owner.json"
_UNREACHABLE_SECONDS = 24 * 3600.0
_BEAT_SECONDS = 10.0
_SILENT_BEATS = 3
_MOMENT_SECONDS = 0.5


def sign(folder: Path) -> None:
    """Write this process's signature into `folder`."""
    (folder / FILE).write_text(_signature(), encoding="utf-8")


@contextlib.contextmanager
def held(
    folder: Path, option: str = "output_dir", *, beat_seconds: float = _BEAT_SECONDS
) -> Iterator[None]:
    """Hold a run's folder for this process; no lock, for shared file systems often have none.

    ``option`` named it.

    A killed run holds nothing: if it is out of sight, its signature is watched for three beats at
    most. The folder is made if need be, and goes again if nothing was put into it.

    Raises:
        CheckpointError: another process that lives holds it, or it cannot be written.
    """
    is_new, mine = not folder.exists(), _signature()
    file = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while not _create(file, mine):
            _remove_dead(file, option, beat_seconds)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be written ({error.strerror or error})") from error
    over = threading.Event()

    def beat() -> None:
        while not over.wait(beat_seconds):
            with contextlib.suppress(OSError):
                os.utime(file)

    thread = threading.Thread(target=beat, name="pixelrag-owner", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with contextlib.suppress(OSError):
            if file.read_text(encoding="utf-8") == mine:
                file.unlink()
            if is_new:
                folder.rmdir()


def _create(file: Path, text: str) -> bool:
    try:
        with open(file, "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        return False
    return True


def _remove_dead(file: Path, option: str, beat_seconds: float) -> None:
    with contextlib.suppress(FileNotFoundError):  # it has just gone
        if not file.stat().st_size:
            time.sleep(_MOMENT_SECONDS)  # it is being written, or a torn one
        text, record = file.read_text(encoding="utf-8"), _read(file.parent)
        if _live_local_pid(record) if _is_here(record) else _beats(file, beat_seconds):
            who = f"process {record['pid']} of {record['host']}" if record else "another process"
            raise CheckpointError(
                f"{file.parent}: {who} writes there and lives; two runs cannot share a folder. "
                f"Give each its own {option}, or end that one"
            )
        aside = file.with_name(f"{FILE}.{os.getpid()}")
        os.rename(file, aside)  # of several that find it dead, one gets it
        if aside.read_text(encoding="utf-8") == text:
            aside.unlink()
        else:
            os.rename(aside, file)  # somebody was faster, and lives


def _beats(file: Path, beat_seconds: float) -> bool:
    """Whether the signature of a process that is out of sight is renewed; may take three beats."""
    stamp, age = file.stat().st_mtime_ns, _age(file)
    wait = _SILENT_BEATS * beat_seconds
    if age > wait:
        return False
    logger.info("%s: signed %.0f s ago on a host out of sight; does it live?", file, age)
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        time.sleep(beat_seconds / 10)
        if file.stat().st_mtime_ns != stamp:
            return True
    return False


def _age(path: Path) -> float:
    """Seconds since a file or folder changed, by the file system's clock: hosts' differ or jump."""
    probe = path.with_name(f"{FILE}.{os.getpid()}")
    probe.touch()
    try:
        return (probe.stat().st_mtime_ns - path.stat().st_mtime_ns) / 1e9
    finally:
        probe.unlink()


def other_live_process(folder: Path) -> int | None:
    """The id of another process of this machine that lives and is writing `folder`, if any."""
    pid = _live_local_pid(_read(folder))
    return None if pid == os.getpid() else pid


def may_be_alive(folder: Path) -> bool:
    """Whether whoever writes `folder` lives, or is on another machine and wrote it lately.

    A folder without a legible signature belongs to nobody: it is dead.
    """
    record = _read(folder)
    if record is None:
        return False
    if not _is_here(record):
        return _age(folder) < _UNREACHABLE_SECONDS
    return _live_local_pid(record) is not None


def _signature() -> str:
    pid = os.getpid()
    return json.dumps(_here() | {"pid": pid, "started": _start_time(pid)})


def _here() -> dict[str, Any]:
    """Where process ids mean the same."""
    namespace = None
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return {"host": socket.gethostname(), "namespace": namespace}


def _is_here(record: dict | None) -> bool:
    return record is not None and all(record.get(k) == v for k, v in _here().items())


def _read(folder: Path) -> dict | None:
    try:
        record = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return {"host": str(record["host"]), "pid": int(record["pid"]), **record}
    except (OSError, ValueError, KeyError, TypeError):  # none, or torn by the death it tells of
        return None


def is_running(pid: int) -> bool:
    """Whether a process of this id lives on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's: it lives
        return True
    return True


def _live_local_pid(record: dict | None) -> int | None:
    if record is None or not _is_here(record):
        return None
    pid = record["pid"]
    if not is_running(pid):
        return None
    started = _start_time(pid)
    return pid if started is None or started == record.get("started") else None


def _start_time(pid: int) -> int | None:
    """When `pid` started, in clock ticks after boot (proc(5)); -1: a zombie; None: no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the command in parentheses and may hold spaces and parentheses itself.
    fields = stat.rpartition(")")[2].split()
    return -1 if fields[0] == "Z" else int(fields[19])
