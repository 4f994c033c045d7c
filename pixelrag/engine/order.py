"""Checks that all ranks ran the same sequence of forwards through sharded submodules.

A sharded submodule's forward is a collective. Two ranks that use different, equally shaped
towers at the same moment exchange each other's weights without any error, so the sequence is
recorded, and compared before the first backward of a step and before the last.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from pixelrag.distributed.collectives import agree_max
from pixelrag.errors import EngineError


def holders_of_parameters(module: nn.Module) -> dict[str, nn.Module]:
    """Every submodule that holds a parameter of its own, by name."""
    return {
        name: part
        for name, part in module.named_modules()
        if name and next(part.parameters(recurse=False), None) is not None
    }


class ForwardTrace:
    """Records the forwards of the named submodules, and of the roles, since the last check."""

    def __init__(self, submodules: Mapping[str, nn.Module]) -> None:
        self._events: list[str] = []
        self._paused = False
        for name, submodule in submodules.items():
            submodule.register_forward_pre_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def record(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._note(name)

        return record

    def _note(self, event: str) -> None:
        if not self._paused:
            self._events.append(event)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing in the body."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def enter(self, role: str) -> None:
        """Note the start of one forward of the container."""
        self._note(f"<{role}>")

    def check(self) -> None:
        """Compare this rank's sequence with all others' and forget it; a collective.

        Raises:
            EngineError: on every rank, naming the first call that differs and who made it.
        """
        events, self._events = self._events, []
        digest = zlib.crc32("\n".join(events).encode())
        high, low_negated = agree_max([digest, -digest])
        if high == -low_negated:
            return
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, events)
        raise EngineError(_describe(everyone))


def _describe(everyone: list[list[str]]) -> str:
    length = max(len(events) for events in everyone)
    padded = [events + ["(nothing)"] * (length - len(events)) for events in everyone]
    for position in range(length):
        calls = [events[position] for events in padded]
        if len(set(calls)) > 1:
            who = ", ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
            return (
                f"ranks ran different forwards this step; call {position} differs ({who}). "
                "This engine needs the same sequence on every rank: run a zero-weighted forward "
                "through what a rank does not need, or use ddp, zero0, zero1, or zero2 with "
                "grad_sync deferred"
            )
    return "ranks ran different forwards this step"
