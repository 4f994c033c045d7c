"""The record of a run: `metrics.jsonl`, and through it the optional sinks of `train/sinks.py`.

One JSON object a line, `step` first, each line whole on disk or absent. Resuming at step s drops
every line after s in one atomic replacement, so the file of a run that was interrupted equals that
of one that was not. If it cannot be written, the run stops: nothing else tells what happened.

Rank 0 writes. NaN and infinities, which JSON lacks, become null, and the line names them under
`nonfinite`: {"step": 7, "train/loss": null, "nonfinite": {"train/loss": "nan"}}.
"""

from __future__ import annotations

import json
import logging
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pixelrag.errors import CheckpointError
from pixelrag.train.sinks import (
    METRICS_FILE,
    SINKS,
    GuardedSink,
    SinkContext,
    check_sinks,
    redact,
)

logger = logging.getLogger(__name__)

RUN_ID_FILE = "run_id"


class MetricsWriter:
    """Writes figures to `metrics.jsonl` and to the optional sinks; a no-op on ranks above 0.

    Args:
        output_dir: the run's folder; created when missing.
        rank: this process's rank.
        resumed_step: the step of the checkpoint the run goes on from: later lines are dropped.
            None is a fresh start: an older `metrics.jsonl` is kept as `metrics.<n>.jsonl`.
        evaluation_due: that step's evaluation is to be made (again): its line is dropped too.
        sinks: names out of `SINKS`.
        config: the resolved configuration, shown by sinks that show one; secrets are masked.

    Raises:
        ConfigError: an unknown sink, or one whose package is not installed (on every rank).
        CheckpointError: `metrics.jsonl` cannot be opened or rewritten.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        rank: int = 0,
        resumed_step: int | None = None,
        evaluation_due: bool = False,
        sinks: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        check_sinks(sinks)
        self._fd: int | None = None
        self._sinks: list[GuardedSink] = []
        self.path = output_dir / METRICS_FILE
        if rank != 0:
            return
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            if resumed_step is None:
                _set_aside(self.path)
            else:
                truncate_after(self.path, resumed_step, evaluation_due=evaluation_due)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            self._size = os.fstat(self._fd).st_size
            run_id = _run_id(output_dir, fresh=resumed_step is None)
        except OSError as error:
            self.close()
            raise _cannot_write(self.path, error) from error
        context = SinkContext(output_dir, run_id, resumed_step, redact(config or {}))
        self._sinks = [GuardedSink(name, SINKS[name][1], context) for name in dict.fromkeys(sinks)]

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line and hand its numbers to the sinks.

        Args:
            step: optimizer steps done.
            values: name -> number (also a tensor or NumPy scalar), bool, string or None.

        Raises:
            CheckpointError: the line could not be written (a full disk); none of it stays.
        """
        if self._fd is None:
            return
        plain = {name: _plain(value) for name, value in values.items()}
        self._append(encode_line(step, plain))
        numbers = {
            name: float(value) for name, value in plain.items() if isinstance(value, int | float)
        }
        for sink in self._sinks:
            sink.write(step, numbers)

    def sync(self) -> None:
        """Force what was written onto the disk, before a checkpoint relies on it."""
        if self._fd is not None:
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise _cannot_write(self.path, error) from error

    def close(self) -> None:
        """Close the file and the sinks; safe to call twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, line: str) -> None:
        data = line.encode()
        assert self._fd is not None  # open between `__enter__` and `close`
        try:
            done = 0
            while done < len(data):  # a disk that fills takes a part, then fails
                done += os.write(self._fd, data[done:])
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            raise _cannot_write(self.path, error) from error
        self._size += len(data)


def encode_line(step: int, values: Mapping[str, Any]) -> str:
    """One line of `metrics.jsonl`, valid JSON whatever the floats are.

    Raises:
        ValueError: a value named `step` or `nonfinite`.
    """
    reserved = {"step", "nonfinite"} & values.keys()
    if reserved:
        raise ValueError(f"reserved metric names: {', '.join(sorted(reserved))}")
    bad = {n: str(v) for n, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    record = {"step": step, **{name: None if name in bad else v for name, v in values.items()}}
    if bad:
        record["nonfinite"] = bad
    return json.dumps(record, allow_nan=False) + "\n"


def truncate_after(path: Path, step: int, *, evaluation_due: bool = False) -> None:
    """Drop the lines of `path` after `step`, and torn ones, by replacing the file at once.

    With `evaluation_due`, of the lines of `step` those that are not of its training go too.

    A torn last line is what a killed process leaves; a torn line elsewhere is dropped with a
    warning that names it. A missing file stays missing.
    """
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    kept = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            last = step - 1 if evaluation_due and "train/loss" not in record else step
            keep = record["step"] <= last
        except (ValueError, KeyError, TypeError):
            if number < len(lines):  # the piece after the last newline is a torn write
                logger.warning("%s:%d: not a metrics line, dropped: %r", path, number, line[:80])
            continue
        if keep:
            kept.append(line + b"\n")
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _plain(value: Any) -> bool | int | float | str | None:
    return value if isinstance(value, bool | int | float | str | None) else float(value)


def _set_aside(path: Path) -> None:
    if not path.exists():
        return
    number = 1
    while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    os.replace(path, kept)
    logger.info("a fresh run: the figures of the earlier one are kept in %s", kept)


def _run_id(output_dir: Path, *, fresh: bool) -> str:
    """The id that W&B and trackio know this run by; a resumed run keeps its own."""
    path = output_dir / RUN_ID_FILE
    if not fresh and path.exists() and (known := path.read_text().strip()):
        return known
    run_id = uuid.uuid4().hex[:8]
    path.write_text(run_id + "\n")
    return run_id


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path}: cannot be written ({error.strerror or error}); the run stops here, because its "
        "record would have a hole. Free space, or mend permissions, and go on with "
        "`--checkpoint.resume auto`"
    )
