"""Decides how many chunks keep their graph from the first pass, instead of running again.

GradCache's second run of a chunk costs a forward pass, a fourth of a step. A chunk whose graph
stays needs none. The leading chunks of a step keep theirs: the second pass goes through the chunks
in the same order whatever is kept, so it lets the kept graphs go before it builds the first new
one, and adds up the gradients in the same order, to the same bits.

Of memory: under ``auto`` a step of an engine is taken without kept graphs first, and the graphs of
the chunks that run again are weighed, the first of each size. What a later chunk will need follows
as an upper bound. Kept graphs may take half of what is then free beyond the rest of the step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from pixelrag.distributed.collectives import agree_max
from pixelrag.distributed.free_memory import GIB, free_memory
from pixelrag.engine.base import Engine
from pixelrag.gradcache.schedule import Chunk, Side, rows_of

logger = logging.getLogger("pixelrag")

Replay = Literal["auto", "all", "none"]
# The rest is left to the allocator's slack, and to others on the machine.
SHARE = 0.5
# Gradients of embeddings and what the loss makes of them, as multiples of the embeddings.
_COPIES_OF_EMBEDDINGS = 8

Kind = tuple[str, bool, bool]


class Amounts(NamedTuple):
    """What a chunk holds; pairs are those within a row or image, as attention may keep them."""

    padded_tokens: int
    padded_pairs: int
    tokens: int
    pairs: int
    patches: int
    patch_pairs: int
    rows: int
    images: int


class Keeper:
    """Keeps what is known of the chunks' graphs from step to step.

    Args:
        replay: ``all`` runs every chunk again, ``none`` keeps every graph, ``auto`` keeps as many
            as memory allows; a number keeps so many.
        weighs: weigh graphs although nothing here asks for it.
    """

    def __init__(self, replay: Replay | int = "all", *, weighs: bool = False) -> None:
        self._replay = replay
        self._weighs = weighs or replay == "auto"
        self._weighed: dict[tuple[Kind, int], tuple[Amounts, int]] = {}
        self._width = 0
        self._said = False

    def num_kept(self, engine: Engine, sides: Sequence[Side]) -> int:
        """Return of how many leading forwards of a step the graph is kept; a collective.

        Args:
            engine: see `Engine.keeps_graphs`.
            sides: as all ranks agreed.
        """
        calls = [(side, chunk) for side in sides for chunk, _ in side.calls()]
        if self._replay == "all" or (self._weighs and engine.num_steps == 0):
            return 0
        if not engine.keeps_graphs:
            self._say(
                f"{engine.name} cannot go forward again before a graph has gone backward: every "
                "chunk is run a second time (replay: all)"
            )
            return 0
        if self._replay != "auto":
            return len(calls) if self._replay == "none" else min(self._replay, len(calls))
        free = self.free_beside_step(engine, sides)
        budget = int(SHARE * free)
        sizes = [self.bound(side, chunk) for side, chunk in calls]
        kept, taken = 0, 0.0
        while kept < len(calls) and taken + sizes[kept] <= budget:
            taken += sizes[kept]
            kept += 1
        kept = -agree_max([-kept])[0]  # ranks must make the same calls
        self._say(
            f"keeps the graphs of {kept} of {len(calls)} chunks, at most "
            f"{sum(sizes[:kept]) / GIB:.2f} GiB of {free / GIB:.2f} GiB that a step leaves free on "
            f"{engine.device}; the others are run a second time"
        )
        return kept

    def free_beside_step(self, engine: Engine, sides: Sequence[Side] = ()) -> int:
        """Bytes that this rank has free when a step takes what it needs beside kept graphs."""
        return max(free_memory(engine.device) - self._rest_of_step(engine, sides), 0)

    def bytes_per_token(self) -> float:
        """Of a graph, the most that was seen, by padded token or patch."""
        return max(
            size / (known.padded_tokens + known.patches) for known, size in self._weighed.values()
        )

    def _rest_of_step(self, engine: Engine, sides: Sequence[Side]) -> int:
        largest = max((size for _, size in self._weighed.values()), default=0)
        shapes = [(engine.shape_of(p), p.requires_grad) for p in engine.module.parameters()]
        # Gradients, and the flat copies of them that are reduced; fp32 or wider.
        total = 2 * sum(8 * math.prod(shape) for shape, is_trained in shapes if is_trained)
        if engine.shards_parameters:
            total += sum(4 * math.prod(shape) for shape, _ in shapes)
        rows = sum(max(side.num_rows) for side in sides) * engine.world_size
        # A graph that is built anew, and what goes backward through it.
        return total + 2 * largest + _COPIES_OF_EMBEDDINGS * 4 * rows * self._width

    def bound(self, side: Side, chunk: Chunk) -> float:
        """Bytes that a chunk's graph takes at most; infinity where no such chunk was weighed.

        A graph is a sum of parts, each proportional to one of the chunk's amounts, or constant: so
        none grows faster than the fastest of them.
        """
        kind, amounts = _kind(side, chunk), _amounts(chunk)
        bounds = (
            size * max(1.0, *(_ratio(a, b) for a, b in zip(amounts, known, strict=True)))
            for (of_kind, _), (known, size) in self._weighed.items()
            if of_kind == kind
        )
        return min(bounds, default=math.inf)

    def weigh(
        self,
        engine: Engine,
        side: Side,
        chunk: Chunk,
        forward: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ``forward`` and return what it gives; weigh its graph where that may tell more."""
        key = (_kind(side, chunk), _amounts(chunk).padded_tokens.bit_length())
        if not self._weighs or key in self._weighed:
            return forward()
        if engine.device.type == "cuda":
            before = torch.cuda.memory_allocated(engine.device)
            output, log_scale = forward()
            size = torch.cuda.memory_allocated(engine.device) - before
        else:
            with _LiveBytes() as live:
                output, log_scale = forward()
            size = live.total()
        self._width = output.shape[1]
        self._weighed[key] = (_amounts(chunk), max(size, 0))
        return output, log_scale

    def _say(self, text: str) -> None:
        if not self._said:
            self._said = True
            logger.info("batch.replay %s: %s", self._replay, text)


