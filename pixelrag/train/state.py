"""State on disk without pickle: tensors as safetensors, scalars as JSON, random generators as both.

A state called `NAME` is two files, `NAME.safetensors` and `NAME.json`; both are forced onto the
disk by the process that wrote them, so that a checkpoint's manifest speaks of what is really there.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pixelrag.errors import CheckpointError

logger = logging.getLogger(__name__)


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any] | None = None
) -> None:
    """Write `<path>.safetensors` and `<path>.json` and force both onto the disk.

    Args:
        path: without a suffix, for example `checkpoint-10.tmp/rank-0`.
        tensors: name -> tensor of any shape, dtype and device; views and tied tensors are stored
            as copies of their own, so that each loads by itself.
        scalars: anything JSON holds; floats come back bit-exact. NaN and infinity are refused.

    Raises:
        CheckpointError: a full disk or missing folder, or scalars that JSON cannot hold.
    """
    tensor_path, json_path = _paths(path)
    plain = _own_memory(tensors)
    try:
        text = json.dumps(dict(scalars or {}), allow_nan=False, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{json_path}: the scalars do not fit JSON: {error}") from error
    try:
        save_file(plain, tensor_path)
        _fsync(tensor_path)
        with open(json_path, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: the state could not be written: {error}. Free space in that folder; "
            "earlier checkpoints are untouched"
        ) from error


def load_tensors(
    path: Path, device: torch.device | str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote at `path`.

    Raises:
        CheckpointError: a file is missing, truncated or not what it should be.
    """
    tensor_path, json_path = _paths(path)
    for part in (tensor_path, json_path):
        if not part.is_file():
            raise CheckpointError(f"{part}: missing; is {path.parent} a checkpoint of this job?")
    try:
        tensors = load_file(tensor_path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{tensor_path}: cannot be read: {error}") from error
    try:
        scalars = json.loads(json_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{json_path}: cannot be read: {error}") from error
    if not isinstance(scalars, dict):
        raise CheckpointError(f"{json_path}: got {type(scalars).__name__}, expected an object")
    return tensors, scalars


@dataclass(frozen=True)
class RngState:
    """The random generators of one process.

    Attributes:
        tensors: `python` int64 [625], `numpy` int64 [624], `torch` uint8 (the CPU generator),
            `cuda.<i>` uint8 for the i-th device captured.
        scalars: the rest of Python's and NumPy's states.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)


def capture_rng(devices: Sequence[torch.device | int] | None = None) -> RngState:
    """Python's, NumPy's (the legacy global one), torch's CPU and CUDA generators.

    Args:
        devices: CUDA devices whose generators this process uses; None is the current device once
            CUDA has been used, and none before. State is kept by position, not by device number,
            since a resumed process may sit on another device.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "torch": torch.get_rng_state(),
    }
    for index, device in enumerate(_devices(devices)):
        tensors[f"cuda.{index}"] = torch.cuda.get_rng_state(device)
    scalars = {
        "python": {"version": version, "gauss": gauss},
        "numpy": {
            "name": name,
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }
    return RngState(tensors, scalars)


def restore_rng(state: RngState, devices: Sequence[torch.device | int] | None = None) -> None:
    """Put every generator back to where `capture_rng` found it.

    A state from another number of CUDA devices restores those that exist and warns, because random
    numbers on the others, and so the run, will differ from an uninterrupted one.

    Raises:
        CheckpointError: a generator's state is missing or malformed.
    """
    try:
        python, legacy = state.scalars["python"], state.scalars["numpy"]
        words = tuple(state.tensors["python"].tolist())
        random.setstate((python["version"], words, python["gauss"]))
        keys = state.tensors["numpy"].numpy().astype(np.uint32)
        np.random.set_state(
            (legacy["name"], keys, legacy["position"], legacy["has_gauss"], legacy["cached"])
        )
        torch.set_rng_state(state.tensors["torch"].cpu())
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the random state of the checkpoint is incomplete or malformed: {error!r}"
        ) from error
    saved = sum(name.startswith("cuda.") for name in state.tensors)
    here = _devices(devices)
    if saved != len(here):
        logger.warning(
            "the checkpoint holds the random state of %d CUDA devices a process, this run uses %d: "
            "dropout will differ from an uninterrupted run",
            *(saved, len(here)),
        )
    for index, device in enumerate(here[:saved]):
        torch.cuda.set_rng_state(state.tensors[f"cuda.{index}"].cpu(), device)


def _own_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, no two in one storage; copied only where they are not."""
    plain, seen = {}, set()
    for name, tensor in tensors.items():
        cpu = tensor.detach().to("cpu").contiguous()
        storage = cpu.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != cpu.nbytes:
            cpu = cpu.clone()
        seen.add(cpu.untyped_storage().data_ptr())
        plain[name] = cpu
    return plain


def _devices(devices: Sequence[torch.device | int] | None) -> list[torch.device | int]:
    if devices is not None:
        return list(devices)
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []


def _paths(path: Path) -> tuple[Path, Path]:
    return path.with_name(path.name + ".safetensors"), path.with_name(path.name + ".json")


def _fsync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
