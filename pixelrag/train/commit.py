"""Which commit of pixelrag runs, where it runs from a checkout of its own."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def commit() -> str | None:
    """The commit's hash, "-dirty" where tracked files differ; None for an installed copy."""
    # An installed package may lie in a checkout of something else, which does not track it.
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    found, changed = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "-uno", ".")
    return None if found is None else found + ("-dirty" if changed else "")


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(_PACKAGE), *words], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None  # no git here
    return done.stdout.strip() if done.returncode == 0 else None
