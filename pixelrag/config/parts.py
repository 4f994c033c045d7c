"""The sections that several jobs share. Paths are relative to the working directory."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pixelrag.config.ds_file import DeepSpeedFileError, read_deepspeed_file
from pixelrag.config.section import Section

EngineName = Literal["ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2"]


class ModelConfig(Section):
    name_or_path: str = Field(min_length=1)
    """Folder, Hugging Face name, or package:NAME/FOLDER for a folder of an installed package."""
    adapter: str | None = None
    """A PEFT LoRA folder to begin with, put onto name_or_path whatever base it names."""
    random_init: bool = False
    """Take the architecture of config.json alone, with fresh weights."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """auto: flash_attention_2 on CUDA where it is installed, else sdpa."""
    unpadded: bool | Literal["auto"] = "auto"
    """Compute no padding tokens; auto: where a self-test before the first batch shows no change."""
    pooling: Literal["auto", "mean", "cls", "last"] = "auto"
    """auto: what the model's folder says, else mean for encoders, last for decoders."""
    query_instruction: str | None = None
    """Instruction put to queries; null = the default of the model's kind."""
    document_instruction: str | None = None
    """Instruction put to documents; null = the default of the model's kind."""
    query_max_length: int = Field(512, ge=1)
    """Tokens of a query, at most (the model's own limit caps it)."""
    document_max_length: int = Field(8192, ge=1)
    """Tokens of a document, at most (the model's own limit caps it)."""
    max_visual_tokens: int = Field(1280, ge=4)
    """Tokens an image may become; larger images are scaled down."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    trust_remote_code: bool = False
    """Run Python code that the model's folder brings along."""


