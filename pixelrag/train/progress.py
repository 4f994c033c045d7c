"""What a person sees of a running job: a bar on a terminal, one line a logged step otherwise.

Rank 0 shows, the other ranks are silent. Nothing here is a record; `metrics.jsonl` is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Literal, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

# Shown in this order when present; the rest is in metrics.jsonl.
_SHOWN = {
    "train/loss": "loss",
    "train/ce_loss": "CE",
    "train/kd_loss": "KD",
    "train/grad_norm": "grad norm",
    "train/lr": "lr",
    "train/temperature": "temperature",
    "train/accuracy": "accuracy",
    "eval/loss": "eval loss",
    "eval/accuracy": "eval accuracy",
    "eval/recall@1": "eval recall@1",
    "eval/ndcg@10": "eval ndcg@10",
    "eval/agreement": "eval agreement",
    "eval/em": "eval EM",
    "index/age_steps": "index age",
    "perf/step_seconds": "s/step",
    "perf/rows_per_second": "rows/s",
    "perf/tokens_per_second": "tokens/s",
    "mem/peak_gib": "peak GiB",
}


class ProgressView:
    """Context manager that shows steps as they are done.

    Args:
        total_steps: optimizer steps of the whole run.
        done_steps: steps already done when the run was resumed.
        mode: "on" (a bar), "off" (lines), "auto" (a bar when `stream` is a terminal).
        rank: ranks above 0 show nothing.
        stream: where to; standard error by default, so that output can be piped.
        clock: seconds, monotonic; tests pass their own.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        done_steps: int = 0,
        mode: Literal["auto", "on", "off"] = "auto",
        rank: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._first = self._done = done_steps
        self._silent = rank != 0
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._started = clock()
        self._bar: Progress | None = None
        if not self._silent and (mode == "on" or (mode == "auto" and self._stream.isatty())):
            console = Console(file=self._stream, force_terminal=mode == "on" or None)
            self._bar = Progress(
                TextColumn(
                    "step {task.completed:.0f}/{task.total:.0f}", table_column=Column(no_wrap=True)
                ),
                BarColumn(bar_width=20),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                # On a narrow terminal the figures give way, never the count of steps.
                TextColumn(
                    "{task.fields[figures]}",
                    table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
                ),
                console=console,
                expand=True,
            )
            self._task = self._bar.add_task("", total=total_steps, completed=done_steps, figures="")

    def step(self, step: int) -> None:
        """`step` optimizer steps are done: moves the bar; prints nothing by itself."""
        self._done = step
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def figures(self, step: int, values: Mapping[str, float | None]) -> None:
        """Show the figures logged at `step`: beside the bar, or as one line."""
        if self._silent:
            return
        self.step(step)
        text = describe(values)
        if self._bar is not None:
            self._bar.update(self._task, figures=text)
        else:
            self._print(f"step {step}/{self._total}  {text}  {self._remaining()}".rstrip())

    def message(self, text: str) -> None:
        """A line of its own (an evaluation, a checkpoint), above the bar when there is one."""
        if self._silent:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    def __enter__(self) -> ProgressView:
        self._started = self._clock()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _remaining(self) -> str:
        done = self._done - self._first
        if done <= 0 or self._done >= self._total:
            return ""
        seconds = (self._clock() - self._started) / done * (self._total - self._done)
        return f"{duration(seconds)} left"


def describe(values: Mapping[str, float | None]) -> str:
    """The figures a person follows, as `loss 1.234  lr 2e-05 ...`; unknown names are left out."""
    parts = []
    for name, label in _SHOWN.items():
        value = values.get(name)
        if value is not None:
            parts.append(f"{label} {value:.4g}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as `45s`, `3m20s` or `2h05m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
