"""End-to-end RAG: both encoders, the generator, and questions with their passages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pixelrag.config.parts import LoraConfig
from pixelrag.config.rag import RagConfig
from pixelrag.config.rag_models import EncoderConfig
from pixelrag.distributed.collectives import exchange
from pixelrag.engine import Engine
from pixelrag.errors import ConfigError
from pixelrag.gradcache.rag import rag_step
from pixelrag.gradcache.rag_batch import RagBatch
from pixelrag.models.embedder import Embedder
from pixelrag.models.generator_load import outline_generator
from pixelrag.models.load import outline_embedder
from pixelrag.plan.workload import Lengths, M, capped, texts, without_content
from pixelrag.retrieval.encode import encode
from pixelrag.retrieval.index import bytes_of_index
from pixelrag.retrieval.recipe import index_settings
from pixelrag.train import rag as job
from pixelrag.train.rag_data import container_of, document_encoder_config


class RagWorkload:
    """See `plan.workload.Workload`. Passages are texts, each found by one question alone.

    Args:
        config: the job's configuration.
        lengths: `query` of questions, `document` of passages; the generator's prompts and answers
            are as long as `generator` allows.
        world_size: ranks that share a global batch.

    Raises:
        ConfigError: a length that the job has not (tiles as passages are not planned), or a loss
            that the generator cannot have.
    """

    part_of = staticmethod(job.part_of)

    def __init__(self, config: RagConfig, lengths: Lengths, world_size: int) -> None:
        lengths.only("rag", "query", "document", "passages")
        self._config, self._world_size = config, world_size
        self._passages = lengths.passages
        own, document = document_encoder_config(config), None
        question = self._encoder(config.question_encoder, "question")
        if not config.shares_encoder:
            document = self._encoder(own, "document")
        generator = outline_generator(
            config.generator,
            config.generator_lora,
            observed=config.loss.retriever == "adist",
        )
        if config.loss.answer == "fid" and not generator.is_seq2seq:
            raise ConfigError("loss.answer fid needs an encoder-decoder; use rag_sequence")
        self._generator = self._placed(generator, "generator")
        self._model, self._objective = container_of(config, question, document, self._generator)
        self.container: nn.Module = self._model
        self.blocks: Sequence[nn.Module] = self._model.blocks()
        self.frozen: Sequence[nn.Module] = []
        self.vocab_sizes = frozenset((generator.vocab_size,))
        self._num = -(-config.batch.rows(world_size) // world_size)
        self._num_all = config.batch.rows(world_size)
        self._question_encoder = question
        query = lengths.query or config.question_encoder.query_max_length
        self._question = capped(query, question)
        self._passage = capped(lengths.document or own.document_max_length, document or question)

    def _encoder(self, encoder: EncoderConfig, part: str) -> Embedder:
        lora = self._config.encoder_lora if part in self._config.train else LoraConfig()
        return self._placed(outline_embedder(encoder, lora), part)

    def _placed(self, model: M, part: str) -> M:
        if part not in self._config.train:
            model.requires_grad_(False)
        return without_content(model, half_precision=self._config.engine.precision == "bf16")

    @property
    def tokens(self) -> int:
        reader = self._config.generator
        pairs = self._num * self._config.retrieval.k
        read = reader.prompt_max_length + reader.target_max_length
        rows = self._num * self._question + pairs * (self._passage + read)
        return rows * self._config.batch.gradient_accumulation_steps

    @property
    def index_bytes(self) -> dict[str, int]:
        """Host memory of a rank: the index, and the vectors that it maps beside it."""
        if self._passages is None:
            return {}
        width, index = self._question_encoder.embedding_dim, self._config.index
        size = bytes_of_index(index_settings(index), self._passages, width)
        # Ranks hold whole index files; there may be fewer ranks than files, or more.
        held = -(-index.num_shards // min(self._world_size, index.num_shards))
        return {
            "index": size * held // index.num_shards,
            "vectors of passages, mapped": 4 * width * self._passages,
        }

    def begin(self) -> None:
        """Everything is in the container."""

    def step(self, engine: Engine) -> None:
        sizes = self._config.batch
        for number in range(sizes.gradient_accumulation_steps):
            self._retrieve(engine)
            rag_step(
                engine,
                self._batch(self._config.retrieval.k),
                self._objective,
                {
                    "query": sizes.question_chunk_size,
                    "document": sizes.document_chunk_size,
                    "generator": sizes.generator_chunk_size,
                },
                trained=self._model.trained,
                weight=1 / sizes.gradient_accumulation_steps,
                last=number == sizes.gradient_accumulation_steps - 1,
            )

    def _retrieve(self, engine: Engine) -> None:
        """What `train.rag_retrieve.Retriever` does on the device: the index is in host memory."""
        retrieval = self._config.retrieval
        size = retrieval.batch_size

        def some(role: str, count: int, length: int) -> None:
            encode(
                engine, role, range(count), lambda rows: texts(len(rows), length),
                batch_size=size, length=int,
            )  # fmt: skip

        some("query", self._num_all, self._question)
        if retrieval.over_retrieve is not None:
            some("document", self._num_all * retrieval.over_retrieve, self._passage)
        exchange([0] * self._num * retrieval.k)

    def _batch(self, k: int) -> RagBatch:
        num, reader, objective = self._num, self._config.generator, self._objective
        pairs_BK = torch.arange(num * k).view(num, k)
        lengths = reader.prompt_max_length, reader.target_max_length
        apart, joint = _reading(num * k, *lengths), _reading(num, *lengths, together=k)
        fused = objective.answer == "fid"
        readings: dict[str, torch.Tensor] | None = None
        if objective.leaves_out:
            readings = _reading(num * k, *lengths, together=k)
        elif objective.watches:
            readings = joint if self._model.generator.is_seq2seq else apart
        elif objective.reads_apart:
            readings = apart
        decodes = not self._model.generator.is_seq2seq
        if readings is not None and objective.watches and decodes:
            readings |= {"passage_mask": torch.ones_like(apart["input_ids"])}
        return RagBatch(
            queries=texts(num, self._question),
            documents=texts(num * k, self._passage),
            generator=joint if fused else apart,
            document_BK=pairs_BK,
            pair_BK=pairs_BK,
            target_mask_BT=torch.ones(num, reader.target_max_length, dtype=torch.bool),
            num_real=num,
            readings=readings,
            document_keys=tuple(range(num * k)),
            gold=tuple((row * k,) for row in range(num)),
        )


def _reading(rows: int, prompt: int, target: int, together: int = 0) -> dict[str, torch.Tensor]:
    """Prompts with their answers; ``together``: so many passages to an answer."""
    prompts = texts(rows, prompt)
    if together:
        prompts = {key: value[:, None].repeat(1, together, 1) for key, value in prompts.items()}
    targets = torch.ones(rows, target, dtype=torch.int64)
    return prompts | {"target_ids": targets, "target_mask": targets}
