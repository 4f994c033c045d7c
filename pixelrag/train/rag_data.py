"""What a RAG job reads: passages, questions, what is held out; and the models that read them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from pixelrag.config.parts import LoraConfig
from pixelrag.config.rag import RagConfig
from pixelrag.config.rag_models import EncoderConfig
from pixelrag.data.images import image_progress_bar
from pixelrag.data.passages import PassageStore, load_passages
from pixelrag.data.questions import Question, QuestionDataset
from pixelrag.distributed.collectives import from_main
from pixelrag.distributed.together import together
from pixelrag.errors import ConfigError, DataError, ModelError
from pixelrag.losses.rag_objective import RagObjective
from pixelrag.models.embedder import Embedder
from pixelrag.models.generator import Generator
from pixelrag.models.generator_load import load_generator
from pixelrag.models.generator_prompt import GeneratorPreprocessor
from pixelrag.models.load import load_embedder
from pixelrag.models.preprocess import Preprocessor
from pixelrag.models.rag import RagModel
from pixelrag.retrieval import reopen

logger = logging.getLogger("pixelrag")


@dataclass(frozen=True, slots=True)
class RagData:
    """Passages, questions to train on, and held-out ones (None = nothing is held out)."""

    passages: PassageStore
    questions: QuestionDataset
    held_out: list[Question] | None


@dataclass(frozen=True, slots=True)
class RagParts:
    """The container, its loss, and what makes inputs for each of its parts."""

    container: RagModel
    objective: RagObjective
    queries: Preprocessor
    documents: Preprocessor
    generator: GeneratorPreprocessor


def document_encoder_config(config: RagConfig) -> EncoderConfig:
    """Of the encoder that reads passages."""
    if config.shares_encoder:
        return config.question_encoder
    return EncoderConfig(**config.document_encoder.model_dump())


def passage_options(config: RagConfig) -> dict[str, Any]:
    """Arguments of `pixelrag.retrieval.reopen.passages`, JSON."""
    base = config.knowledge_base
    options: dict[str, Any] = {
        "source": base.source,
        "split": base.split,
        "length": base.length,
        "overlap": base.overlap,
        "dataset_split": base.dataset_split,
    }
    if base.split == "tokens":
        options["tokenizer"] = document_encoder_config(config).name_or_path
    return options


def read_passages(config: RagConfig) -> PassageStore:
    """Read the knowledge base and decode its images, in this process alone.

    Raises:
        DataError: any passage is bad.
    """
    options = passage_options(config)
    name = options.pop("tokenizer", None)
    tokenizer = None if name is None else reopen.load_tokenizer(name)
    with image_progress_bar(f"Opening images of {config.knowledge_base.source}") as progress:
        roots = config.knowledge_base.image_roots
        return load_passages(**options, tokenizer=tokenizer, image_roots=roots, progress=progress)


def open_data(config: RagConfig) -> RagData:
    """Check passages and questions, and open them on every rank; a collective.

    Raises:
        DataError: a source or a row cannot be used; on all ranks.
    """
    # Rank 0 decodes every image once; the others read what it has checked.
    fingerprint = from_main(lambda: read_passages(config).fingerprint)
    with together():
        passages = reopen.passages(**passage_options(config))
        if passages.fingerprint != fingerprint:
            raise DataError(
                f"{config.knowledge_base.source}: not the passages that rank 0 has read; every "
                "process must see the same files, and they may not change during the run"
            )
        data = config.data
        questions = QuestionDataset(data.train, data.bad_rows, passages=passages)
        held_out = None
        if data.eval:
            held_out = QuestionDataset(data.eval, data.bad_rows, passages=passages).rows
            held_out = held_out[: config.eval.max_questions]
        return RagData(passages, questions, held_out)


def build_parts(config: RagConfig) -> RagParts:
    """Load all models, on the CPU; a collective."""
    with together():
        query_encoder, queries = _load_encoder(config, config.question_encoder, "question")
        document_encoder, documents = None, queries
        if not config.shares_encoder:
            own = document_encoder_config(config)
            document_encoder, documents = _load_encoder(config, own, "document")
        bf16 = config.engine.precision == "bf16"
        lora = config.generator_lora
        generator, prompts = load_generator(
            config.generator,
            lora,
            dtype=_dtype(bf16, lora.enabled or "generator" not in config.train),
            half_precision=bf16,
            seed=config.seed,
            observed=config.loss.retriever == "adist",
        )
        width = (document_encoder or query_encoder).embedding_dim
        if query_encoder.embedding_dim != width:
            raise ModelError(
                f"question_encoder gives vectors of {query_encoder.embedding_dim} numbers, "
                f"document_encoder of {width}; they must be of one kind"
            )
        check_generator(config, prompts)
        container, objective = container_of(config, query_encoder, document_encoder, generator)
        if objective.vocabulary == "all":
            pairs = config.batch.per_device_batch_size * config.retrieval.k
            size = pairs * prompts.text.target_max_length * objective.vocab_size * 4 / 2**30
            logger.info(
                "loss.label_smoothing with rag_token keeps the whole vocabulary's probabilities of "
                "%d answers: up to %.1f GiB, a few times over. rag_sequence and fid do not",
                pairs, size,
            )  # fmt: skip
    return RagParts(container, objective, queries, documents, prompts)


def container_of(
    config: RagConfig,
    query_encoder: Embedder,
    document_encoder: Embedder | None,
    generator: Generator,
) -> tuple[RagModel, RagObjective]:
    """All models in one module, and the loss that it serves."""
    objective = RagObjective(
        **config.loss.model_dump(exclude={"temperature", "learnable_temperature"}),
        vocab_size=generator.vocab_size,
    )
    container = RagModel(
        query_encoder,
        document_encoder,
        generator,
        train=config.train,
        temperature=config.loss.temperature,
        learnable_temperature=config.loss.learnable_temperature,
        vocabulary=objective.vocabulary,
    )
    return container, objective


def load_document_encoder(config: RagConfig) -> tuple[Embedder, Preprocessor]:
    """The encoder of passages as it is configured, without adapters, for who will not train it.

    Raises:
        ModelError: it is not there.
    """
    bf16 = config.engine.precision == "bf16"
    return load_embedder(
        document_encoder_config(config),
        dtype=_dtype(bf16, frozen=True),
        half_precision=bf16,
        seed=config.seed,
    )


def check_rows(config: RagConfig, data: RagData, parts: RagParts) -> None:
    """Refuse what the models cannot read, before the first step meets it hours later.

    Raises:
        DataError: names the first row.
    """
    check_lengths(config, data, parts.generator)
    check_images(config, data.passages, parts.documents, parts.generator)


def check_images(
    config: RagConfig,
    passages: PassageStore,
    documents: Preprocessor,
    prompts: GeneratorPreprocessor,
) -> None:
    """Refuse images where an encoder or the generator reads text only.

    Raises:
        DataError: names the model's section.
    """
    if passages.has_images:
        for section, reads in (
            ("document_encoder", documents.has_vision),
            ("generator", prompts.has_vision),
        ):
            if not reads:
                raise DataError(
                    f"{config.knowledge_base.source} holds images, but the model of {section} "
                    "reads text only; name a vision model of the kind Qwen3-VL"
                )


def check_lengths(config: RagConfig, data: RagData, prompts: GeneratorPreprocessor) -> None:
    """Refuse questions, and answers to train on, that do not fit whole.

    Raises:
        DataError: names the first row.
    """
    for question in data.questions:
        used = question.answers if config.data.answers == "sample" else question.answers[:1]
        for answer in used:
            prompts.check(question.text, answer, question.sample_id)
    for question in data.held_out or ():
        # Its answers are compared, never read.
        prompts.check(question.text, "", question.sample_id)


def _load_encoder(config: RagConfig, encoder: EncoderConfig, part: str) -> tuple[Any, Preprocessor]:
    bf16 = config.engine.precision == "bf16"
    trained = part in config.train
    # An adapter that is not trained would be of no use.
    lora = config.encoder_lora if trained else LoraConfig()
    return load_embedder(
        encoder,
        lora,
        dtype=_dtype(bf16, lora.enabled or not trained),
        half_precision=bf16,
        seed=config.seed,
        frozen=not trained,
    )


def _dtype(bf16: bool, frozen: bool) -> torch.dtype:
    # Frozen weights need no fp32 master; whatever is trained has one.
    return torch.bfloat16 if bf16 and frozen else torch.float32


def check_generator(config: RagConfig, prompts: GeneratorPreprocessor) -> None:
    """Refuse a loss that the generator cannot have.

    Raises:
        ConfigError: fusion with a decoder, or an excluded first token where there is none.
    """
    if config.loss.answer == "fid" and not prompts.text.is_seq2seq:
        raise ConfigError(
            "loss.answer fid needs an encoder-decoder, which reads passages apart and answers from "
            f"all of them; {config.generator.name_or_path} is a decoder. Use rag_sequence or "
            "rag_token"
        )
    if config.loss.exclude_bos and not prompts.text.starts_with_bos:
        raise ConfigError(
            f"loss.exclude_bos true, but answers of {config.generator.name_or_path} do not begin "
            "with a token of their own; the first one counts. Set it false"
        )
