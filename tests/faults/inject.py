"""Faults of any job on any engine: what `nursery.start(setup=...)` calls in each rank.

The payload: `fault`, a name of `FAULTS`; `rank`, where it strikes; `step`, after how many steps.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed import ProcessGroup

from pixelrag.distributed import whereabouts
from pixelrag.retrieval import refresh as refresher
from pixelrag.retrieval.refresh_spec import WEIGHTS
from pixelrag.train import batches, loop, saver

REDUCTIONS = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single",
)  # fmt: skip


def arm(payload: dict[str, Any]) -> None:
    """Let the fault happen, and the ranks that are left be quick to say so."""
    whereabouts._BEAT_SECONDS, whereabouts._REASON_SECONDS = 0.3, 0.3
    saver.Saver.settle.__defaults__ = (1.0,)
    if payload["fault"] and int(os.environ["RANK"]) == payload["rank"]:
        FAULTS[payload["fault"]](payload["step"])


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _at_step(method: str, number: int, action: Callable[[loop.Loop], None]) -> None:
    """Call `action` where the loop calls that method of its own with that many steps done."""
    original = getattr(loop.Loop, method)

    def wrapped(self: loop.Loop, step: int, *rest: Any, **named: Any) -> Any:
        if step == number:
            action(self)
        return original(self, step, *rest, **named)

    setattr(loop.Loop, method, wrapped)


def _at_forward(act: Callable[[Any], Any], *, graph: bool = False) -> Callable[[loop.Loop], None]:
    """Let `act` have what the engine's next forward returns; with `graph` a trained one's."""

    def prepare(job: loop.Loop) -> None:
        engine = job._task.engine
        forward = engine._forward

        def wrapped(*args: Any, **named: Any) -> Any:
            if graph and not torch.is_grad_enabled():
                return forward(*args, **named)
            engine._forward = forward
            return act(forward(*args, **named))

        engine._forward = wrapped

    return prepare


def _out_of_memory(_: Any) -> None:
    torch.empty(1 << 46)  # what the allocator raises, not what a test imagines


def _nan(found: Any) -> Any:
    if isinstance(found, torch.Tensor):
        return found * float("nan") if found.is_floating_point() else found
    if isinstance(found, tuple):
        spoiled = [_nan(value) for value in found]
        return type(found)(*spoiled) if hasattr(found, "_fields") else tuple(spoiled)
    return found


def _in_backward(job: loop.Loop) -> None:
    engine = job._task.engine
    backward = engine._backward

    def wrapped(loss: torch.Tensor, *, last: bool) -> None:
        loss.register_hook(_die)  # autograd is under way
        backward(loss, last=last)

    engine._backward = wrapped


def _in_reduction(job: loop.Loop) -> None:
    engine = job._task.engine
    backward = engine._backward

    def wrapped(loss: torch.Tensor, *, last: bool) -> None:
        if last:  # the others wait in it
            for name in REDUCTIONS:
                if hasattr(ProcessGroup, name):
                    setattr(ProcessGroup, name, _die)
        backward(loss, last=last)

    engine._backward = wrapped


def _in_save(how: Callable[..., None]) -> Callable[[int], None]:
    """When this rank's part is written, and nobody has been told so."""

    def install(step: int) -> None:
        write = saver.Saver._write_own

        def wrapped(self: saver.Saver, folder: Any, parts: Any) -> None:
            write(self, folder, parts)
            if folder.name == f".checkpoint-{step}.tmp":
                how()

        saver.Saver._write_own = wrapped

    return install


def _full_disk() -> None:
    raise OSError(28, "No space left on device")


FAULTS: dict[str, Callable[[int], None]] = {
    "forward": lambda step: _at_step("_step", step, _at_forward(_die)),
    "backward": lambda step: _at_step("_step", step, _in_backward),
    "reduction": lambda step: _at_step("_step", step, _in_reduction),
    "evaluation": lambda step: _at_step("_evaluate", step, _at_forward(_die)),
    "save": _in_save(_die),
    "disk": _in_save(_full_disk),
    "memory": lambda step: _at_step("_step", step, _at_forward(_out_of_memory)),
    "nan": lambda step: _at_step("_step", step, _at_forward(_nan, graph=True)),
}


def worker(payload: dict[str, Any]) -> None:
    """The third batch of rank `rank`'s loader worker is `how`: slow, stuck or killed."""
    make, calls = batches.PairCollator.__getitem__, itertools.count(1)

    def wrapped(self: batches.PairCollator, indices: list[int]) -> batches.PairBatch:
        if torch.utils.data.get_worker_info() and next(calls) == 3:
            {"slow": lambda: time.sleep(1), "stuck": lambda: time.sleep(600), "killed": _die}[
                payload["how"]
            ]()
        return make(self, indices)

    if int(os.environ["RANK"]) == payload["rank"]:
        batches.PairCollator.__getitem__ = wrapped


def refresh(payload: dict[str, Any]) -> None:
    """The refresh of step `step` is `how`: its coordinator killed or frozen, its snapshot torn."""
    start = refresher.Refresher.start
    refresher._SILENT_SECONDS = 2.0

    def wrapped(self: refresher.Refresher, folder: Path, step: int, **rest: Any) -> None:
        if step == payload["step"] and payload["how"] == "garbage":
            weights = folder / WEIGHTS
            tensors = {n: torch.randn_like(t) for n, t in load_file(weights).items()}
            save_file(tensors, weights)  # whole, and of other numbers than the training has
        start(self, folder, step, **rest)
        if step == payload["step"] and payload["how"] != "garbage":
            signum = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}[payload["how"]]
            os.kill(self._process.pid, signum)

    refresher.Refresher.start = wrapped


def lost_tile(payload: dict[str, Any]) -> None:
    """The file `path` is gone behind the first step."""
    _at_step("_step", 1, lambda _: Path(payload["path"]).unlink(missing_ok=True))


def jumping_clock(payload: dict[str, Any]) -> None:
    """The machine's clock jumps forth and back, a day further each time it is read."""
    real, reading = time.time, itertools.count(1)

    def jumping() -> float:
        number = next(reading)
        return real() + 86_400.0 * number * (-1) ** number

    time.time = jumping
