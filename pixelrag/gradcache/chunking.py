"""Cuts batches as `batch.chunk_size` says, and settles what ``auto`` stands for.

By rows, a chunk of long documents takes many times the memory of one of queries. By tokens and
patches all chunks take about the same, so the first step tells what a token costs: it runs with a
small budget, its graphs are weighed, and the steps after it use the largest power of two whose
graph fits into a quarter of what is free. The choice is made once a run and kept in checkpoints:
other chunks would be other draws of dropout.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

import torch

from pixelrag.distributed.collectives import agree_max
from pixelrag.distributed.free_memory import GIB
from pixelrag.engine.base import Engine
from pixelrag.gradcache.keep import Keeper
from pixelrag.gradcache.minibatch import split_batch, split_by_tokens
from pixelrag.gradcache.schedule import Chunk

logger = logging.getLogger("pixelrag")

FIRST = 2048
# Beyond these a chunk is large enough for its matrix products; chosen, on CUDA not measured.
_ENOUGH = {"cpu": 8192, "cuda": 65536}
_SHARE = 0.25
_LEAST = 64


class Chunking:
    """Cuts batches into chunks.

    Args:
        chunk_size: rows, or ``auto``: by tokens and patches, see `split_by_tokens`.
        chunk_tokens: under ``auto``: how many; None = the first step tells.
    """

    def __init__(self, chunk_size: int | Literal["auto"], chunk_tokens: int | None = None) -> None:
        self._rows = None if chunk_size == "auto" else chunk_size
        self.tokens = chunk_tokens

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> list[Chunk]:
        """Cut one batch."""
        if self._rows is not None:
            return split_batch(inputs, self._rows)
        return split_by_tokens(inputs, self.tokens or FIRST)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to find out."""
        return self._rows is not None or self.tokens is not None

    def settle(self, engine: Engine, keeper: Keeper) -> None:
        """Choose the budget from what ``keeper`` weighed; a collective, the same on all ranks."""
        free = keeper.free_beside_step(engine)
        per_token = keeper.bytes_per_token()
        fitting = max(int(free * _SHARE / per_token), _LEAST)
        enough = _ENOUGH.get(engine.device.type, _ENOUGH["cuda"])
        picked = min(1 << fitting.bit_length() - 1, enough)
        self.tokens = -agree_max([-picked])[0]
        logger.info(
            "batch.chunk_size auto: chunks of up to %d tokens and patches, about %.2f GiB of %.2f "
            "GiB free on %s (a graph takes %.1f KiB a token)",
            *(self.tokens, self.tokens * per_token / GIB, free / GIB, engine.device),
            per_token / 1024,
        )
