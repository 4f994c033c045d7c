"""The RAG job's configuration, and the rules that span its sections."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from pixelrag.config.base import JobConfig
from pixelrag.config.parts import EngineConfig, LoggingConfig, LoraConfig
from pixelrag.config.problems import Conflict, shown
from pixelrag.config.rag_models import DocumentEncoderConfig, EncoderConfig, GeneratorConfig
from pixelrag.config.rag_parts import (
    IndexConfig,
    RayConfig,
    RefreshConfig,
    ray_conflicts,
    refresh_conflicts,
)
from pixelrag.config.rag_sections import (
    KnowledgeBaseConfig,
    QuestionDataConfig,
    RagBatchConfig,
    RagCheckpointConfig,
    RagEvalConfig,
    RagLossConfig,
    RagOptimConfig,
    RetrievalConfig,
)
from pixelrag.config.rules import (
    engine_conflicts,
    length_conflicts,
    lora_conflicts,
    resume_conflicts,
)

Part = Literal["question", "document", "generator"]

METRICS = (
    "eval/em",
    "eval/f1",
    "eval/recall@1",
    "eval/recall@5",
    "eval/answer_recall@1",
    "eval/answer_recall@5",
)


class RagConfig(JobConfig):
    """Everything `pixelrag rag` can be told."""

    adaptable: ClassVar[tuple[str, ...]] = (
        *(
            f"{part}.{option}"
            for part in ("question_encoder", "document_encoder", "generator")
            for option in ("attention", "gradient_checkpointing")
        ),
        "question_encoder.unpadded",
        "document_encoder.unpadded",
        "batch.question_chunk_size",
        "batch.document_chunk_size",
        "batch.generator_chunk_size",
        "retrieval.batch_size",
    )

    output_dir: str = Field("runs/rag", min_length=1)
    """Folder of the run: metrics, checkpoints, exported models, generations of the index."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of data order, dropout and fresh weights."""
    train: list[Part] = Field(["question", "document", "generator"], min_length=1)
    """Parts to train; the others stay as they are."""
    question_encoder: EncoderConfig
    document_encoder: DocumentEncoderConfig = DocumentEncoderConfig()
    generator: GeneratorConfig
    encoder_lora: LoraConfig = LoraConfig()
    generator_lora: LoraConfig = LoraConfig()
    knowledge_base: KnowledgeBaseConfig
    data: QuestionDataConfig
    retrieval: RetrievalConfig = RetrievalConfig()
    loss: RagLossConfig = RagLossConfig()
    index: IndexConfig = IndexConfig()
    refresh: RefreshConfig = RefreshConfig()
    ray: RayConfig = RayConfig()
    batch: RagBatchConfig = RagBatchConfig()
    optim: RagOptimConfig = RagOptimConfig()
    engine: EngineConfig = EngineConfig()
    eval: RagEvalConfig = RagEvalConfig()
    checkpoint: RagCheckpointConfig = RagCheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def shares_encoder(self) -> bool:
        """Whether one encoder reads questions and passages."""
        return self.document_encoder.name_or_path is None

    def conflicts(self) -> Iterator[Conflict]:
        """Yield every pair of settings that cannot stand together, with what mends it."""
        yield from length_conflicts(self.optim)
        yield from engine_conflicts(self.engine)
        yield from refresh_conflicts(self.refresh)
        if self.index.device == "cuda" and self.engine.device == "cpu":
            yield Conflict(
                ("index.device", "engine.device"),
                got="index.device cuda with engine.device cpu",
                remedy="a rank searches on the GPU that it trains on: leave one of them out",
            )
        yield from ray_conflicts(self.ray, self.index, self.refresh)
        yield from _part_conflicts(self)
        yield from _loss_conflicts(self.loss)
        yield from _knowledge_conflicts(self)
        yield from _evaluation_conflicts(self)
        yield from resume_conflicts(self)


