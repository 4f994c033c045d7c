"""Keeps a float64 model in float64 all the way through.

Transformers models compute norms, softmaxes and rotary products in float32 whatever the model's
dtype is. That guards bf16 but rounds a float64 reference to seven digits, which is too coarse to
judge fp32 gradients by.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_CASTS = frozenset({torch.Tensor.to, torch.Tensor.type})
_SOFTMAXES = frozenset({F.softmax, torch.softmax, torch.Tensor.softmax})


class KeepFloat64(TorchFunctionMode):
    """Inside it, a float64 tensor asked to become float32 stays as it is.

    Covers `x.float()`, `x.to(torch.float32)`, `x.type(torch.float32)` and
    `softmax(x, dtype=torch.float32)`; tensors of other dtypes are not affected.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func in _CASTS:
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if (func in _CASTS or func in _SOFTMAXES) and kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


def keep_float64(dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """`KeepFloat64` for a model of this dtype, and nothing at all for the others."""
    return KeepFloat64() if dtype == torch.float64 else contextlib.nullcontext()


def recompute_contexts() -> tuple[contextlib.AbstractContextManager, ...]:
    """`context_fn` for `torch.utils.checkpoint` in float64: the backward's recomputation runs
    outside the model's forward, hence outside its mode, and would differ from the first pass."""
    return contextlib.nullcontext(), KeepFloat64()
