"""Lets the CPU of a simulation pass for the planned device, where code asks what it runs on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from pixelrag.engine import budget
from pixelrag.gradcache import chunking, keep
from pixelrag.losses import kd, kd_blocks, kd_chunk, tiles

_GPU = torch.device("cuda")


@contextlib.contextmanager
def on_gpu(free: Callable[[], int]) -> Iterator[None]:
    """Choose sizes of chunks, blocks and tiles as on a GPU with so many bytes free."""
    rows, scratch = kd_blocks.rows_per_block, kd_blocks.scratch_bytes_per_token
    attention: Callable[..., torch.Tensor] = F.scaled_dot_product_attention

    def fused(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> torch.Tensor:
        # A GPU's kernels drop out as they go; the CPU's keeps every weight for that.
        return attention(*args, dropout_p=0.0, **kwargs)

    with contextlib.ExitStack() as stack:
        for module in (budget, keep, kd_chunk):
            _put(stack, module, "free_memory", lambda _: free())
        for module in (chunking, kd_chunk):
            _put(stack, module, "_ENOUGH", dict.fromkeys(module._ENOUGH, module._ENOUGH["cuda"]))
        _put(stack, tiles, "CPU_TILE", tiles.GPU_TILE)
        _put(stack, kd_blocks, "rows_per_block", lambda v, chunk, _: rows(v, chunk, _GPU))
        _put(stack, kd, "scratch_bytes_per_token", lambda v, dtype, _: scratch(v, dtype, _GPU))
        _put(stack, F, "scaled_dot_product_attention", fused)
        yield


def _put(stack: contextlib.ExitStack, module: Any, name: str, value: Any) -> None:
    stack.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)