def _part_conflicts(config: RagConfig) -> Iterator[Conflict]:
    trained = set(config.train)
    if len(config.train) > len(trained):
        yield Conflict(("train",), got=f"train {shown(config.train)}", remedy="name each part once")
    if config.shares_encoder:
        if ("question" in trained) != ("document" in trained):
            yield Conflict(
                ("train", "document_encoder.name_or_path"),
                got=f"train {shown(config.train)} with one encoder for questions and passages",
                remedy="name both of question and document or neither, or give passages an "
                "encoder of their own in document_encoder.name_or_path",
            )
        defaults = DocumentEncoderConfig()
        for name in DocumentEncoderConfig.model_fields:
            value = getattr(config.document_encoder, name)
            if value != getattr(defaults, name):
                yield Conflict(
                    (f"document_encoder.{name}", "document_encoder.name_or_path"),
                    got=f"document_encoder.{name} {shown(value)} without an encoder of that name",
                    remedy=f"set question_encoder.{name}, or document_encoder.name_or_path",
                )
    if "document" not in trained and config.refresh.every_steps is not None:
        yield Conflict(
            ("refresh.every_steps", "train"),
            got=f"refresh.every_steps {config.refresh.every_steps} without training the document "
            "encoder",
            remedy="leave it out (the passages' vectors do not change), or add document to train",
        )
    retriever = config.loss.retriever
    # With fid one must be named; it is the generator's alone then.
    needless = retriever != "marginal" and config.loss.answer != "fid"
    if needless and not trained & {"question", "document"}:
        yield Conflict(
            ("loss.retriever", "train"),
            got=f"loss.retriever {retriever} with train {shown(config.train)}: no encoder learns",
            remedy="add question or document to train, or leave loss.retriever out",
        )
    for section, parts in (
        ("encoder_lora", {"question", "document"}),
        ("generator_lora", {"generator"}),
    ):
        lora = getattr(config, section)
        if lora.enabled and not parts & trained:
            yield Conflict(
                (f"{section}.enabled", "train"),
                got=f"{section}.enabled true with train {shown(config.train)}",
                remedy=f"add {' or '.join(sorted(parts))} to train, or set it false",
            )
        yield from lora_conflicts(lora, section)


def _loss_conflicts(loss: RagLossConfig) -> Iterator[Conflict]:
    if loss.answer == "fid" and loss.retriever == "marginal":
        yield Conflict(
            ("loss.answer", "loss.retriever"),
            got="loss.answer fid with loss.retriever marginal",
            remedy="set loss.retriever to emdr2, pdist, loop or adist: reading all passages at "
            "once leaves nothing to marginalise",
        )
    defaults, own = RagLossConfig(), loss.retriever != "marginal"
    users = {
        "retriever_weight": (own, "a loss.retriever of its own"),
        "reader_temperature": (
            loss.retriever in ("pdist", "loop", "adist"),
            "loss.retriever pdist, loop or adist",
        ),
    }
    for name, (used, needs) in users.items():
        value = getattr(loss, name)
        if not used and value != getattr(defaults, name):
            yield Conflict(
                (f"loss.{name}", "loss.retriever"),
                got=f"loss.{name} {value} without {needs}, which alone uses it",
                remedy=f"leave loss.{name} out, or set {needs}",
            )
    if not 0.01 <= loss.temperature <= 1:
        yield Conflict(
            ("loss.temperature",),
            got=f"loss.temperature {loss.temperature}",
            remedy="0.01 to 1",
        )


def _knowledge_conflicts(config: RagConfig) -> Iterator[Conflict]:
    base, retrieval = config.knowledge_base, config.retrieval
    if (base.length is None) != (base.split == "none"):
        yield Conflict(
            ("knowledge_base.length", "knowledge_base.split"),
            got=f"knowledge_base.split {base.split} with knowledge_base.length "
            f"{shown(base.length)}",
            remedy="give both or neither",
        )
    elif base.overlap and base.overlap >= (base.length or 0):
        yield Conflict(
            ("knowledge_base.overlap", "knowledge_base.length"),
            got=f"knowledge_base.overlap {base.overlap} with knowledge_base.length "
            f"{shown(base.length)}",
            remedy="share less than a passage holds",
        )
    if retrieval.over_retrieve is not None and retrieval.over_retrieve < retrieval.k:
        yield Conflict(
            ("retrieval.over_retrieve", "retrieval.k"),
            got=f"retrieval.over_retrieve {retrieval.over_retrieve} with retrieval.k {retrieval.k}",
            remedy="take at least k from the index",
        )


def _evaluation_conflicts(config: RagConfig) -> Iterator[Conflict]:
    metric = config.checkpoint.best_metric
    if metric not in METRICS:
        yield Conflict(
            ("checkpoint.best_metric",),
            got=f"checkpoint.best_metric {metric!r}",
            remedy=f"one of {', '.join(METRICS)}",
        )
    if metric in ("eval/em", "eval/f1") and not config.eval.answers and config.data.eval:
        yield Conflict(
            ("checkpoint.best_metric", "eval.answers"),
            got=f"checkpoint.best_metric {metric} while eval.answers is false",
            remedy="set checkpoint.best_metric to eval/recall@1, or eval.answers true",
        )
    if config.data.eval:
        return
    if config.checkpoint.keep_best:
        yield Conflict(
            ("checkpoint.keep_best", "data.eval"),
            got="checkpoint.keep_best true without data.eval",
            remedy="name held-out questions in data.eval, or set checkpoint.keep_best false",
        )
    for name in ("every_steps", "on_start", "fresh_index", "max_questions"):
        value = getattr(config.eval, name)
        if value not in (None, False):
            yield Conflict(
                (f"eval.{name}", "data.eval"),
                got=f"eval.{name} {shown(value)} without data.eval",
                remedy="name held-out questions in data.eval",
            )