class LoraConfig(Section):
    enabled: bool = False
    """Train low-rank adapters and freeze the model itself."""
    r: int = Field(32, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(32, gt=0)
    """Adapters are scaled by alpha / r."""
    dropout: float = Field(0.05, ge=0, lt=1)
    """Dropout in front of the adapters."""
    target_modules: list[str] | None = None
    """Names of the layers to adapt; null = attention projections of the model's family."""
    vision: Literal["none", "attention", "all"] = "none"
    """Adapt the vision tower's blocks too: attention, or all (MLP as well); true means all."""
    vision_r: int | None = Field(None, ge=1)
    """Rank of the adapters in vision tower and merger; null = r."""
    vision_alpha: float | None = Field(None, gt=0)
    """Alpha of the adapters in vision tower and merger; null = alpha."""
    merger: bool = False
    """Adapt the layers that join the vision tower to the language model (deepstack's too)."""
    dora: bool = False
    """DoRA: train the length of each row of the adapted weights apart from its direction."""
    rslora: bool = False
    """rsLoRA: scale adapters by alpha / sqrt(r)."""

    @field_validator("vision", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        if isinstance(value, bool):
            return "all" if value else "none"
        return {"true": "all", "false": "none"}.get(value, value)

    @property
    def of_vision(self) -> tuple[int, float]:
        """Rank and alpha in vision tower and merger."""
        r, alpha = self.vision_r, self.vision_alpha
        return self.r if r is None else r, self.alpha if alpha is None else alpha


class DataFiles(Section):
    """What names files to train on in `train` and `text`, and held-out ones in `eval`."""

    @field_validator("train", "eval", "text", mode="before", check_fields=False)
    @classmethod
    def _one_path(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("train", "eval", "text", check_fields=False)
    @classmethod
    def _real_paths_once(cls, value: list[str]) -> list[str]:
        if any(not path.strip() for path in value):
            raise PydanticCustomError("paths", "paths that are not empty")
        if len(set(value)) < len(value):
            raise PydanticCustomError("paths", "each path once")
        return value


class GlobalBatches(Section):
    """How rows are counted where a step sees several global batches; the jobs name the options."""

    if TYPE_CHECKING:  # each job declares its own, with its defaults
        per_device_batch_size: int
        global_batch_size: int | None
        gradient_accumulation_steps: int

    def rows(self, world_size: int) -> int:
        """Rows of a global batch over all ranks."""
        return self.global_batch_size or self.per_device_batch_size * world_size

    def arithmetic(self, world_size: int) -> str:
        """How the rows of a step come about, in words."""
        shares = f"{self.per_device_batch_size} a rank x {world_size} ranks"
        if self.global_batch_size is not None:
            shares = f"{self.global_batch_size} over {world_size} ranks"
        return f"{shares} x {self.gradient_accumulation_steps} accumulated"


class OptimConfig(Section):
    learning_rate: float = Field(2e-5, gt=0)
    """Peak learning rate of AdamW."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled decay; norms, biases and the temperature are spared."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float | None = Field(1.0, ge=0)
    """Clip the global gradient norm to this; null or 0 = off."""
    scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    """Course of the learning rate after the warm-up."""
    warmup_ratio: float = Field(0.05, ge=0, lt=1)
    """Share of all steps over which the learning rate rises linearly."""
    warmup_steps: int | None = Field(None, ge=0)
    """Warm-up in steps; wins over warmup_ratio."""
    max_steps: int | None = Field(None, ge=1)
    """Optimizer steps to train (this or num_epochs)."""
    num_epochs: float | None = Field(None, gt=0)
    """Passes over the training rows, fractions allowed (this or max_steps)."""

    @property
    def part_rates(self) -> dict[str, float]:
        """Peak learning rates of the parts that a job gives one of their own, by name."""
        suffix = "_learning_rate"
        parts = [name for name in type(self).model_fields if name.endswith(suffix)]
        rates = {name.removesuffix(suffix): getattr(self, name) for name in parts}
        return {part: rate for part, rate in rates.items() if rate is not None}


class EmaConfig(Section):
    decay: float | None = Field(None, gt=0, lt=1)
    """Average the weights over the steps with this decay, to evaluate and export; null = off."""
    start_step: int = Field(0, ge=0)
    """Until so many steps are done, the average is the weights themselves."""


class EngineConfig(Section):
    name: EngineName = "ddp"
    """ddp (plain data parallel), zero0 .. zero3 (DeepSpeed stages) or fsdp2."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 keeps fp32 master weights and adds up gradients in fp32."""
    grad_sync: Literal["auto", "deferred", "per_chunk"] = "auto"
    """deferred: one reduction a step; per_chunk: less memory, more traffic."""
    params: Literal["auto", "resident", "sharded"] = "auto"
    """resident: gathered once a step; sharded: for every chunk anew (zero3, fsdp2)."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in CPU memory."""
    deepspeed: str | None = None
    """A DeepSpeed JSON file; its ZeRO stage picks engine.name where that is not given."""
    timeout_seconds: int = Field(600, ge=1)
    """A collective that takes longer than this ends the run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_file(cls, value: Any) -> Any:
        """Take stage, offload and precision from the DeepSpeed file where they are not given."""
        if not isinstance(value, dict) or not isinstance(value.get("deepspeed"), str):
            return value
        try:
            file = read_deepspeed_file(Path(value["deepspeed"]))
        except DeepSpeedFileError:
            return value  # reported below, at the field itself
        given: dict[str, Any] = {}
        if file.stage is not None:
            given["name"] = f"zero{file.stage}"
        if file.offload_optimizer is not None:
            given["offload_optimizer"] = file.offload_optimizer
        if file.bf16 is not None:
            given["precision"] = "bf16" if file.bf16 else "fp32"
        return given | value

    @field_validator("deepspeed")
    @classmethod
    def _readable(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                read_deepspeed_file(Path(value))
            except DeepSpeedFileError as error:
                raise PydanticCustomError(
                    "deepspeed_file", "{expected}", {"expected": str(error)}
                ) from error
        return value


class EvalEvery(Section):
    every_steps: int | None = Field(None, ge=1)
    """Evaluate every so many steps; null = only at the end."""
    on_start: bool = False
    """Evaluate before the first step as well; best/ is chosen among what was trained."""


class CheckpointConfig(Section):
    every_steps: int | None = Field(None, ge=1)
    """Write a checkpoint every so many steps; null = only at the end."""
    keep_last: int = Field(3, ge=1)
    """Newest checkpoints to keep."""
    keep_every: int | None = Field(None, ge=1)
    """Keep those of every so many steps for good; null = none."""
    keep_best: bool = False
    """Keep the checkpoint at which best_metric was best, where one was written at that step."""
    async_save: bool = True
    """Write beside the training, which waits only while its state is copied to host memory."""
    init_from: str | None = None
    """A checkpoint-<step> whose weights a new run starts from; nothing else of it is taken."""
    allow_changes: list[str] = Field(default_factory=list)
    """Options that may differ from the checkpoint's although they change what is trained."""
    preempted_exit_code: int = Field(0, ge=0, le=125)
    """Exit code of a run that was asked to stop and has saved."""
    resume: str = "auto"
    """auto: from the newest complete checkpoint of output_dir; never; or a checkpoint's folder."""
    save_optimizer: bool = True
    """Save what an exact resume needs; false = weights only."""
    best_metric: str = "eval/ndcg@10"
    """The held-out figure by which best/ is chosen."""


class LoggingConfig(Section):
    every_steps: int = Field(10, ge=1)
    """Log every so many steps."""
    tensorboard: bool = False
    """Also write TensorBoard event files."""
    wandb: bool = False
    """Also report to Weights & Biases."""
    trackio: bool = False
    """Also report to trackio."""
    progress: Literal["auto", "on", "off"] = "auto"
    """Progress bar; auto: on a terminal."""
