"""What a run has logged, by figure; steps that were done again count once, the last time."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pixelrag.data.lines import file_labels
from pixelrag.errors import DataError

_METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Run:
    """A run's figures.

    Attributes:
        name: tells it from the other runs.
        series: figure -> step -> value, NaN where the value was not finite.
        resumed: steps after which it was gone on with, where the record shows it.
    """

    name: str
    series: dict[str, dict[int, float]] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The last one that was logged."""
        return max((step for values in self.series.values() for step in values), default=0)

    def points(self, figure: str) -> tuple[list[int], list[float]]:
        """Steps in order and the figure's values; nothing where it was not logged."""
        values = self.series.get(figure, {})
        steps = sorted(values)
        return steps, [values[step] for step in steps]

    def finite(self, figure: str) -> list[float]:
        """Its finite values in order."""
        return [value for value in self.points(figure)[1] if math.isfinite(value)]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read `metrics.jsonl` of each run.

    Args:
        paths: folders of runs, or their metrics files.

    Raises:
        DataError: a run is named twice, is not there, has logged nothing, or has a broken line.
    """
    files = [path / _METRICS if path.is_dir() else path for path in paths]
    for path, file in zip(paths, files, strict=True):
        if not file.is_file():
            raise DataError(f"{path} is no run: it has no {_METRICS}; name a run's output_dir")
    folders = [file.resolve().parent if file.name == _METRICS else file for file in files]
    if len(set(folders)) < len(folders):
        raise DataError(f"a run is named twice: {', '.join(map(str, paths))}")
    names = file_labels([str(folder) for folder in folders])
    return [_read(file, name) for file, name in zip(files, names, strict=True)]


def _read(path: Path, name: str) -> Run:
    run, last = Run(name), 0
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            step = int(record.pop("step"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines):  # it is being written, or its writer was killed
                continue
            raise DataError(f"{path}:{number}: no line of a run's record: {line[:80]!r}") from error
        if step < last:
            # Gone on with from an earlier step: what was logged from there on did not happen.
            run.resumed.append(step - 1)
            for values in run.series.values():
                for later in [known for known in values if known >= step]:
                    del values[later]
        last = step
        broken = record.pop("nonfinite", {})
        for figure, value in record.items():
            if figure in broken:
                run.series.setdefault(figure, {})[step] = math.nan
            elif isinstance(value, int | float) and not isinstance(value, bool):
                run.series.setdefault(figure, {})[step] = float(value)
    if not any(run.series.values()):
        raise DataError(f"{path} holds no figures yet; a run logs every logging.every_steps steps")
    return run
