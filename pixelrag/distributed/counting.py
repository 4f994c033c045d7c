"""Counts the collectives that a piece of code issues, and the bytes they carry."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_REDUCTIONS = ("allreduce", "reduce_scatter", "_reduce_scatter_base", "reduce_")
_counters: list[CollectiveCounter] = []


class CollectiveCounter:
    """Context manager; afterwards ``calls`` and ``bytes`` are counters keyed by operation name.

    Names are those of the dispatcher's namespace `c10d`, where every way to a collective ends:
    `torch.distributed`'s functions, their functional forms, DDP's C++ reducer. Counting there
    costs the other operations nothing, which a dispatch mode makes half as slow again.

    Bytes are those of the tensors handed to the operation on this rank (input and output
    buffers). ``gradient_reductions`` counts only reductions of floating-point tensors of more
    than one element: gradients, not norms nor the integers on which ranks agree.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.gradient_reductions = 0
        self.gradient_bytes = 0

    def __enter__(self) -> CollectiveCounter:
        _listen()
        _counters.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _counters.remove(self)

    def _count(self, name: str, tensors: list[torch.Tensor]) -> None:
        size = sum(t.numel() * t.element_size() for t in tensors)
        self.calls[name] += 1
        self.bytes[name] += size
        # A lone scalar is a norm or an agreed flag, never a model's gradient.
        is_gradient = any(t.is_floating_point() and t.numel() > 1 for t in tensors)
        if is_gradient and name.startswith(_REDUCTIONS):
            self.gradient_reductions += 1
            self.gradient_bytes += size


@functools.cache
def _listen() -> torch.library.Library:
    """Put a kernel in front of each collective of this process, once; it stays."""
    library = torch.library.Library("c10d", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("c10d::"):
            operation = getattr(torch.ops.c10d, name.removeprefix("c10d::").partition(".")[0])
            for key in ("AutogradCPU", "AutogradCUDA"):
                kernel = functools.partial(_kernel, operation.default)
                library.impl(operation.default, kernel, key, with_keyset=True)
    return library


def _kernel(operation: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    if _counters:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for counter in _counters:
            counter._count(operation._opname, tensors)
    return operation.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)
