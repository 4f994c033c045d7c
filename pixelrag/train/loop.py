"""The training loop, the only one: every job is a `Task` that runs in here.

A step is: set the learning rate; accumulate the gradient of one or more global batches; check
that loss and norm are finite; clip, update; log, evaluate, save, stop when they are due.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pixelrag.config.base import JobConfig, dump, fingerprint
from pixelrag.distributed.collectives import agree_max, from_main, told_by_main
from pixelrag.distributed.env import World
from pixelrag.distributed.interrupt import Interrupted, interruptible, stop_point, stop_where_asked
from pixelrag.distributed.together import together
from pixelrag.errors import NonFiniteError
from pixelrag.train.atomic import versions
from pixelrag.train.averaging import averaging_of, set_decay
from pixelrag.train.checkpoint import checkpoint_dir
from pixelrag.train.job import open_rank_log
from pixelrag.train.metrics import RunningMeans, Throughput, peak_memory
from pixelrag.train.metrics_writer import MetricsWriter
from pixelrag.train.optimizer import set_learning_rates
from pixelrag.train.progress import ProgressView, describe, duration
from pixelrag.train.run_state import RunState, gather_ids, seed_step
from pixelrag.train.saver import Saver
from pixelrag.train.schedule import multiplier, resolve_warmup
from pixelrag.train.signals import PREEMPTED, StopRequest
from pixelrag.train.task import StepReport, Task
from pixelrag.train.text_file import replace_text

logger = logging.getLogger("pixelrag")

SUMMARY = "summary.json"


class Loop:
    """Runs a task from where it stands to its last step.

    Args:
        task: the job.
        config: its configuration; the loop reads output_dir, seed, optim, batch, eval, checkpoint
            and logging.
        world: this process's place.
        total_steps: optimizer steps of the whole run.
        resumed: where a checkpoint left the run; None for a new one.
        stop: who may ask to stop; None: the run's STOP file alone.
    """

    def __init__(
        self,
        task: Task,
        config: JobConfig,
        world: World,
        total_steps: int,
        resumed: RunState | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        self._task = task
        self._config = config
        self._world = world
        self._total_steps = total_steps
        self._resumed = resumed
        self._output = Path(config.output_dir)
        self._ema = averaging_of(config)
        self._stop = stop or StopRequest(self._output)
        self._best = resumed.best if resumed else None
        self._means = RunningMeans()
        self._unlogged: list[dict[str, float]] = []
        for figures in resumed.unlogged if resumed else []:
            self._count(figures)
        self._throughput = Throughput()
        self._last_figures: dict[str, float] = {}
        self._best_step = resumed.best_step if resumed else None
        self._evaluation_due = resumed.evaluation_due if resumed else config.eval.on_start
        self._begun_step = 0
        optim = config.optim
        self._warmup = resolve_warmup(total_steps, optim.warmup_ratio, optim.warmup_steps)

    def run(self) -> dict[str, Any]:
        """Train to the end, or until asked to stop; return the summary. A collective.

        Raises:
            NonFiniteError: a loss or gradient norm is NaN or infinite; on all ranks, at that step.
            CheckpointError: metrics or a checkpoint cannot be written.
            Interrupted: asked to stop before anything began.
        """
        stop_point()
        started = time.monotonic()
        first = self._resumed.step if self._resumed else 0
        with together():
            writer = self._writer()
        view = ProgressView(
            self._total_steps,
            done_steps=first,
            mode=self._config.logging.progress,
            rank=self._world.rank,
        )
        self._saver = Saver(self._output, self._task.engine, self._config, view.message)
        self._saver.saved_step = first
        with writer, view, interruptible(None), self._settled():
            from_main(self._open_folder)
            with together():
                open_rank_log(self._output / "logs", self._world.rank)
            step = first
            try:
                if self._evaluation_due:
                    self._evaluate(step, writer, view, may_be_best=self._resumed is not None)
                while step < self._total_steps:
                    figures = self._step(step)
                    step += 1
                    view.step(step)
                    self._log(step, figures, writer, view)
                    self._evaluate_if_due(step, writer, view)
                    self._save_if_due(step, writer, view)
                    if step < self._total_steps:
                        self._stop_if_asked()
                return self._finish(step, started, writer, view)
            except Interrupted as asked:
                return self._preempted(step, str(asked), writer, view)

    @contextlib.contextmanager
    def _settled(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._saver.settle()
            raise

    def _open_folder(self) -> None:
        replace_text(self._output / "config.yaml", dump(self._config))
        (self._output / PREEMPTED).unlink(missing_ok=True)

    def _writer(self) -> MetricsWriter:
        sinks = [n for n in ("tensorboard", "wandb", "trackio") if getattr(self._config.logging, n)]
        return MetricsWriter(
            self._output,
            rank=self._world.rank,
            resumed_step=self._resumed.step if self._resumed else None,
            evaluation_due=self._evaluation_due,
            sinks=sinks,
            config=self._config.model_dump(mode="json"),
        )

    def _step(self, step: int) -> dict[str, float]:
        optim = self._config.optim
        factor = multiplier(optim.scheduler, step, self._total_steps, self._warmup)
        rates = set_learning_rates(self._task.engine.optimizer, optim, factor)
        if self._ema is not None:
            set_decay(self._task.engine.optimizer, self._ema, step)
        seed_step(self._config.seed, step, self._world.rank)
        count = self._task.batches_per_step
        move = self._world.position.move
        move("between two steps", step)
        with interruptible(self._stop.requested):
            self._task.before_step()
        ids: list[str] = []
        reports: list[StepReport] = []
        for index in range(count):
            move("gathering a batch", step)
            with together():
                batch = self._task.next_batch()
            ids += self._task.sample_ids(batch)
            move("forward and backward")
            report = self._task.accumulate(batch, weight=1.0 / count, last=index == count - 1)
            if not math.isfinite(report.loss):
                self._not_finite(step, f"loss is {report.loss}", report.suspects, ids)
            reports.append(report)
        move("update")
        norm = self._task.engine.step(optim.max_grad_norm)
        if not math.isfinite(norm):
            self._not_finite(step, f"gradient norm is {norm} (the loss is finite)", [], ids)
        self._throughput.step(
            sum(r.rows for r in reports),
            sum(r.tokens for r in reports),
            {name: sum(r.amounts[name] for r in reports) for name in reports[0].amounts},
        )
        figures = {"train/loss": sum(r.loss for r in reports) / count}
        for name in reports[0].figures:
            figures[name] = sum(r.figures[name] for r in reports) / count
        figures["train/grad_norm"] = norm
        self._count(figures)
        return rates

    def _count(self, figures: dict[str, float]) -> None:
        self._unlogged.append(figures)
        self._means.add(figures)

    def _not_finite(self, step: int, what: str, suspects: list[str], ids: list[str]) -> None:
        self._saver.settle()
        named, batch = gather_ids(suspects), gather_ids(ids, most=32)
        saved = self._saver.saved_step
        last = f"checkpoint-{saved} is the last" if saved else "there is none of an earlier step"
        raise told_by_main(
            NonFiniteError(
                f"step {step + 1}: the {what}; all ranks stop here, no checkpoint is written and "
                f"{last}. Rows that it comes from: {named}. Rows of the step: {batch}. Look at "
                "those rows, lower optim.learning_rate, or use engine.precision fp32"
            )
        )

    def _log(self, step: int, figures: dict, writer: MetricsWriter, view: ProgressView) -> None:
        if step % self._config.logging.every_steps and step != self._total_steps:
            return
        values = self._means.pop() | figures | self._task.step_figures()
        values |= self._throughput.rates() | peak_memory(self._world.device)
        values |= self._saver.figures()
        self._unlogged.clear()
        with together():
            writer.write(step, values)
        view.figures(step, values)

    def _evaluate_if_due(self, step: int, writer: MetricsWriter, view: ProgressView) -> None:
        every = self._config.eval.every_steps
        if step == self._total_steps or (every is not None and step % every == 0):
            self._evaluate(step, writer, view)

    def _evaluate(
        self, step: int, writer: MetricsWriter, view: ProgressView, *, may_be_best: bool = True
    ) -> None:
        self._world.position.move("evaluation", step)
        self._evaluation_due = True
        with self._throughput.excluded(), self._averaged():
            figures = self._measure()
            self._evaluation_due = False
            if not figures:
                return
            with together():
                writer.write(step, figures)
            view.figures(step, figures)
            if not may_be_best:
                return
            self._last_figures = figures
            metric = self._config.checkpoint.best_metric
            value = figures[metric]
            lower_is_better = metric.endswith("loss")
            if self._best is None or (
                value < self._best if lower_is_better else value > self._best
            ):
                self._best, self._best_step = value, step
                self._task.export(self._output / "best")

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """What is evaluated and exported: the averaged weights, where there are any."""
        interrupted = None
        with contextlib.nullcontext() if self._ema is None else self._task.engine.averaged():
            try:
                yield
            except Interrupted as asked:  # on all ranks: they put the weights back together
                interrupted = asked
        if interrupted is not None:
            raise interrupted

    def _measure(self) -> dict[str, float]:
        with interruptible(self._stop.requested):
            return self._task.evaluate()

    def _save_if_due(self, step: int, writer: MetricsWriter, view: ProgressView) -> None:
        every = self._config.checkpoint.every_steps
        if step == self._total_steps or (every is not None and step % every == 0):
            self._save(step, writer, view)

    def _save(self, step: int, writer: MetricsWriter, view: ProgressView) -> None:
        self._world.position.move("saving a checkpoint", step)
        with self._throughput.excluded():
            with together():
                writer.sync()
            position, identity = self._task.position(), fingerprint(self._config)
            best, unlogged = (self._best, identity), list(self._unlogged)
            self._begun_step = step
            self._saver.save(
                RunState(step, position, *best, unlogged, self._best_step, self._evaluation_due)
            )

    def _stop_if_asked(self) -> None:
        reason = self._stop.requested()
        stops, failed = agree_max([int(reason is not None), int(self._saver.has_failed)])
        if failed:
            self._saver.fail()
        if stops:
            stop_where_asked(reason)

    def _preempted(self, step, reason, writer, view) -> dict[str, Any]:
        if self._begun_step != step:
            self._save(step, writer, view)
        self._saver.finish()
        folder = checkpoint_dir(self._output, step) if step else None
        from_main(lambda: self._stop.obeyed(reason, folder))
        view.message(
            f"stopped at step {step} of {self._total_steps}: {reason}; the same command goes on"
        )
        return {"step": step, "preempted": reason}

    def _finish(self, step, started, writer, view) -> dict[str, Any]:
        # A run that died after its last checkpoint resumes here, its figures already recorded.
        with self._averaged():
            self._last_figures = self._last_figures or self._measure()
        self._saver.finish()
        self._world.position.move("exporting the model", step)
        with self._averaged():
            self._task.export(self._output / "last")
        summary = {
            "step": step,
            "final": self._last_figures,
            "best": {self._config.checkpoint.best_metric: self._best},
            "fingerprint": fingerprint(self._config),
            "engine": self._task.engine.name,
            "world_size": self._world.world_size,
            "hardware": {"device": str(self._world.device), "machine": platform.machine()},
            "seconds": round(time.monotonic() - started, 1),
            **peak_memory(self._world.device),
            **self._throughput.rates(),
            "checkpoint/stall_seconds": self._saver.stall_seconds,
        }
        from_main(lambda: self._write_summary(summary))
        kept = [str(self._output / "last")]
        if self._best is not None:  # nothing held out, nothing best
            kept.insert(0, str(self._output / "best"))
        view.message(f"done: the model is in {' and in '.join(kept)}")
        told = describe(summary | self._last_figures)
        view.message(
            f"it took {duration(summary['seconds'])}: {told}; look at it with `pixelrag plot "
            f"{self._output}`"
        )
        return summary

    def _write_summary(self, summary: dict[str, Any]) -> None:
        text = json.dumps(summary | {"versions": versions()}, indent=1)
        replace_text(self._output / SUMMARY, text + "\n")


def is_finished(output: Path, step: int) -> bool:
    """Whether a run of this folder has ended at `step` or later: its last acts, done. Rank 0.

    A run that died between its last checkpoint and these acts has them still before it.
    """
    try:
        summary = json.loads((output / SUMMARY).read_text(encoding="utf-8"))
        return int(summary["step"]) >= step
    except (OSError, ValueError, KeyError, TypeError):
        return False
