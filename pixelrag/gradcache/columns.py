"""Lays one rank's embeddings beside those of all ranks, for a loss over the global batch.

All-gathered, every rank holds all of them; passed around, one rank's at a time, which costs as
much communication and a W-th of the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

from pixelrag.distributed.collectives import pass_on
from pixelrag.engine.base import Engine
from pixelrag.gradcache.schedule import Side
from pixelrag.losses.tiles import Columns, Rotate

Exchange = Literal["all_gather", "ring"]


def columns_of(
    engine: Engine,
    side: Side,
    emb_MD: torch.Tensor,
    ids_MP: torch.Tensor | None,
    guide_MG: torch.Tensor | None,
    exchange: Exchange,
) -> tuple[Columns, int]:
    """Return one side of the global batch, and where this rank's rows begin in its first block.

    A collective. Blocks of a ring come in the order of the ranks, this rank's first.

    Args:
        engine: gathers, with gradient.
        side: as all ranks agreed.
        emb_MD: this rank's embeddings.
        ids_MP: [M, P] int64, see `Columns`; P is the same on all ranks. None: all rows differ.
        guide_MG: this rank's embeddings by a guide, or None.
        exchange: how to go about it.
    """
    width, world_size = side.max_rows, engine.world_size

    def block(rows_M: torch.Tensor, fill: int = 0) -> torch.Tensor:
        rows_M = rows_M[:width]  # a rank that only fills brings a row that does not count
        return F.pad(rows_M, (0, 0, 0, width - len(rows_M)), value=fill)

    sizes_W = torch.tensor(side.num_rows, device=engine.device)
    is_real_WC = torch.arange(width, device=engine.device) < sizes_W[:, None]
    if ids_MP is None:
        ids_WCP = torch.arange(world_size * width, device=engine.device).view(world_size, width, 1)
    else:
        ids_WCP = engine.gather(block(ids_MP, -2)).view(world_size, width, -1)

    def everyone(rows_M: torch.Tensor) -> torch.Tensor:
        return engine.gather(block(rows_M))

    place: Callable[[torch.Tensor], torch.Tensor]
    rotate: Rotate | None
    if exchange == "ring" and world_size > 1:
        ids_NCP, is_real_NC = ids_WCP.roll(-engine.rank, 0), is_real_WC.roll(-engine.rank, 0)
        place, rotate, start = block, pass_on, 0
    else:
        ids_NCP, is_real_NC = ids_WCP.flatten(0, 1)[None], is_real_WC.flatten()[None]
        place, rotate, start = everyone, None, engine.rank * width
    columns = Columns(
        place(emb_MD),
        ids_NCP,
        None if is_real_WC.all() else is_real_NC,
        None if guide_MG is None else place(guide_MG),
        rotate,
    )
    return columns, start
