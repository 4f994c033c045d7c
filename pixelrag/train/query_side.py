"""Query-side tuning (`train: [query]`): documents stay as the base model embeds them.

The document tower is the model that the run began with, frozen and whole on every rank. Every
training document is embedded once, before the first step, in eval mode; a step looks its documents
up by content. An index that was built with the base model then stays valid for what was trained.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.parts import ModelConfig
from pixelrag.data.content import content_of
from pixelrag.data.schema import Document
from pixelrag.distributed.env import World
from pixelrag.distributed.together import together
from pixelrag.engine.base import Engine
from pixelrag.errors import NonFiniteError
from pixelrag.evaluate.pairs import document_length
from pixelrag.models.source import resolve_source, saved_settings
from pixelrag.retrieval.encode import encode
from pixelrag.train.guide import FrozenEncoder

logger = logging.getLogger("pixelrag")


class DocumentTower(FrozenEncoder):
    """A frozen encoder of documents, and the vectors of those that it was given."""

    def index(self, documents: Sequence[Document], *, batch_size: int) -> None:
        """Embed every document; a collective. Those of equal content are embedded once.

        Raises:
            NonFiniteError: a vector holds NaN or infinity.
        """
        with together():
            distinct = {content_of(document): document for document in documents}
        self._row = {content: row for row, content in enumerate(distinct)}
        chosen = list(distinct.values())
        self._vectors_ND = encode(
            self, "document", chosen, self.preprocessor.documents,
            batch_size=batch_size, length=document_length,
        )  # fmt: skip
        bad = (~torch.isfinite(self._vectors_ND).all(dim=1)).nonzero().flatten().tolist()
        if bad:
            raise NonFiniteError(
                f"{len(bad)} document vectors are not finite, first that of {chosen[bad[0]].key!r}"
            )
        logger.info("train [query]: embedded %d documents, once and for all", len(chosen))

    def vectors(self, content_M: torch.Tensor) -> torch.Tensor:
        """[M, D] fp32 on the device, by `content_of` of indexed documents."""
        rows = [self._row[content] for content in content_M.tolist()]
        return self._vectors_ND[rows].to(self.device)


class Towers:
    """An engine that embeds queries and a tower that embeds documents, as one encoder."""

    def __init__(self, engine: Engine, documents: DocumentTower) -> None:
        self.rank, self.world_size, self.device = engine.rank, engine.world_size, engine.device
        self._engine, self._documents = engine, documents

    def __call__(self, role: str, **batch: Any) -> Any:
        """Embed one batch by its tower."""
        return (self._documents if role == "document" else self._engine)(role, **batch)

    def inference(self) -> contextlib.AbstractContextManager:
        """As the engine's."""
        return self._engine.inference()

    def gather(self, local_BD: torch.Tensor) -> torch.Tensor:
        """As the engine's."""
        return self._engine.gather(local_BD)


def open_document_tower(config: ContrastiveConfig, world: World) -> DocumentTower | None:
    """Load the tower that training keeps; None where documents are trained. A collective."""
    return None if "document" in config.train else _open(config, config.model, world)


def tower_of_model(config: ContrastiveConfig, world: World) -> DocumentTower | None:
    """Load the document tower that belongs to an exported query tower; None for other models.

    A collective.
    """
    with together():
        name = saved_settings(resolve_source(config.model.name_or_path)).get("document_encoder")
    if name is None:
        return None
    model = config.model.model_copy(update={"name_or_path": name, "adapter": None})
    return _open(config, model, world)


def _open(config: ContrastiveConfig, model: ModelConfig, world: World) -> DocumentTower:
    with together():
        return DocumentTower(model, world, half_precision=config.engine.precision == "bf16")