def _kind(side: Side, chunk: Chunk) -> Kind:
    return side.role, chunk.get("pixel_values") is not None, side.must_touch(chunk)


def _amounts(chunk: Chunk) -> Amounts:
    mask_BL = chunk["attention_mask"]
    lengths_B = mask_BL.sum(dim=1)
    grid = chunk.get("image_grid_thw")
    patches = torch.zeros(0, dtype=torch.int64) if grid is None else grid.prod(dim=1)
    rows, width = rows_of(chunk), mask_BL.shape[1]
    return Amounts(
        padded_tokens=rows * width,
        padded_pairs=rows * width**2,
        tokens=int(lengths_B.sum()),
        pairs=int((lengths_B**2).sum()),
        patches=int(patches.sum()),
        patch_pairs=int((patches**2).sum()),
        rows=rows,
        images=len(patches),
    )


def _ratio(wanted: int, known: int) -> float:
    if known == 0:
        return math.inf if wanted else 0.0
    return wanted / known


class _LiveBytes(TorchDispatchMode):
    """Counts the storages that were made in its body and still live, whoever holds them.

    Hooks on saved tensors would not see what a checkpoint keeps to run a layer again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {s._cdata for s in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def total(self) -> int:
        """Bytes of what lives now."""
        return sum(size for reference, size in self._made.values() if not reference.expired())


def _storages(tree: object) -> list[torch.UntypedStorage]:
    leaves = (x for x in tree_leaves(tree) if isinstance(x, torch.Tensor))
    # A wrapper has none of its own; what is inside comes along by itself.
    return [x.untyped_storage() for x in leaves if not is_traceable_wrapper_subclass(x)]
