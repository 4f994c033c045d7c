"""Encodes many queries or documents over all ranks and gives every rank all embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from pixelrag.distributed.collectives import exchange
from pixelrag.distributed.interrupt import stop_point
from pixelrag.distributed.together import together

Inputs = dict[str, torch.Tensor]


class Encoder(Protocol):
    """What `encode` calls: an `Engine`, or a frozen model that is whole on every rank."""

    rank: int
    world_size: int
    device: torch.device

    def __call__(self, role: str, **batch: Any) -> Any: ...

    def inference(self) -> AbstractContextManager[None]: ...

    def gather(self, local_BD: torch.Tensor) -> torch.Tensor: ...


def encode(
    engine: Encoder,
    role: str,
    items: Sequence[Any],
    prepare: Callable[[list[Any]], Inputs],
    *,
    batch_size: int,
    length: Callable[[Any], int],
) -> torch.Tensor:
    """Encode ``items`` in eval mode; a collective that every rank calls with the same items.

    Items are sorted by length, so that batches pad little, and dealt out to the ranks in batches.
    Every rank runs the same number of forwards, with a zero-weighted vision pass where only other
    ranks have images, because sharded parameters make a forward a collective.

    Args:
        engine: answers ``engine(role, touch_vision=..., **inputs)`` with
            ``(embedding_BD, ...)``.
        role: ``query`` or ``document``.
        items: what to encode, at least one.
        prepare: turns a list of items into model inputs.
        batch_size: rows a rank runs at once.
        length: a cheap estimate of an item's length; only the order matters.

    Returns:
        [len(items), D] fp32 on the CPU, in the order of ``items``.
    """
    order = sorted(range(len(items)), key=lambda i: (length(items[i]), i), reverse=True)
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    mine = batches[engine.rank :: engine.world_size]
    calls = -(-len(batches) // engine.world_size)
    rows: list[torch.Tensor] = []
    with engine.inference():
        for call in range(calls):
            stop_point()
            # A rank without a batch of its own repeats the first; its rows are thrown away.
            chosen = mine[call] if call < len(mine) else batches[0]
            with together():
                inputs = prepare([items[i] for i in chosen])
            touch = must_touch(inputs)
            inputs = {key: value.to(engine.device) for key, value in inputs.items()}
            embedding_BD, *_ = engine(role, touch_vision=touch, **inputs)
            if call < len(mine):
                rows.append(embedding_BD.float())
    width = embedding_BD.shape[1]
    own = torch.cat(rows) if rows else embedding_BD.new_zeros(0, width, dtype=torch.float32)
    gathered = _gather_uneven(engine, own)
    positions = [
        i for r in range(engine.world_size) for b in batches[r :: engine.world_size] for i in b
    ]
    ordered = torch.empty_like(gathered)
    ordered[torch.tensor(positions)] = gathered
    return ordered


def must_touch(inputs: Inputs) -> bool:
    """Whether other ranks have images and this one has none; a collective, once a forward."""
    has_images = inputs.get("pixel_values") is not None
    return any(row[0] for row in exchange([int(has_images)])) and not has_images


def _gather_uneven(engine: Encoder, own_MD: torch.Tensor) -> torch.Tensor:
    sizes = [row[0] for row in exchange([len(own_MD)])]
    most = max(sizes)
    padded = torch.nn.functional.pad(own_MD, (0, 0, 0, most - len(own_MD)))
    with torch.no_grad():
        everyone = engine.gather(padded).cpu()
    return torch.cat([everyone[r * most : r * most + size] for r, size in enumerate(sizes)])
