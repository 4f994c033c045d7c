"""What a checkpoint of a run holds, in a form that knows nothing of engines or shards.

checkpoint-<step>/
  model.safetensors       trained parameters by name, whole, fp32
  optimizer.safetensors   "<parameter>|<key>" -> state, whole (absent with save_optimizer: false)
  ema.safetensors         moving averages of the trained parameters, whole, where there are any
                          (with W ranks W parts of each, model-00001-of-0000W.safetensors: a tensor
                          is whole in one of them, so any number of ranks can read them)
  state.json              step, position in the data, best figure, figures not yet logged,
                          fingerprint of the config
  config.yaml             the resolved configuration
  COMPLETE                sizes and hashes of all of it

Random streams are not stored: each step's are a function of (seed, step, rank), see `seed_step`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pixelrag.config.base import JobConfig, fingerprint
from pixelrag.config.yaml_file import read_yaml
from pixelrag.distributed.collectives import gather_objects
from pixelrag.distributed.interrupt import stop_point
from pixelrag.distributed.together import together
from pixelrag.engine.base import Engine
from pixelrag.engine.state import AVERAGE, OptimizerState
from pixelrag.errors import CheckpointError
from pixelrag.json_text import read_json
from pixelrag.train.atomic import read_manifest, versions
from pixelrag.train.state import load_tensors

logger = logging.getLogger("pixelrag")

# A run that differs in these is another experiment; the rest may change between two parts of one.
_IDENTITY = (
    *("seed", "model", "student", "teacher", "lora", "ema", "data", "packing", "loss", "batch"),
    *("train", "question_encoder", "document_encoder", "generator", "encoder_lora"),
    *("generator_lora", "knowledge_base", "retrieval"),
)
# These belong to the machine: they change rounding, or the draws of dropout, and no more; a job's
# configuration names its own beside them.
_ADAPTABLE = (
    "model.attention",
    "model.unpadded",
    "model.gradient_checkpointing",
    "batch.chunk_size",
    "batch.chunk_tokens",
    "batch.replay",
    # The sampler insists on the global batch, which stays when the world is another.
    "batch.per_device_batch_size",
    "batch.global_batch_size",
    "data.num_workers",
    "data.prefetch_factor",
    "data.worker_timeout_seconds",
    "data.image_roots",
    "knowledge_base.image_roots",
    "data.eval",
)
# What loads or speaks differently, but computes the same.
_SILENT = (
    "batch.replay",
    "batch.per_device_batch_size",
    "batch.global_batch_size",
    "data.num_workers",
    "data.prefetch_factor",
    "data.worker_timeout_seconds",
    "data.image_roots",
    "knowledge_base.image_roots",
)


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stands.

    Attributes:
        step: optimizer steps done.
        position: where the data stand, by `Task.position`.
        best: best held-out figure so far.
        fingerprint: of the configuration.
        unlogged: figures of each step since the last logged one, so that the next line's means
            are those of an uninterrupted run.
        best_step: the step at which that best figure was reached.
        evaluation_due: the evaluation of this step was broken off, and is to be made first.
    """

    step: int
    position: dict[str, Any]
    best: float | None
    fingerprint: str
    unlogged: list[dict[str, float]]
    best_step: int | None = None
    evaluation_due: bool = False


def seed_step(seed: int, step: int, rank: int) -> None:
    """Start this rank's random streams (torch's of all devices, Python's, NumPy's) for one step.

    What is drawn then depends on (seed, step, rank) and nothing else, so a resumed run needs no
    stored generator state to continue bit for bit.
    """
    mixed = np.random.SeedSequence([seed, step, rank]).generate_state(3, np.uint64)
    torch.manual_seed(int(mixed[0]))
    random.seed(int(mixed[1]))
    np.random.seed(mixed[2:].view(np.uint32))  # the global stream, of a model's own code


def part_name(kind: str, rank: int, world_size: int) -> str:
    """Name of a rank's part of ``model`` (or of another kind); plain where one writes it all."""
    return kind if world_size == 1 else f"{kind}-{rank + 1:05}-of-{world_size:05}"


def take_averages(state: OptimizerState) -> dict[str, torch.Tensor]:
    """Take the moving averages of the weights out of an optimizer's state, by parameter."""
    return {name: v.pop(AVERAGE) for name, v in state.items() if AVERAGE in v}


def flat_optimizer(state: OptimizerState) -> dict[str, torch.Tensor]:
    """Optimizer state as one mapping, "<parameter>|<key>" -> tensor."""
    return {f"{name}|{key}": v for name, entries in state.items() for key, v in entries.items()}


