"""Optional destinations of a run's figures: TensorBoard, Weights & Biases, trackio.

`metrics.jsonl` (`train/metrics_writer.py`) is the record; these are conveniences. Asking for one
whose package is missing is a ConfigError before training starts; one that fails later warns once
and never stops training. The loggers' packages are imported here and nowhere else.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pixelrag.config.problems import URL_USER
from pixelrag.errors import ConfigError

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
_SECRET_KEY = re.compile(r"(^|_)(token|secret|password|passwd|api_?key|credentials?)$", re.I)


class Sink(Protocol):
    """One destination of figures."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_sinks(names: Sequence[str]) -> None:
    """Raise ConfigError, all at once, for sinks that are unknown or whose package is missing."""
    problems = []
    for name in names:
        if name not in SINKS:
            problems.append(f"logging: unknown sink {name!r}, expected one of {', '.join(SINKS)}")
            continue
        # A folder named wandb/ beside the script imports as an empty package, without an origin.
        spec = importlib.util.find_spec(SINKS[name][0])
        if spec is None or spec.origin is None:
            problems.append(
                f"logging.{name}: the package {SINKS[name][0]!r} is not installed; run "
                f"`pip install 'pixelrag-trainer[{name}]'`, or set logging.{name} to false"
            )
    if problems:
        raise ConfigError("\n".join(problems))


def redact(value: Any) -> Any:
    """A copy of a configuration with secrets masked: keys such as `hf_token`, URLs with users."""
    if isinstance(value, Mapping):
        return {
            key: "***" if _SECRET_KEY.search(str(key)) and item is not None else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if isinstance(value, str):
        return URL_USER.sub(r"\1***@", value)
    return value if isinstance(value, int | float | bool | None) else str(value)


class SinkContext:
    """What a sink is opened with."""

    def __init__(
        self, output_dir: Path, run_id: str, resumed_step: int | None, config: dict[str, Any]
    ) -> None:
        self.output_dir = output_dir
        self.run_id = run_id
        self.run_name = f"{output_dir.resolve().name}-{run_id}"
        self.resumed_step = resumed_step
        self.config = config


class GuardedSink:
    """A sink that warns the first time it fails and is otherwise silent about it."""

    def __init__(
        self, name: str, factory: Callable[[SinkContext], Sink], context: SinkContext
    ) -> None:
        self._name = name
        self._failures = 0
        self._sink: Sink | None = None
        try:
            self._sink = factory(context)
        except Exception as error:  # noqa: BLE001  a third party's failure must not end training
            self._warn("could not start; training goes on without it", error)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._sink is None:
            return
        try:
            self._sink.write(step, values)
        except Exception as error:  # noqa: BLE001  as above
            self._warn(f"failed at step {step}; training goes on and keeps trying", error)

    def close(self) -> None:
        if self._sink is None:
            return
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001  as above
            self._warn("could not be closed", error)
        if self._failures > 1:
            logger.warning("logging.%s: %d calls failed in all", self._name, self._failures)

    def _warn(self, what: str, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            logger.warning(
                "logging.%s %s (%s: %s); %s has every figure",
                *(self._name, what, type(error).__name__, error, METRICS_FILE),
            )


class _TensorBoard:
    def __init__(self, context: SinkContext) -> None:
        from torch.utils.tensorboard import SummaryWriter

        resumed = context.resumed_step
        self._writer = SummaryWriter(
            str(context.output_dir / "tensorboard"),
            purge_step=None if resumed is None else resumed + 1,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, context: SinkContext) -> None:
        import wandb

        # W&B takes steps in ascending order only: steps trained again after a resume are ignored.
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "pixelrag"),
            name=context.run_name,
            id=context.run_id,
            resume="allow",
            dir=str(context.output_dir),
            config=context.config,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, context: SinkContext) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(
            project="pixelrag",
            name=context.run_name,
            resume="allow",
            config=context.config,
            embed=False,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


SINKS: dict[str, tuple[str, Callable[[SinkContext], Sink]]] = {
    "tensorboard": ("tensorboard", _TensorBoard),
    "wandb": ("wandb", _Wandb),
    "trackio": ("trackio", _Trackio),
}
"""Name in `logging` -> (package it needs, what opens it)."""
