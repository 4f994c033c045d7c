"""Floating-point operations of a piece of code, counted by running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def count_flops(run: Callable[[], Any]) -> float:
    """Operations of the products that ``run`` computes, forward and backward.

    Attention runs as plain products, since the counter knows not every fused kernel; it then counts
    the whole square, causal or not.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops())
