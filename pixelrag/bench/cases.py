"""Cases that run in this process: timed in turns, and each alone for its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from pixelrag.bench import memory
from pixelrag.bench.machine import device_name, known_device, roofline
from pixelrag.bench.rows import Case, Row, name_of
from pixelrag.bench.timing import Spread, Taken, interleaved, ratios
from pixelrag.config.bench import BenchRun, SuiteConfig
from pixelrag.distributed.env import process_group
from pixelrag.errors import EngineError


@dataclass(slots=True)
class Ready:
    """A case that can run.

    Attributes:
        step: one step of it.
        tokens, supervised: of a step; None = the case has no such thing.
        flops: operations that a step needs; None = not counted.
        moved: bytes that a step must move at least; None = not counted.
        precision: fp32 or bf16.
        figures: further figures, asked for after the last step.
    """

    step: Callable[[], Any]
    tokens: int | None = None
    supervised: int | None = None
    flops: float | None = None
    moved: float | None = None
    precision: str = "fp32"
    figures: Callable[[], Mapping[str, float]] = dict


class Skipped(Exception):
    """A case cannot run on this machine; says why."""


Prepare = Callable[[Any, Sequence[Case], torch.device], list[Ready | Skipped]]


@contextmanager
def ready_to_compute(run: BenchRun) -> Iterator[torch.device]:
    """A process group of this process alone, with the threads that were asked for."""
    with process_group(run.device) as world:
        torch.set_num_threads(run.threads)
        yield world.device


def measure_in_turns(
    suite: str,
    prepare: Prepare,
    config: SuiteConfig,
    cases: Sequence[Case],
    *,
    compare: bool = False,
) -> Iterator[Row]:
    """Measure cases that are to be compared with one another.

    Args:
        suite: its name, by which a process of its own finds ``prepare`` again.
        prepare: makes cases ready, those of one call together.
        config: the suite's.
        cases: what to measure.
        compare: give each row the ratio of the first case's time to its own, in each round.
    """
    run = config.run
    with ready_to_compute(run) as device:
        prepared = [_tried(made, device) for made in prepare(config, cases, device)]
        ready = {
            name_of(case): made
            for case, made in zip(cases, prepared, strict=True)
            if isinstance(made, Ready)
        }
        steps = {name: made.step for name, made in ready.items()}
        # The trial was the first step of the warm-up.
        taken = interleaved(steps, rounds=run.rounds, warmup=run.warmup - 1, device=device)
        rows = []
        for case, made in zip(cases, prepared, strict=True):
            if isinstance(made, Skipped):
                rows.append(Row(suite, case, skipped=str(made)))
            else:
                row = row_of(suite, case, made, taken[name_of(case)], device)
                ours = taken.get(name_of(cases[0])) if compare else None
                figures = {} if ours is None else _ratios(ours, taken[name_of(case)])
                rows.append(replace(row, figures={**row.figures, **figures}))
        if run.memory and device.type == "cuda":
            # The allocator counts exactly; a process for each case would take ten seconds to start.
            added = {name: peak_of(made.step, device)["added_mib"] for name, made in ready.items()}
            rows = [replace(row, added_mib=added.get(row.name)) for row in rows]
    if not run.memory or device.type == "cuda":
        yield from rows
        return
    with ThreadPoolExecutor(run.at_once) as pool:
        found = pool.map(lambda row: {} if row.skipped else _alone(suite, config, row.case), rows)
        for row, held in zip(rows, found, strict=True):
            yield replace(row, **held)


def _tried(made: Ready | Skipped, device: torch.device) -> Ready | Skipped:
    """The case after its first step, or why it cannot take one: not all that is asked for fits."""
    if isinstance(made, Skipped):
        return made
    try:
        made.step()
        return made
    except torch.OutOfMemoryError as error:
        why = f"out of memory on {device_name(device)}: {str(error).split('. ')[0]}"
    torch.cuda.empty_cache()  # now that no traceback holds what the step had made
    return Skipped(why)


def row_of(suite: str, case: Case, made: Ready, taken: Taken, device: torch.device) -> Row:
    """What a case took, what that is a second, and what the device could do at best."""
    seconds = Spread.of(taken.wall)
    known = known_device(device_name(device))
    bound = roofline(known, made.flops, made.moved, made.precision)
    rate = 1 / seconds.p50
    mfu = None
    if known is not None and made.flops is not None:
        mfu = round(made.flops * rate / known.peak(made.precision), 4)
    return Row(
        suite,
        case,
        seconds=seconds,
        cpu_seconds=Spread.of(taken.cpu),
        repeats=len(taken.wall),
        tokens=made.tokens,
        supervised_tokens=made.supervised,
        tokens_per_second=_rounded(made.tokens, rate),
        supervised_tokens_per_second=_rounded(made.supervised, rate),
        flops=made.flops,
        mfu=mfu,
        bound_seconds=bound.seconds,
        bound_by=bound.by,
        figures={name: float(f"{value:.4g}") for name, value in made.figures().items()},
    )


def _ratios(ours: Taken, taken: Taken) -> dict[str, float]:
    """Of the first case's time to another's: medians of the rounds' ratios."""
    return {
        "ours_over_this": ratios(ours.wall, taken.wall).p50,
        "ours_over_this_cpu": ratios(ours.cpu, taken.cpu).p50,
    }


def _rounded(amount: int | None, rate: float) -> float | None:
    return None if amount is None else float(f"{amount * rate:.4g}")


def memory_of(prepare: Prepare, config: SuiteConfig, case: Case) -> dict[str, float]:
    """In a process that has done nothing else: peak of a step, after one that is not measured."""
    with ready_to_compute(config.run) as device:
        (made,) = prepare(config, [case], device)
        if isinstance(made, Skipped):
            raise made
        torch.ones(64, 64).requires_grad_().sum().backward()  # start autograd's threads
        made.step()
        return peak_of(made.step, device)


def peak_of(step: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """`peak_mib` and `added_mib` of one more step."""
    memory.let_go()
    memory.reset_peak(device)
    before = memory.held_mib(device)
    step()
    peak = memory.peak_mib(device)
    return {"peak_mib": round(peak, 1), "added_mib": round(peak - before, 1)}


def _alone(suite: str, config: SuiteConfig, case: Case) -> dict[str, Any]:
    """`memory_of` in a process of its own.

    Raises:
        EngineError: it failed; its output is in the message.
    """
    job = {"suite": suite, "config": config.model_dump(mode="json"), "case": dict(case)}
    command = [sys.executable, "-m", "pixelrag.bench.alone"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True)
    if done.returncode != 0:
        raise EngineError(
            f"bench {suite}, {name_of(case)}: the process that measures its memory ended with code "
            f"{done.returncode}:\n{done.stderr[-4000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])
