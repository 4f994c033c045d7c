"""Who is writing a temporary folder: tells what a dead run left from what a live one writes.

The signature holds host name, process id and, from `/proc`, the process's start time, because ids
are reused. A process of another machine cannot be asked; its folder counts as alive for a day.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

FILE = ".owner.json"
_UNREACHABLE_SECONDS = 24 * 3600.0


def sign(folder: Path) -> None:
    """Write this process's signature into `folder`."""
    pid = os.getpid()
    record = {"host": socket.gethostname(), "pid": pid, "started": _start_time(pid)}
    (folder / FILE).write_text(json.dumps(record), encoding="utf-8")


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
    if record["host"] != socket.gethostname():
        return time.time() - folder.stat().st_mtime < _UNREACHABLE_SECONDS
    return _live_local_pid(record) is not None


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
    if record is None or record["host"] != socket.gethostname():
        return None
    pid = record["pid"]
    if not is_running(pid):
        return None
    started = _start_time(pid)
    return pid if started is None or started == record.get("started") else None


def _start_time(pid: int) -> int | None:
    """When `pid` started, in clock ticks after boot (proc(5)); None without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the command in parentheses and may hold spaces and parentheses itself.
    return int(stat.rpartition(")")[2].split()[19])
