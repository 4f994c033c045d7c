"""Bytes alive in a simulation, and what they are for."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

WEIGHTS, FROZEN, OPTIMIZER = "weights", "frozen models", "optimizer"
ACTIVATIONS, GRADIENTS, LOGITS = "activations", "gradients", "logits"
BACKWARD = "made on the way to gradients"
TEMPORARY = "made without a graph"
_FOREVER = 1 << 62


@dataclass(slots=True)
class _Stay:
    """A storage of one size, from one moment to another."""

    use: str
    size: int
    begin: int
    end: int = _FOREVER


class Memory:
    """Live bytes by use; what a storage was for may be said after the peak.

    Attributes:
        peak: the most that was alive at once since `restart`, in all.
        allocations: storages made since then.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.allocations = 0
        self._use = "other"
        self._now = self._total = self._at = 0
        self._alive: dict[int, _Stay] = {}  # by storage
        self._stays: list[_Stay] = []

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[None]:
        """What is allocated meanwhile is for this."""
        before, self._use = self._use, name
        try:
            yield
        finally:
            self._use = before

    def call(self, name: str, *, only: frozenset[str]) -> None:
        """Say what all that is alive, and was for one of ``only``, is for."""
        for stay in self._alive.values():
            if stay.use in only:
                stay.use = name

    def call_rest(self, name: str, *, kept: frozenset[str]) -> None:
        """Say what all that is alive, and for none of ``kept``, is for."""
        self.call(name, only=frozenset(stay.use for stay in self._alive.values()) - kept)

    @property
    def live(self) -> int:
        """Bytes alive now."""
        return self._total

    @property
    def at_peak(self) -> Counter[str]:
        """What was alive at the peak, by use."""
        found: Counter[str] = Counter()
        for stay in self._stays:
            if stay.begin <= self._at < stay.end and stay.size:
                found[stay.use] += stay.size
        return found

    def restart(self) -> None:
        """Look for a new peak."""
        self._stays = list(self._alive.values())
        self.peak = self.allocations = 0
        self._look()

    def add(self, tensor: torch.Tensor, use: str | None = None) -> None:
        """Count a tensor's storage, for as long as it lives."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        self.allocations += 1
        self._begin(key, use or self._use, storage.nbytes())
        weakref.finalize(storage, self._end, key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage grew or shrank, as FSDP2's do where parameters come and go."""
        if storage._cdata in self._alive:
            use = self._alive[storage._cdata].use
            self._end(storage._cdata)
            self._begin(storage._cdata, use, storage.nbytes())

    def _begin(self, key: int, use: str, size: int) -> None:
        self._now += 1
        stay = self._alive[key] = _Stay(use, size, self._now)
        self._stays.append(stay)
        self._total += size
        self._look()

    def _end(self, key: int) -> None:
        stay = self._alive.pop(key)
        self._now += 1
        stay.end = self._now
        self._total -= stay.size

    def _look(self) -> None:
        if self._total > self.peak:
            self.peak, self._at = self._total, self._now
