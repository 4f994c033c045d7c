"""Contrastive training: an encoder, a temperature, and queries with their documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.parts import ModelConfig
from pixelrag.engine import Engine
from pixelrag.errors import ConfigError
from pixelrag.gradcache import gradcache_step
from pixelrag.gradcache.chunking import Chunking
from pixelrag.gradcache.keep import Keeper
from pixelrag.gradcache.step import Pairs
from pixelrag.models.embedder import Embedder
from pixelrag.models.load import outline_embedder
from pixelrag.plan.workload import Inputs, Lengths, capped, texts, with_images, without_content
from pixelrag.train import biencoder
from pixelrag.train import contrastive as job
from pixelrag.train.guide import embed_chunks


class ContrastiveWorkload:
    """See `plan.workload.Workload`.

    Args:
        config: the job's configuration.
        lengths: of queries and documents; `image` makes every document an image.
        world_size: ranks that share a global batch.
    """

    part_of = staticmethod(job.part_of)
    vocab_sizes: frozenset[int] = frozenset()
    index_bytes: ClassVar[dict[str, int]] = {}

    def __init__(self, config: ContrastiveConfig, lengths: Lengths, world_size: int) -> None:
        lengths.only("contrastive", "query", "document", "image")
        self._config = config
        self._half = config.engine.precision == "bf16"
        encoder = outline_embedder(config.model, config.lora)
        without_content(encoder, half_precision=self._half).train()
        self.container: nn.Module = biencoder.container_of(config, encoder)
        self.blocks: Sequence[nn.Module] = encoder.blocks()
        self._num_queries = -(-config.batch.rows(world_size) // world_size)
        self._num_documents = self._num_queries * (1 + (config.data.num_hard_negatives or 0))
        self._query = capped(lengths.query or config.model.query_max_length, encoder)
        self._document = capped(lengths.document or config.model.document_max_length, encoder)
        self._image = min(lengths.image or 0, config.model.max_visual_tokens)
        self._encoder = encoder
        self._fixes_documents = "document" not in config.train
        self._guide: Embedder | None = None
        self.frozen: list[nn.Module] = []
        if config.loss.mask_guide is not None:
            self._guide = self._frozen(ModelConfig(name_or_path=config.loss.mask_guide))
        if self._fixes_documents:
            self._frozen(config.model)
        for model in (encoder, self._guide):
            if self._image and model is not None and not model.has_vision:
                raise ConfigError(
                    f"--image_tokens: {type(model.base_model).__name__} reads no images; leave it "
                    "out, or name a vision model"
                )
        self._chunking = Chunking(config.batch.chunk_size, config.batch.chunk_tokens)
        self._keeper = Keeper(config.batch.replay, weighs=not self._chunking.is_settled)

    def _frozen(self, model: ModelConfig) -> Embedder:
        outlined = outline_embedder(model).requires_grad_(False)
        self.frozen.append(without_content(outlined, half_precision=self._half).eval())
        return outlined

    @property
    def tokens(self) -> int:
        documents = 0 if self._fixes_documents else self._num_documents
        rows = self._num_queries * self._query + documents * (self._image + self._document)
        return rows * self._config.batch.gradient_accumulation_steps

    def begin(self) -> None:
        """Frozen models lie whole on every rank."""

    def step(self, engine: Engine) -> None:
        batch, loss = self._config.batch, self._config.loss
        queries = texts(self._num_queries, self._query)
        documents = self._documents(self._encoder)
        guide: tuple[torch.Tensor, torch.Tensor] | None = None
        positive_BK = torch.arange(0, self._num_documents, self._num_documents // self._num_queries)
        content_M = torch.arange(self._num_documents) if loss.mask_same_content else None
        for number in range(batch.gradient_accumulation_steps):
            last = number == batch.gradient_accumulation_steps - 1
            if self._guide is not None:
                sides = queries, self._documents(self._guide)
                chunks = [Chunking(batch.chunk_size, batch.chunk_tokens)(side) for side in sides]
                query_BG, document_MG = (
                    embed_chunks(self._guide, side, engine.device) for side in chunks
                )
                guide = query_BG, document_MG
            gradcache_step(
                engine,
                self._chunking(queries),
                torch.zeros(self._num_documents, self._encoder.embedding_dim)
                if self._fixes_documents
                else self._chunking(documents),
                Pairs(positive_BK[:, None], content_M, guide),
                weight=1 / batch.gradient_accumulation_steps,
                last=last,
                objective=biencoder.objective_of(loss),
                exchange=loss.exchange,
                keeper=self._keeper,
            )
            if last and not self._chunking.is_settled:
                self._chunking.settle(engine, self._keeper)

    def _documents(self, model: Embedder) -> Inputs:
        documents = texts(self._num_documents, self._document)
        if not self._image:
            return documents
        return with_images(documents, model.base_model.config, self._image)
