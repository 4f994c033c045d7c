"""A frozen second encoder that tells which documents are no negatives.

As in GISTEmbed (Solatorio 2024, section 3): a document that the guide finds more similar to a query
than the query's positive is likely an answer as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.parts import ModelConfig
from pixelrag.data.schema import PairRow
from pixelrag.distributed.collectives import gather_with_grad
from pixelrag.distributed.env import World
from pixelrag.distributed.together import together
from pixelrag.gradcache.chunking import Chunking
from pixelrag.models import load_embedder
from pixelrag.models.embedder import Embedder
from pixelrag.train.inputs import require_text

Inputs = dict[str, torch.Tensor]


class FrozenEncoder:
    """A model that is not trained, whole on every rank; `retrieval.encode` takes it for an engine.

    Args:
        model: what to load.
        world: this process's place.
        half_precision: hold and run it in bf16.

    Attributes:
        preprocessor: makes its inputs, with its own instructions.

    Raises:
        ModelError: it cannot be loaded.
    """

    def __init__(self, model: ModelConfig, world: World, *, half_precision: bool) -> None:
        self.rank, self.world_size, self.device = world.rank, world.world_size, world.device
        dtype = torch.bfloat16 if half_precision else torch.float32
        embedder, self.preprocessor = load_embedder(
            model, dtype=dtype, half_precision=half_precision, frozen=True
        )
        self._embedder = embedder.to(world.device).eval()

    def __call__(self, role: str, *, touch_vision: bool = False, **inputs: Any) -> tuple:
        """Embed one batch; the role has gone into the inputs already."""
        return (self._embedder(touch_vision=touch_vision, **inputs),)

    def inference(self) -> contextlib.AbstractContextManager:
        """Without gradients; the model is always in eval mode."""
        return torch.no_grad()

    def gather(self, local_BD: torch.Tensor) -> torch.Tensor:
        """All-gather equally shaped rows."""
        return gather_with_grad(local_BD)


class Guide(FrozenEncoder):
    """The encoder of `loss.mask_guide`.

    Args:
        model, world, half_precision: see `FrozenEncoder`.
        chunking: cuts what is encoded at once.
    """

    def __init__(
        self, model: ModelConfig, world: World, *, chunking: Chunking, half_precision: bool
    ) -> None:
        super().__init__(model, world, half_precision=half_precision)
        self._chunking = chunking

    def require_readable(self, rows: Iterable[PairRow]) -> None:
        """Refuse rows with images where it reads text only.

        Raises:
            DataError: names the first.
        """
        if not self.preprocessor.has_vision:
            require_text(rows, "loss.mask_guide")

    def embed(self, inputs: Inputs) -> torch.Tensor:
        """[rows, G] float32 on its device, chunk by chunk."""
        return embed_chunks(self._embedder, self._chunking(inputs), self.device)


def embed_chunks(
    embedder: Embedder, chunks: Iterable[Inputs], device: torch.device
) -> torch.Tensor:
    """[rows, G] float32, without gradients, by a model that lies on ``device``."""
    rows = []
    with torch.no_grad():
        for chunk in chunks:
            on_device = {key: value.to(device) for key, value in chunk.items()}
            rows.append(embedder(**on_device).float())
    return torch.cat(rows)


def open_guide(config: ContrastiveConfig, world: World) -> Guide | None:
    """Load ``loss.mask_guide``; None where none is named. A collective."""
    if config.loss.mask_guide is None:
        return None
    with together():
        return Guide(
            ModelConfig(name_or_path=config.loss.mask_guide),
            world,
            chunking=Chunking(config.batch.chunk_size, config.batch.chunk_tokens),
            half_precision=config.engine.precision == "bf16",
        )
