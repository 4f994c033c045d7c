"""Counts the collectives that a piece of code issues, and the bytes they carry."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_REDUCTIONS = ("allreduce", "reduce_scatter", "_reduce_scatter_base", "reduce_", "all_reduce")


class CollectiveCounter(TorchDispatchMode):
    """Context manager; afterwards ``calls`` and ``bytes`` are counters keyed by operation name.

    Bytes are those of the tensors handed to the operation on this rank (input and output
    buffers). ``gradient_reductions`` counts only reductions of floating-point tensors of more
    than one element: gradients, not norms nor the integers on which ranks agree.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.gradient_reductions = 0
        self.gradient_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # let DTensor unwrap itself; its collectives come back here
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func._opname:
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            size = sum(t.numel() * t.element_size() for t in tensors)
            self.calls[func._opname] += 1
            self.bytes[func._opname] += size
            # A lone scalar is a norm or an agreed flag, never a model's gradient.
            is_gradient = any(t.is_floating_point() and t.numel() > 1 for t in tensors)
            if is_gradient and func._opname.startswith(_REDUCTIONS):
                self.gradient_reductions += 1
                self.gradient_bytes += size
        return func(*args, **(kwargs or {}))
