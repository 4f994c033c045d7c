"""The checkpoints of a run's folder: which is the newest whole one, which go, what is wrong.

`checkpoint-<step>/` is written by `train/atomic.py`, so a folder of that name was complete once;
disks, copies and people still truncate and alter files, and every resume reads all hashes first.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from pixelrag.errors import CheckpointError
from pixelrag.train import owner
from pixelrag.train.atomic import discard, hidden, inspect, read_manifest

logger = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint-(\d+)")
_LEFTOVER = re.compile(r"\.(?P<name>checkpoint-\d+|best|last)\.(?P<kind>tmp|old|trash)")
# Exports name the process that writes them instead of signing the folder.
_EXPORTS = "best|last|question_encoder|document_encoder|generator"
_EXPORT_LEFTOVER = re.compile(rf"\.(?P<name>{_EXPORTS})\.(?P<kind>part|old)-(?P<pid>\d+)")


def checkpoint_dir(output_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` stands once it is whole."""
    return output_dir / f"checkpoint-{step}"


def verify_dir(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every byte is as it was written.

    Raises:
        CheckpointError: names each missing, truncated or altered file, and the newest earlier
            checkpoint beside it that is whole.
    """
    problems = inspect(path)
    if not problems:
        return read_manifest(path)
    step = _step_of(path)
    earlier = (p for s, p in list_checkpoints(path.parent) if step is None or s < step)
    good = next((p for p in earlier if p.name != path.name and not inspect(p)), None)
    advice = (
        f"the newest good one before it is {good}: use `--checkpoint.resume {good}`"
        if good
        else f"there is no good checkpoint before it in {path.parent}"
    )
    raise CheckpointError(f"{path} is not whole; {advice}\n  " + "\n  ".join(problems))


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every `checkpoint-<step>`, whole or not, newest first."""
    if not output_dir.is_dir():
        return []
    found = [(_step_of(path), path) for path in output_dir.iterdir() if path.is_dir()]
    return sorted(((step, path) for step, path in found if step is not None), reverse=True)


def find_latest(output_dir: Path) -> Path | None:
    """The newest whole checkpoint, or None where there is none at all. For rank 0 alone.

    Newer ones that are broken are passed over with a warning that says what is wrong with them.

    Raises:
        CheckpointError: checkpoints exist, but none is whole: starting from the beginning, and
            over them, is not this function's to decide.
    """
    clean_leftovers(output_dir)
    broken: list[str] = []
    for _, path in list_checkpoints(output_dir):
        problems = inspect(path)
        if not problems:
            for text in broken:
                logger.warning("passed over a broken checkpoint: %s", text)
            return path
        broken.append("; ".join(problems))
    if broken:
        raise CheckpointError(
            f"{output_dir} holds checkpoints, but none is whole; move them away to start from the "
            "beginning:\n  " + "\n  ".join(broken)
        )
    return None


def resolve_resume(resume: str, output_dir: Path) -> Path | None:
    """The checkpoint to go on from by `checkpoint.resume`, verified; None starts afresh. Rank 0.

    Args:
        resume: "auto" (the newest whole one, if any), "never", or a checkpoint's path.
        output_dir: the run's folder.

    Raises:
        CheckpointError: the one named is not whole, none is, or "never" would mix a new run's
            checkpoints with an older run's, from which a later "auto" might go on.
    """
    if resume == "auto":
        return find_latest(output_dir)
    if resume != "never":
        verify_dir(Path(resume))
        return Path(resume)
    existing = list_checkpoints(output_dir)
    if existing:
        raise CheckpointError(
            f"{output_dir} holds checkpoints of an earlier run, the newest {existing[0][1].name}, "
            "and checkpoint.resume is never; choose another output_dir, move them away, or use "
            "`--checkpoint.resume auto`"
        )
    return None


def rotate(
    output_dir: Path,
    keep_last: int,
    *,
    keep_every: int | None = None,
    keep_step: int | None = None,
) -> list[Path]:
    """Delete checkpoints older than the `keep_last` newest good ones; return what went. Rank 0.

    Those of steps that `keep_every` divides stay, and that of `keep_step`, the best.

    Good here means a manifest and files of the right sizes. A broken checkpoint does not count as
    kept, so the only good one never goes, whatever stands beside it.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last}: expected at least 1")
    clean_leftovers(output_dir)
    good, gone = 0, []
    for step, path in list_checkpoints(output_dir):
        stays = step == keep_step or (keep_every is not None and step % keep_every == 0)
        if good >= keep_last and not stays and not path.is_symlink():
            trash = hidden(path, "trash")
            os.rename(path, trash)  # so that a kill half-way leaves no half checkpoint
            discard(trash)
            gone.append(path)
        elif good < keep_last:
            good += not inspect(path, hashes=False)
    return gone


def clean_leftovers(output_dir: Path) -> None:
    """Remove what dead runs left half-way and put back what a replacement had set aside. Rank 0."""
    if not output_dir.is_dir():
        return
    # The parts of an exported RAG model are folders of their own within best/ and last/.
    inner = [p for name in ("best", "last") for p in (output_dir / name).glob(".*")]
    for path in sorted([*output_dir.iterdir(), *inner]):
        match = _LEFTOVER.fullmatch(path.name) or _EXPORT_LEFTOVER.fullmatch(path.name)
        if match is None or not path.is_dir() or path.is_symlink():
            continue
        if "pid" in match.groupdict() and owner.is_running(int(match["pid"])):
            continue
        final = path.with_name(match["name"])
        if match["kind"] == "old" and not final.exists():
            logger.warning("%s: put back; the run that was replacing it died", final)
            os.rename(path, final)
        elif match["kind"] == "tmp" and owner.may_be_alive(path):
            continue
        else:
            logger.warning("%s: removed; an earlier run left it unfinished", path)
            discard(path)


def _step_of(path: Path) -> int | None:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None
