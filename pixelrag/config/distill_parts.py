"""The distillation job's own sections.

Defaults are the playbook's (T = 2, CE weight 0.3, chunks of 2048, rows of 4096, micro-batch 4,
accumulation 2, seeds of 25), but for what needs a GPU.
"""

from datetime import date
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from pixelrag.config.parts import CheckpointConfig, DataFiles, EvalEvery, OptimConfig
from pixelrag.config.section import Section

Attention = Literal["auto", "eager", "sdpa", "flash_attention_2", "varlen"]
Switch = Literal["auto", "on", "off"]

TEMPLATE_DATE = "2024-07-26"
"""The day that Llama 3's templates fall back on where nobody tells them one."""


class StudentConfig(Section):
    name_or_path: str = Field(min_length=1)
    """Folder, GGUF file, Hugging Face name, or package:NAME/FOLDER of an installed package."""
    gguf_file: str | None = None
    """Name of a GGUF file within name_or_path; its weights are widened."""
    random_init: bool = False
    """Take the architecture of config.json alone, with fresh weights."""
    num_layers: int | None = Field(None, ge=1)
    """Keep so many layers, evenly spaced with the first and the last; null = all."""
    attention: Attention = "auto"
    """auto: flash_attention_2 where it runs, else varlen (exact, document by document), or sdpa."""
    liger: Switch = "auto"
    """Liger's RMSNorm, RoPE and SwiGLU, never its fused loss; auto: on CUDA where installed."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Compile the transformer layers (torch.compile)."""
    trust_remote_code: bool = False
    """Run Python code that the model's folder brings along."""


class TeacherConfig(Section):
    source: Literal["live", "remote", "hidden_states", "cache"] = "live"
    """live: beside the student; remote: served; hidden_states or cache (top-k logits): a folder."""
    name_or_path: str | None = Field(None, min_length=1)
    """As for the student; of a cache or a remote teacher it may be left out, and is compared."""
    gguf_file: str | None = None
    """Name of a GGUF file within name_or_path."""
    attention: Attention = "auto"
    """As for the student."""
    liger: Switch = "auto"
    """As for the student."""
    trust_remote_code: bool = False
    """Run Python code that the model's folder brings along."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of weights and computation; auto: engine.precision."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the student's."""
    placement: Literal["replicated", "sharded"] = "replicated"
    """sharded: each rank keeps its part of the layers (FSDP2) and gathers them one by one."""
    offload: bool = False
    """Keep the layers in CPU memory and bring them to the GPU one by one."""
    path: str | None = Field(None, min_length=1)
    """Folder of a cache, or the socket of a remote teacher."""


