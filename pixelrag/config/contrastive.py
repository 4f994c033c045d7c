"""The contrastive job's configuration, and the rules that span its sections."""

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from pixelrag.config.base import JobConfig
from pixelrag.config.contrastive_data import DataConfig, data_conflicts
from pixelrag.config.contrastive_loss import LossConfig, loss_conflicts
from pixelrag.config.parts import (
    CheckpointConfig,
    EmaConfig,
    EngineConfig,
    EvalEvery,
    GlobalBatches,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
)
from pixelrag.config.problems import Conflict, shown
from pixelrag.config.rules import (
    ema_conflicts,
    engine_conflicts,
    length_conflicts,
    lora_conflicts,
    resume_conflicts,
)
from pixelrag.config.tile_questions import TILE_METRICS, TileQuestionOptions, tile_conflicts

IN_BATCH_METRICS = ("eval/loss", "eval/accuracy")
RETRIEVAL_METRICS = ("eval/recall@1", "eval/recall@5", "eval/recall@10", "eval/mrr", "eval/ndcg@10")


class RetrieverConfig(ModelConfig):
    training_state: str | None = None
    """PixelRAG's training_state.pt (or its folder), to take weights and temperature from."""

    unfrozen: list[Literal["text", "vision", "merger"]] | None = None
    """Parts whose own weights train; null = all of them without LoRA, none with it."""

    @field_validator("unfrozen")
    @classmethod
    def _once(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and (not value or len(set(value)) < len(value)):
            raise PydanticCustomError("parts", "some of text, vision and merger, each once")
        return value


class BatchConfig(GlobalBatches):
    per_device_batch_size: int = Field(128, ge=1)
    """Rows a rank contributes to one global batch."""
    global_batch_size: int | None = Field(None, ge=1)
    """Rows of a global batch on any number of ranks, in place of per_device_batch_size."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Global batches (each with its own negatives) to an optimizer step."""
    chunk_size: Annotated[int, Field(ge=1)] | Literal["auto"] = 16
    """Rows at once through the model: the memory, never the gradient; auto: by chunk_tokens."""
    chunk_tokens: int | None = Field(None, ge=1)
    """Tokens and patches of a chunk under chunk_size auto; null = as many as memory allows."""
    replay: Literal["auto", "all", "none"] = "all"
    """Which chunks run twice: all; none, their graphs being kept; auto: what memory cannot keep."""

    @property
    def chunks(self) -> str:
        """How large chunks are, in words."""
        if self.chunk_size != "auto":
            return str(self.chunk_size)
        return f"{self.chunk_tokens or 'as many as fit'} tokens and patches"


class RetrieverOptimConfig(OptimConfig):
    text_learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate of the language model or text encoder; null = learning_rate."""
    vision_learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate of the vision tower; null = learning_rate."""
    merger_learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate of the layers between the two; null = learning_rate."""
    temperature_learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate of temperature and bias; null = learning_rate."""


class EvalConfig(EvalEvery, TileQuestionOptions):
    batch_size: int = Field(32, ge=1)
    """Rows a rank encodes at once."""
    corpus: str | None = None
    """JSONL corpus to search; null = all documents of data.eval."""
    retrieval: bool = True
    """Measure recall, MRR and nDCG, beside loss and in-batch accuracy."""
    max_rows: int | None = Field(None, ge=1)
    """Use the first so many rows of data.eval; null = all."""


class ContrastiveConfig(JobConfig):
    """Everything `pixelrag contrastive` can be told."""

    adaptable: ClassVar[tuple[str, ...]] = ("loss.tile_size", "loss.exchange")
    presets = MappingProxyType({"pixelrag": "pixelrag.config.preset_pixelrag"})

    output_dir: str = Field("runs/contrastive", min_length=1)
    """Folder of the run: metrics, checkpoints, exported models."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of data order, dropout and fresh weights."""
    train: list[Literal["query", "document"]] = Field(["query", "document"], min_length=1)
    """What is trained; [query]: documents keep the vectors that model.name_or_path gives them."""
    model: RetrieverConfig
    lora: LoraConfig = LoraConfig()
    data: DataConfig
    loss: LossConfig = LossConfig()
    batch: BatchConfig = BatchConfig()
    optim: RetrieverOptimConfig = RetrieverOptimConfig()
    ema: EmaConfig = EmaConfig()
    engine: EngineConfig = EngineConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    def conflicts(self) -> Iterator[Conflict]:
        """Yield every pair of settings that cannot stand together, with what mends it."""
        yield from length_conflicts(self.optim)
        yield from engine_conflicts(self.engine)
        yield from data_conflicts(self.data, self.optim.max_steps)
        yield from tile_conflicts(self.eval)
        yield from _evaluation_conflicts(self)
        yield from ema_conflicts(self.ema, self.optim)
        yield from lora_conflicts(self.lora)
        yield from _unfrozen_conflicts(self)
        if self.batch.chunk_tokens is not None and self.batch.chunk_size != "auto":
            yield Conflict(
                ("batch.chunk_tokens", "batch.chunk_size"),
                got=f"batch.chunk_tokens {self.batch.chunk_tokens} with batch.chunk_size "
                f"{self.batch.chunk_size}, which counts rows",
                remedy="set batch.chunk_size auto, or batch.chunk_tokens null",
            )
        yield from loss_conflicts(self.loss)
        yield from resume_conflicts(self)
        yield from _query_side_conflicts(self)
        yield from _untouched_by_queries(self)

    @property
    def document_model(self) -> str | None:
        """The model that embeds documents, where only queries are trained."""
        if "document" in self.train:
            return None
        path = Path(self.model.name_or_path)  # a folder shall be found from elsewhere, too
        return str(path.resolve()) if path.is_dir() else str(self.model.name_or_path)


def _query_side_conflicts(config: ContrastiveConfig) -> Iterator[Conflict]:
    """Documents must be embedded by what `model.name_or_path` alone names, then and later."""
    if len(config.train) > len(set(config.train)):
        yield Conflict(("train",), f"train {shown(config.train)}", "name each part once")
    if "query" not in config.train:
        yield Conflict(
            ("train",),
            got="train without query; one model embeds both sides, and queries are asked of it",
            remedy="set train to [query, document] or [query]",
        )
    if "document" in config.train:
        return
    others = {
        "model.adapter": config.model.adapter,
        "model.training_state": config.model.training_state,
        "model.random_init": config.model.random_init or None,
        "checkpoint.init_from": config.checkpoint.init_from,
    }
    for name in (name for name, value in others.items() if value is not None):
        yield Conflict(
            ("train", name),
            got=f"train [query] with {name}, so that model.name_or_path does not name the model "
            "that embeds documents",
            remedy=f"name an export of that model in model.name_or_path, and leave {name} out",
        )


def _nothing_to_choose_by() -> Conflict:
    return Conflict(
        ("checkpoint.keep_best", "data.eval"),
        got="checkpoint.keep_best true without data.eval",
        remedy="name held-out rows in data.eval, or set checkpoint.keep_best false",
    )


def _untouched_by_queries(config: ContrastiveConfig) -> Iterator[Conflict]:
    """Queries are texts: the vision tower and its mergers do nothing for them."""
    if "document" in config.train:
        return
    lora, optim = config.lora, config.optim
    unfrozen = [part for part in config.model.unfrozen or () if part != "text"]
    others = {
        "model.unfrozen": unfrozen,
        "lora.vision": lora.vision != "none" and lora.vision,
        "lora.merger": lora.merger,
        "optim.vision_learning_rate": optim.vision_learning_rate,
        "optim.merger_learning_rate": optim.merger_learning_rate,
    }
    for name, value in others.items():
        if value:
            yield Conflict(
                ("train", name),
                got=f"train [query] with {name} {shown(value)}: no query goes through that part",
                remedy=f"leave {name} out, or set train to [query, document]",
            )


def _unfrozen_conflicts(config: ContrastiveConfig) -> Iterator[Conflict]:
    """Adapters where the weights below them train as well; chunks in which nothing trains."""
    unfrozen, lora, loss = config.model.unfrozen, config.lora, config.loss
    if not lora.enabled:
        always = loss.learnable_temperature or loss.name == "siglip"
        if unfrozen is not None and "text" not in unfrozen and not always:
            yield Conflict(
                ("model.unfrozen", "loss.learnable_temperature"),
                got="model.unfrozen without text, and loss.learnable_temperature false: in a chunk "
                "of texts nothing would train",
                remedy="set loss.learnable_temperature or lora.enabled true, or unfreeze text",
            )
        return
    adapted = {
        "text": "lora.enabled true",
        "vision": "" if lora.vision == "none" else f"lora.vision {lora.vision}",
        "merger": "lora.merger true" if lora.merger else "",
    }
    for part in unfrozen or ():
        if got := adapted[part]:
            yield Conflict(
                ("model.unfrozen", got.split()[0]),
                got=f"{part} in model.unfrozen with {got}, which adapts it",
                remedy="train its weights or adapters to them: drop one of the two",
            )


def _evaluation_conflicts(config: ContrastiveConfig) -> Iterator[Conflict]:
    metric, tiles = config.checkpoint.best_metric, config.eval.miniv8 is not None
    known = IN_BATCH_METRICS + RETRIEVAL_METRICS
    if metric not in known + TILE_METRICS:
        yield Conflict(
            ("checkpoint.best_metric",),
            got=f"checkpoint.best_metric {metric!r}",
            remedy=f"one of {', '.join(known + TILE_METRICS)}",
        )
    elif metric in RETRIEVAL_METRICS and not config.eval.retrieval and config.data.eval:
        yield Conflict(
            ("checkpoint.best_metric", "eval.retrieval"),
            got=f"checkpoint.best_metric {metric} while eval.retrieval is false",
            remedy="set checkpoint.best_metric to eval/loss or eval/accuracy, or "
            "eval.retrieval true",
        )
    elif metric in TILE_METRICS and not tiles:
        yield Conflict(
            ("checkpoint.best_metric", "eval.miniv8"),
            got=f"checkpoint.best_metric {metric} without eval.miniv8",
            remedy="name a question file in eval.miniv8, or another checkpoint.best_metric",
        )
    if config.eval.corpus is not None and not config.eval.retrieval:
        yield Conflict(
            ("eval.corpus", "eval.retrieval"),
            got="eval.corpus while eval.retrieval is false",
            remedy="set eval.retrieval true, or eval.corpus null",
        )
    if config.data.eval:
        return
    if config.checkpoint.keep_best and not tiles:
        yield _nothing_to_choose_by()
    for name in (
        ("corpus", "max_rows") if tiles else ("every_steps", "on_start", "corpus", "max_rows")
    ):
        value = getattr(config.eval, name)
        if value not in (None, False):
            yield Conflict(
                (f"eval.{name}", "data.eval"),
                got=f"eval.{name} {'true' if value is True else value} without data.eval",
                remedy="name held-out rows in data.eval",
            )
    if metric in known and (tiles or metric != CheckpointConfig().best_metric):
        or_else = f"set it to one of {', '.join(TILE_METRICS)}" if tiles else "leave it out"
        yield Conflict(
            ("checkpoint.best_metric", "data.eval"),
            got=f"checkpoint.best_metric {metric} without data.eval",
            remedy=f"name held-out rows in data.eval, or {or_else}",
        )
