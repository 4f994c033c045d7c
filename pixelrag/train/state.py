"""State on disk without pickle: tensors as safetensors, scalars as JSON.

A state called `NAME` is two files, `NAME.safetensors` and `NAME.json`; both are forced onto the
disk by the process that wrote them, so that a checkpoint's manifest speaks of what is really there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pixelrag.errors import CheckpointError


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


def _paths(path: Path) -> tuple[Path, Path]:
    return path.with_name(path.name + ".safetensors"), path.with_name(path.name + ".json")


def _fsync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
