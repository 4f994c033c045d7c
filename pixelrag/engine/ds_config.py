"""Turns a user's DeepSpeed JSON and a job's settings into a config with nothing left to chance.

DeepSpeed acts on defaults that a user never wrote: it clips at 1.0, divides by accumulation
steps, builds fused optimizers with a compiler, and runs with ``"auto"`` in places where it does
not understand it. Here every such value is written out. What a job's config owns (batch sizes,
clipping, optimizer, schedule, precision) may stand in the JSON only as ``"auto"`` or with the
very same value; anything else is an error that names both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pixelrag.errors import ConfigError
from pixelrag.json_text import read_json

# Sections that the job's own config decides. "auto" inside them is dropped: ours stands.
_OURS = ("optimizer", "scheduler")
_UNSUPPORTED = (
    "fp16",
    "amp",
    "pipeline",
    "compression_training",
    "data_efficiency",
    "hybrid_engine",
)
_KEEP_EVERYTHING = 10**12
# DeepSpeed's own numbers of elements.
_BUCKET, _PREFETCH = 5 * 10**8, 5 * 10**7
# Settings that would change the gradient, or scramble the optimizer's state, without an error:
# where they stand, and the values under which they do not.
_EXACT: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("gradient_allreduce_op", ("mean",)),
    ("prescale_gradients", (False,)),
    ("gradient_predivide_factor", (1.0,)),
    ("communication_data_type", ("fp32",)),
    ("data_types.grad_accum_dtype", ("fp32",)),
    ("torch_autocast.lower_precision_safe_modules", ([],)),
    ("zero_optimization.round_robin_gradients", (False,)),
    ("zero_optimization.zero_quantized_gradients", (False,)),
    ("zero_optimization.zero_quantized_weights", (False,)),
    ("zero_optimization.compute_grad_norm", (True,)),
)


def read_ds_config(path: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON file.

    Raises:
        ConfigError: missing, not JSON, or not an object.
    """
    try:
        content = read_json(Path(path))
    except OSError as error:
        raise ConfigError(f"engine.deepspeed: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"engine.deepspeed: {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"engine.deepspeed: {path}: got {type(content).__name__}, expected an object"
        )
    return content


def resolve(
    user: dict[str, Any] | None,
    *,
    stage: int,
    world_size: int,
    bf16: bool,
    per_chunk: bool,
    resident: bool,
    offload_optimizer: bool,
    num_trained: int,
    source: str = "engine.deepspeed",
) -> dict[str, Any]:
    """Return the complete config for ``deepspeed.initialize``.

    Args:
        user: the content of the user's JSON, or None.
        stage: ZeRO stage, 0 to 3.
        world_size: number of ranks.
        bf16: compute under bfloat16 autocast with fp32 masters and fp32 communication.
        per_chunk: reduce after every chunk (stages 2 and 3 with offload need another mode).
        resident: stage 3 only: keep gathered parameters over the step.
        offload_optimizer: optimizer state in host memory (stages 1 to 3).
        num_trained: parameters, over which buckets need not reach.
        source: the file's name, for messages.

    Raises:
        ConfigError: every contradiction and every ``"auto"`` that nothing here resolves.
    """
    problems: list[str] = []
    config = json.loads(json.dumps(user or {}))
    for section in ("zero_optimization", "torch_autocast"):
        if not isinstance(config.setdefault(section, {}), dict):
            problems.append(f"{section}: got {config[section]!r}, expected an object")
            config[section] = {}
    _keep_exact(config, problems)
    zero = config["zero_optimization"]
    _settle(zero, "stage", stage, "zero_optimization.stage", problems)
    _settle(config, "train_micro_batch_size_per_gpu", 1, None, problems)
    _settle(config, "gradient_accumulation_steps", 1, None, problems)
    _settle(config, "train_batch_size", world_size, None, problems)
    # Clipping happens in Engine.step; DeepSpeed's own default of 1.0 must never act.
    _settle(config, "gradient_clipping", 0.0, None, problems)
    for section in _OURS:
        _drop_auto_section(config, section, problems)
    for section in _UNSUPPORTED:
        if _is_on(config.get(section)):
            problems.append(f"{section}: not supported here; use fp32 or bf16 (engine.precision)")
        config.pop(section, None)
    _settle_precision(config, bf16, problems)
    if stage == 3:
        limit = _KEEP_EVERYTHING if resident else 0
        for key in ("stage3_param_persistence_threshold", "stage3_model_persistence_threshold"):
            _settle(zero, key, limit, f"zero_optimization.{key} (engine.params)", problems)
    else:  # these act at stage 3 only
        for key in [k for k, v in zero.items() if k.startswith("stage3_") and v == "auto"]:
            del zero[key]
    zero["overlap_comm"] = _value_or(zero, "overlap_comm", False)
    # The first is allocated, whatever the model: 2 GB of fp32.
    zero["reduce_bucket_size"] = _value_or(zero, "reduce_bucket_size", min(_BUCKET, num_trained))
    for key, value in (
        ("allgather_bucket_size", _BUCKET),
        ("stage3_prefetch_bucket_size", _PREFETCH),
    ):
        if zero.get(key) == "auto":
            zero[key] = value
    _settle_offload(zero, offload_optimizer, problems)
    _settle(config, "zero_allow_untested_optimizer", True, None, problems)
    # DeepSpeed's CPU Adam needs a compiler.
    _settle(config, "zero_force_ds_cpu_optimizer", False, None, problems)
    managed = not (per_chunk and stage >= 2 and offload_optimizer)
    _settle(config, "managed_gradient_accumulation", managed, None, problems)
    # What DeepSpeed prints is ours to print.
    config |= {"steps_per_print": 2**31, "wall_clock_breakdown": False}
    problems += [
        f'{path}: "auto" is not resolved by any setting; write a value' for path in _autos(config)
    ]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(
            f"{source} contradicts the job's config in {len(problems)} places:\n{lines}"
        )
    return config


def _keep_exact(config: dict[str, Any], problems: list[str]) -> None:
    """Drop ``"auto"`` and null from the settings of ``_EXACT`` and report any other value."""
    for path, allowed in _EXACT:
        *sections, key = path.split(".")
        table: Any = config
        for section in sections:
            table = table.get(section)
            if not isinstance(table, dict):
                break
        else:
            got = table.get(key)
            if got in (None, "auto"):
                table.pop(key, None)
            elif got not in allowed:
                expected = " or ".join(map(repr, allowed))
                problems.append(
                    f'{path}: got {got!r}, expected {expected} or "auto"; anything else would '
                    "change the gradient or the optimizer's state without an error"
                )


def _settle(
    table: dict[str, Any], key: str, value: Any, path: str | None, problems: list[str]
) -> None:
    got = table.get(key, "auto")
    if got != "auto" and got != value:
        problems.append(f'{path or key}: got {got!r}, expected {value!r} or "auto"')
    table[key] = value


def _value_or(table: dict[str, Any], key: str, default: Any) -> Any:
    got = table.get(key, "auto")
    return default if got == "auto" else got


def _drop_auto_section(config: dict[str, Any], section: str, problems: list[str]) -> None:
    got = config.pop(section, None)
    if got in (None, "auto"):
        return
    if not isinstance(got, dict):
        problems.append(f"{section}: got {got!r}, expected an object")
        return
    params = got.get("params", {})
    values = (
        params if not isinstance(params, dict) else {k: v for k, v in params.items() if v != "auto"}
    )
    if values:
        problems.append(
            f'{section}.params: got {values}, expected "auto"; the job\'s optim section decides it'
        )


def _is_on(section: Any) -> bool:
    if isinstance(section, dict):
        return section.get("enabled", True) not in (False, "auto")
    return bool(section)


def _settle_precision(config: dict[str, Any], bf16: bool, problems: list[str]) -> None:
    for key in ("bf16", "torch_autocast"):
        section = config.get(key)
        enabled = section.get("enabled") if isinstance(section, dict) else section
        if not isinstance(enabled, bool) and enabled not in (None, "auto"):
            problems.append(f'{key}.enabled: got {enabled!r}, expected true, false or "auto"')
        if isinstance(enabled, bool) and enabled != bf16:
            wanted = "bf16" if enabled else "fp32"
            problems.append(
                f"{key}.enabled: got {enabled}, but engine.precision is "
                f'{"bf16" if bf16 else "fp32"}; set engine.precision={wanted} or "auto" here'
            )
    config.pop("bf16", None)  # its masters are fp32 but its gradients are not
    autocast = {k: v for k, v in config["torch_autocast"].items() if v != "auto"}
    # An empty list keeps parameter and gradient communication in fp32.
    autocast.setdefault("lower_precision_safe_modules", [])
    config["torch_autocast"] = autocast | {"enabled": bf16, "dtype": "bfloat16"}


def _settle_offload(zero: dict[str, Any], offload_optimizer: bool, problems: list[str]) -> None:
    section = zero.get("offload_optimizer") or {}
    if not isinstance(section, dict):
        problems.append(f"zero_optimization.offload_optimizer: got {section!r}, expected an object")
        section = {"device": "cpu" if offload_optimizer else "none"}
    device = section.get("device", "auto")
    if device == "auto":
        device = "cpu" if offload_optimizer else "none"
    if (device != "none") != offload_optimizer:
        problems.append(
            f"zero_optimization.offload_optimizer.device: got {device!r}, but "
            f"engine.offload_optimizer is {str(offload_optimizer).lower()}"
        )
    if offload_optimizer:
        zero["offload_optimizer"] = {k: v for k, v in section.items() if v != "auto"} | {
            "device": device
        }
    else:
        zero.pop("offload_optimizer", None)


def _autos(value: Any, path: str = "") -> list[str]:
    if value == "auto":
        return [path]
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in _autos(v, f"{path}.{k}" if path else k)]
    return []
