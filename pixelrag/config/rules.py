"""Rules that hold in every job: pairs of settings, each valid, that cannot stand together."""

from collections.abc import Iterator
from pathlib import Path

from pixelrag.config.base import JobConfig
from pixelrag.config.distill_parts import AdapterConfig
from pixelrag.config.ds_file import read_deepspeed_file
from pixelrag.config.parts import EmaConfig, EngineConfig, LoraConfig, OptimConfig
from pixelrag.config.problems import Conflict, shown


def length_conflicts(optim: OptimConfig) -> Iterator[Conflict]:
    """Exactly one way to say how long to train, and a warm-up that fits in it."""
    both = ("optim.max_steps", "optim.num_epochs")
    if optim.max_steps is None and optim.num_epochs is None:
        yield Conflict(
            both,
            got="neither optim.max_steps nor optim.num_epochs",
            remedy="say how long to train: --optim.max_steps N or --optim.num_epochs X",
        )
    if optim.max_steps is not None and optim.num_epochs is not None:
        yield Conflict(
            both,
            got=f"optim.max_steps {optim.max_steps} and optim.num_epochs {optim.num_epochs}",
            remedy="give one of them and set the other to null",
        )
    warmup, steps = optim.warmup_steps, optim.max_steps
    if warmup is not None and steps is not None and warmup >= steps:
        yield Conflict(
            ("optim.warmup_steps", "optim.max_steps"),
            got=f"optim.warmup_steps {warmup} with optim.max_steps {steps}",
            remedy="warm up for fewer steps than are trained",
        )


def engine_conflicts(engine: EngineConfig) -> Iterator[Conflict]:
    """What an engine, its DeepSpeed file and its device can do together."""
    if engine.params == "sharded" and engine.name not in ("zero3", "fsdp2"):
        yield Conflict(
            ("engine.params", "engine.name"),
            got=f"engine.params sharded on {engine.name}, which keeps whole parameters",
            remedy="set engine.name to zero3 or fsdp2, or engine.params to auto",
        )
    if engine.offload_optimizer:
        if engine.name in ("ddp", "zero0"):
            yield Conflict(
                ("engine.offload_optimizer", "engine.name"),
                got=f"engine.offload_optimizer on {engine.name}, which does not shard its state",
                remedy="set engine.name to zero1, zero2, zero3 or fsdp2",
            )
        if engine.name == "fsdp2" and engine.device == "cpu":
            yield Conflict(
                ("engine.offload_optimizer", "engine.name", "engine.device"),
                got="engine.offload_optimizer on fsdp2 with engine.device cpu",
                remedy="leave it off (the state lies in CPU memory as it is), or use zero1 to 3",
            )
    if engine.deepspeed is None:
        return
    file = read_deepspeed_file(Path(engine.deepspeed))
    if not engine.name.startswith("zero"):
        yield Conflict(
            ("engine.name", "engine.deepspeed"),
            got=f"engine.name {engine.name} with engine.deepspeed {engine.deepspeed}",
            remedy="set engine.name to one of zero0 to zero3, or engine.deepspeed to null",
        )
    elif file.stage is not None and engine.name != f"zero{file.stage}":
        yield Conflict(
            ("engine.name", "engine.deepspeed"),
            got=f"engine.name {engine.name} with {engine.deepspeed}, a file of stage {file.stage}",
            remedy=f"set engine.name to zero{file.stage}, or give another file or none",
        )
    if file.offload_optimizer not in (None, engine.offload_optimizer):
        says = "with" if file.offload_optimizer else "without"
        yield Conflict(
            ("engine.offload_optimizer", "engine.deepspeed"),
            got=f"engine.offload_optimizer {str(engine.offload_optimizer).lower()} with "
            f"{engine.deepspeed}, a file {says} it",
            remedy="leave engine.offload_optimizer to the file, or give another file",
        )
    if file.bf16 is not None and file.bf16 != (engine.precision == "bf16"):
        yield Conflict(
            ("engine.precision", "engine.deepspeed"),
            got=f"engine.precision {engine.precision} with {engine.deepspeed}, a file whose "
            f"bf16.enabled is {str(file.bf16).lower()}",
            remedy='leave engine.precision to the file, or set bf16.enabled to "auto" in it',
        )


def lora_conflicts(lora: LoraConfig | AdapterConfig, section: str = "lora") -> Iterator[Conflict]:
    """Options of adapters that there are none of, or that act on none."""
    default = type(lora)()
    given = [n for n in type(lora).model_fields if getattr(lora, n) != getattr(default, n)]
    if given and not lora.enabled:
        named = ", ".join(f"{section}.{name} {shown(getattr(lora, name))}" for name in given)
        yield Conflict(
            tuple(f"{section}.{name}" for name in [*given, "enabled"]),
            got=f"{named} while {section}.enabled is false",
            remedy=f"set {section}.enabled true, or leave them out",
        )
    if not isinstance(lora, LoraConfig) or not lora.enabled or lora.vision != "none":
        return
    for name in ("vision_r", "vision_alpha"):
        if name in given and not lora.merger:
            yield Conflict(
                (f"{section}.{name}", f"{section}.vision", f"{section}.merger"),
                got=f"{section}.{name} with neither {section}.vision nor {section}.merger",
                remedy=f"set {section}.vision to attention or all, or {section}.merger true, or "
                "leave it out",
            )


def ema_conflicts(ema: EmaConfig, optim: OptimConfig) -> Iterator[Conflict]:
    """An average that is never taken."""
    if ema.decay is None and ema.start_step:
        yield Conflict(
            ("ema.start_step", "ema.decay"),
            got=f"ema.start_step {ema.start_step} without ema.decay",
            remedy="set ema.decay, such as 0.999, or leave it out",
        )
    if optim.max_steps is not None and ema.start_step >= optim.max_steps:
        yield Conflict(
            ("ema.start_step", "optim.max_steps"),
            got=f"ema.start_step {ema.start_step} with optim.max_steps {optim.max_steps}",
            remedy="begin to average before the last step",
        )


def resume_conflicts(config: JobConfig) -> Iterator[Conflict]:
    """A word that is no way to resume, nor a folder; changes allowed to what is no option."""
    resume = config.checkpoint.resume
    for name in config.checkpoint.allow_changes:
        if not _is_option(config, name):
            yield Conflict(
                ("checkpoint.allow_changes",),
                got=f"checkpoint.allow_changes {name!r}, which is no option of this job",
                remedy="name options or sections, such as loss.label_smoothing or data",
            )
    if config.checkpoint.init_from is not None and resume not in ("auto", "never"):
        yield Conflict(
            ("checkpoint.init_from", "checkpoint.resume"),
            got=f"checkpoint.init_from beside checkpoint.resume {resume!r}: a new run's weights, "
            "and a run to go on with",
            remedy="give one of them; checkpoint.resume auto goes on with the new run, too",
        )
    # Only a slip of the pen is caught here: a run's config.yaml must load after its checkpoints are
    # gone, and a folder that is named but missing is reported by what reads checkpoints.
    if resume not in ("auto", "never") and "/" not in resume and not Path(resume).exists():
        yield Conflict(
            ("checkpoint.resume",),
            got=f"checkpoint.resume {resume!r}, and there is no such folder",
            remedy="auto, never, or the folder of a checkpoint",
        )


def _is_option(section: object, path: str) -> bool:
    for name in path.split("."):
        if name not in getattr(type(section), "model_fields", {}):
            return False
        section = getattr(section, name)
    return True