class AdapterConfig(Section):
    enabled: bool = False
    """Train low-rank adapters and freeze the model itself."""
    r: int = Field(32, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(32, gt=0)
    """Adapters are scaled by alpha / r."""
    dropout: float = Field(0.05, ge=0, lt=1)
    """Dropout in front of the adapters."""
    target_modules: list[str] | None = None
    """Names of the layers to adapt, lm_head among them if wished; null = attention projections."""


class ChatDataConfig(DataFiles):
    train: list[str] = Field(min_length=1)
    """JSONL files, or names of Hugging Face datasets: chats, prompt and completion, or text."""
    eval: list[str] = Field(default_factory=list)
    """Held-out ones of the same form."""
    eval_samples: int | None = Field(None, ge=1)
    """Hold out so many samples of data.train, drawn by split_seed, where data.eval is empty."""
    split_seed: int = Field(25, ge=0, lt=2**32)
    """Seed of what eval_samples holds out."""
    split: str = Field("train", min_length=1)
    """Split of a Hugging Face dataset."""
    streaming: bool = False
    """Read Hugging Face datasets as a stream, shuffled, up to max_samples."""
    stream_shuffle_seed: int = Field(25, ge=0, lt=2**32)
    """Seed of the stream's shuffling."""
    stream_shuffle_buffer: int = Field(10_000, ge=1)
    """Samples that the stream's shuffling draws from."""
    max_samples: int | None = Field(None, ge=1)
    """Use at most so many samples of data.train; null = all."""
    bad_rows: Literal["error", "skip"] = "error"
    """error: refuse to start on a bad row; skip: train without it and say how many there are."""
    supervise: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Tokens that count: of all the assistant's turns, of its last one, or all of them."""
    chat_template: str | None = Field(None, min_length=1)
    """File of a chat template; null = the tokenizer's own."""
    template_date: str = TEMPLATE_DATE
    """Day that a chat template is told is today, YYYY-MM-DD; the clock would change the data."""
    num_workers: int = Field(0, ge=0)
    """Processes a rank uses to prepare batches; 0 = none beside itself."""
    prefetch_factor: int = Field(2, ge=1)
    """Batches that each worker prepares ahead."""
    worker_timeout_seconds: int = Field(300, ge=1)
    """A worker that gives nothing for so long ends the run."""

    @field_validator("template_date", mode="before")
    @classmethod
    def _real_day(cls, value: Any) -> Any:
        try:
            # Python reads 20240726 and 2024-W30-5 as well; one day shall have one spelling.
            good = date.fromisoformat(value).isoformat() == value
        except (TypeError, ValueError):
            good = False
        if not good:
            raise PydanticCustomError("paths", f"a day as in {TEMPLATE_DATE}")
        return value


class PackingConfig(Section):
    enabled: bool = True
    """Several samples to a row; false: one, and padding."""
    length: int = Field(4096, ge=2)
    """Tokens of a row, and the most that a sample may have."""
    attention: Literal["isolated", "concatenated"] = "isolated"
    """isolated: a sample sees itself alone, as without packing; concatenated: all before it."""
    overlong: Literal["truncate", "split", "drop"] = "truncate"
    """What becomes of a sample longer than a row."""
    separator: Switch = "auto"
    """An end-of-text token between samples, not trained on; auto: where rows are concatenated."""
    mask_first_token: bool = False
    """Do not learn a sample's first token from the sample before it (concatenated rows)."""


class KDLossConfig(Section):
    kind: Literal["forward_kl", "reverse_kl", "jsd", "skewed_kl", "skewed_reverse_kl"] = (
        "forward_kl"
    )
    """The divergence between teacher and student."""
    temperature: float = Field(2.0, gt=0)
    """Divides both models' logits in the divergence, which then counts T squared."""
    ce_weight: float = Field(0.3, ge=0, lt=1)
    """Weight of the cross entropy; the divergence has the rest."""
    beta: float = Field(0.5, gt=0, lt=1)
    """The teacher's share in the mixture of jsd."""
    skew: float = Field(0.1, ge=0, lt=1)
    """What a skewed kind mixes into the distribution that it compares with."""
    top_k: int | None = Field(None, ge=1)
    """Compare on the teacher's so many likeliest tokens only; null = the whole vocabulary."""
    tail: Literal["bucket", "renormalise"] = "bucket"
    """What becomes of the tokens outside top_k: one further outcome, or nothing."""
    vocab_size: int | None = Field(None, ge=2)
    """Tokens that both models share; null = all of them, and they must have as many."""
    implementation: Literal["fused", "logits"] = "fused"
    """fused: from hidden states, chunk by chunk; logits: from whole logits, for unusual heads."""
    chunk_size: int | Literal["auto"] = 2048
    """Tokens whose logits exist at once; auto: from free memory."""
    precision: Literal["exact", "fast"] = "exact"
    """exact: fp32 logits; fast: logits in the model's dtype."""
    compile: bool = False
    """Compile the chunk's arithmetic (torch.compile)."""

    @field_validator("chunk_size", mode="before")
    @classmethod
    def _auto_or_positive(cls, value: Any) -> Any:
        if value == "auto":
            return value
        try:
            number = 0 if isinstance(value, bool | float) else int(value)
        except (ValueError, TypeError):
            number = 0
        if number < 1:
            raise PydanticCustomError("paths", "an integer of 1 or more, or auto")
        return number


class DistillBatchConfig(Section):
    per_device_batch_size: int = Field(4, ge=1)
    """Rows of a rank that go through the models at once."""
    gradient_accumulation_steps: int = Field(2, ge=1)
    """Such batches of a rank to an optimizer step; the result depends on their product alone."""
    global_batch_size: int | None = Field(None, ge=1)
    """Rows of an optimizer step on any number of ranks, in place of the accumulation steps."""

    def rows(self, world_size: int) -> int:
        """Rows of an optimizer step over all ranks."""
        a_rank = self.per_device_batch_size * self.gradient_accumulation_steps
        return self.global_batch_size or a_rank * world_size

    def arithmetic(self, world_size: int) -> str:
        """How the rows of a step come about, in words."""
        if self.global_batch_size is not None:
            return f"over {world_size} ranks, at most {self.per_device_batch_size} at once"
        accumulated = self.gradient_accumulation_steps
        return (
            f"{self.per_device_batch_size} a rank x {world_size} ranks x {accumulated} accumulated"
        )


class DistillOptimConfig(OptimConfig):
    fused: bool = True
    """PyTorch's fused AdamW."""


class DistillEvalConfig(EvalEvery):
    batch_size: int = Field(4, ge=1)
    """Rows of a rank that go through the models at once."""
    max_samples: int | None = Field(None, ge=1)
    """Use the first so many held-out samples; null = all."""


class DistillCheckpointConfig(CheckpointConfig):
    best_metric: str = "eval/loss"
    """The held-out figure by which best/ is chosen."""


class WatchConfig(Section):
    throughput_drop: float = Field(0.3, gt=0, lt=1)
    """Warn where tokens a second fall by this share below the best so far."""
    memory: float = Field(0.95, gt=0, le=1)
    """Warn where this share of the device's memory has been in use."""
    kd_rise: float = Field(3.0, gt=1)
    """Warn where the divergence is so many times its lowest mean so far."""