def read_parts(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """All tensors of ``model``, ``optimizer`` or ``ema``, whoever wrote them; or none.

    Raises:
        CheckpointError: a part cannot be read, or is missing.
    """
    found = sorted(folder.glob(f"{kind}.safetensors")) or sorted(
        folder.glob(f"{kind}-*-of-*.safetensors")
    )
    if not found:
        return {}
    count = found[0].stem.rsplit("-", 1)[-1] if found[0].stem != kind else "1"
    if len(found) != int(count):
        raise CheckpointError(f"{folder}: {len(found)} parts of {kind}, expected {int(count)}")
    tensors: dict[str, torch.Tensor] = {}
    for file in found:
        tensors |= load_tensors(file.with_suffix(""))[0]
    return tensors


def read_state(folder: Path, config: JobConfig) -> RunState:
    """Read a checkpoint's ``state.json`` and check that it belongs to this run.

    Other versions of the libraries are warned about.

    Raises:
        CheckpointError: unreadable, or written under another model, data, loss or batch.
    """
    try:
        state = RunState(**read_json(folder / "state.json", finite=False))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / 'state.json'}: cannot be read: {error}") from error
    if state.fingerprint != fingerprint(config):
        _compare_configs(folder, config)
    before, now = read_manifest(folder)["versions"], versions()
    drifted = [
        f"{name}: was {before.get(name)}, is {now.get(name)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if drifted:
        logger.warning(
            "%s was written by other versions, whose figures may differ in rounding: %s",
            *(folder, "; ".join(drifted)),
        )
    return state


def _compare_configs(folder: Path, config: JobConfig) -> None:
    before = _leaves(read_yaml(folder / "config.yaml").values)
    now = _leaves(config.model_dump(mode="json"))
    differing = {
        path: f"{path}: was {before.get(path)!r}, is {now.get(path)!r}"
        for path in sorted(before.keys() | now.keys())
        if before.get(path) != now.get(path)
    }
    adaptable = {*_ADAPTABLE, *config.adaptable}
    allowed = config.checkpoint.allow_changes
    identity = [p for p in differing if p.split(".")[0] in _IDENTITY and p not in adaptable]
    refused = [differing[p] for p in identity if not is_allowed(p, allowed)]
    if refused:
        raise CheckpointError(
            f"{folder} was written under another configuration, which this run cannot continue:\n"
            + "\n".join(f"  {text}" for text in refused)
            + "\nRestore these settings, name those that are meant in checkpoint.allow_changes, or "
            "choose another output_dir for a new run"
        )
    if "loss.temperature" in identity and getattr(config.loss, "learnable_temperature", False):
        raise CheckpointError(
            f"{folder}: {differing['loss.temperature']}; a temperature that is trained goes on "
            "from the checkpoint's. Leave loss.temperature as it was"
        )
    changed = [
        text
        for path, text in differing.items()
        if path.startswith("optim.")
        or path in identity
        or (path in adaptable and path not in _SILENT)
    ]
    if changed:
        logger.warning("resuming with changed settings: %s", "; ".join(changed))


def is_allowed(path: str, allowed: Sequence[str]) -> bool:
    """Whether an option, or a section that holds it, is named in ``checkpoint.allow_changes``."""
    return any(path == name or path.startswith(f"{name}.") for name in allowed)


def _leaves(values: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {path: values}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _leaves(value, f"{path}.{key}" if path else key)
    return found


def load_start(checkpoint: Path | None, config: JobConfig, module: nn.Module) -> None:
    """Put a resumed run's weights, or those of ``checkpoint.init_from``, into a fresh module.

    A collective.

    Raises:
        CheckpointError: names or shapes are not those that the module trains.
    """
    stop_point()
    source = checkpoint or config.checkpoint.init_from
    if source is None:
        return
    with together():
        load_parameters(Path(source), module)
    if checkpoint is None:
        logger.info("a new run, with the weights of %s", source)


@torch.no_grad()
def load_parameters(folder: Path, module: nn.Module, kind: str = "model") -> None:
    """Copy a checkpoint's parameters (``model``), or their averages (``ema``), into a module.

    No engine has sharded it yet.

    Raises:
        CheckpointError: names or shapes are not those that the module trains.
    """
    tensors = read_parts(folder, kind)
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    unlike = sorted(trained.keys() ^ tensors.keys())
    if unlike:
        raise CheckpointError(
            f"{folder}: {len(unlike)} parameters are in only one of checkpoint and model, first "
            f"{unlike[0]!r}; what is trained (model, lora, loss.name, loss.learnable_temperature) "
            "must be as when it was written"
        )
    for name, parameter in trained.items():
        if tensors[name].shape != parameter.shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {list(tensors[name].shape)}, "
                f"expected {list(parameter.shape)}"
            )
        parameter.copy_(tensors[name])


def load_optimizer(folder: Path, engine: Engine, *, averages: bool = False) -> None:
    """Install a checkpoint's optimizer state, ``averages`` of the weights too; a collective.

    A checkpoint written with ``save_optimizer: false`` has none: the moments start anew, and a
    warning says so.
    """
    flat = read_parts(folder, "optimizer")
    means = read_parts(folder, "ema") if averages else {}
    if averages and not means:
        logger.warning("%s holds no averages: they begin with its weights", folder)
    if not flat:
        logger.warning(
            "%s holds no optimizer state: AdamW's moments start at zero, so the first steps "
            "differ from an uninterrupted run",
            folder,
        )
        if not means:
            return
        for name, mean in means.items():
            fresh = {"step": torch.tensor(0.0)}
            fresh |= {key: torch.zeros_like(mean) for key in ("exp_avg", "exp_avg_sq")}
            flat |= flat_optimizer({name: fresh})
    state: dict[str, dict[str, torch.Tensor]] = {}
    for label, value in flat.items():
        name, key = label.rsplit("|", 1)
        state.setdefault(name, {})[key] = value
    for name, mean in means.items():
        state.setdefault(name, {})[AVERAGE] = mean
    engine.load_optimizer_state(state)


def gather_ids(ids: list[str], most: int = 8) -> str:
    """Describe every rank's sample ids in one line; a collective."""
    parts = []
    for rank, found in enumerate(gather_objects(ids[: most + 1])):
        if found:
            shown = ", ".join(found[:most]) + (", ..." if len(found) > most else "")
            parts.append(f"rank {rank}: {shown}")
    return "; ".join(parts) or "none"
