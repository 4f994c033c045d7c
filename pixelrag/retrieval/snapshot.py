"""The document encoder's weights, taken from any engine for a refresh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from pixelrag.engine.base import Engine
from pixelrag.errors import EngineError
from pixelrag.retrieval.refresh import Refresher
from pixelrag.retrieval.refresh_spec import TRAINING, WEIGHTS


def save_snapshot(
    engine: Engine,
    prefix: str,
    folder: Path | None,
    *,
    bf16: bool = False,
    trainable_only: bool = False,
) -> None:
    """Write one part of the module to `weights.safetensors`; a collective of all ranks.

    Parameters are gathered one by one and none outside the part is; the whole exists on rank 0's
    CPU alone. The file reaches the page cache, not the disk: the refresh hashes it before it
    relies on it.

    Args:
        engine: between two steps.
        prefix: of the parameters' names, for example ``document_encoder.``; cut off in the file.
        folder: on rank 0 where to write, None to write nothing; elsewhere ignored.
        bf16: round to bfloat16: half the bytes, and what a bf16 engine computes with.
        trainable_only: leave out what is not trained, where the readers have the rest.

    Raises:
        EngineError: nothing has the prefix; on all ranks, before anything is gathered.
        OSError: on rank 0, after the gathering: the file cannot be written.
    """
    if not engine.named_tensors(trainable_only=trainable_only, prefix=prefix):
        trained = "trained " if trainable_only else ""
        raise EngineError(f"the module has no {trained}weights whose names begin with {prefix!r}")
    full = engine.full_parameters(trainable_only=trainable_only, prefix=prefix)
    if engine.rank != 0 or folder is None:
        return
    state = {}
    for name in list(full):  # one by one, so that no second full copy is made
        tensor = full.pop(name)
        rounded = bf16 and tensor.is_floating_point()
        state[name.removeprefix(prefix)] = tensor.to(torch.bfloat16) if rounded else tensor
    temporary = folder / f".{WEIGHTS}.tmp"
    try:
        save_file(state, temporary)
        os.replace(temporary, folder / WEIGHTS)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        # safetensors has an error type of its own for what the operating system said.
        raise OSError(f"{folder / WEIGHTS}: the snapshot cannot be written ({error})") from error


def save_witness(folder: Path, rows_P: np.ndarray, vectors_PD: np.ndarray) -> None:
    """Write `training.npz`, for `refresh_validate.validate`.

    Raises:
        OSError: it cannot be written.
    """
    with open(folder / TRAINING, "wb") as stream:
        np.savez(stream, rows=rows_P, vectors=vectors_PD)


def hand_over(
    engine: Engine,
    refresher: Refresher | None,
    prefix: str,
    step: int,
    *,
    bf16: bool = False,
    trainable_only: bool = False,
    witness: tuple[np.ndarray, np.ndarray] | None = None,
    circumstances: Mapping[str, Any] | None = None,
) -> None:
    """Take a snapshot and start a refresh with it; a collective. Does not wait for the workers.

    A disk that is full ends the refresh, not the training.

    Args:
        engine, prefix, bf16, trainable_only: see `save_snapshot`.
        refresher: on rank 0, with none in flight; None elsewhere.
        step: optimizer steps done.
        witness: rows of some passages, and their vectors as the training makes them: what the
            workers make of these must be the same.
        circumstances: see `Refresher.start`.

    Raises:
        EngineError: see `save_snapshot`.
        IndexError_: a refresh is in flight.
    """
    folder = None
    options = {"bf16": bf16, "trainable_only": trainable_only}
    if refresher is None:
        save_snapshot(engine, prefix, None, **options)
        return
    try:
        folder = refresher.begin(step)
    except OSError as error:
        refresher.fail(str(error))
    try:
        save_snapshot(engine, prefix, folder, **options)
        if witness is not None and folder is not None:
            save_witness(folder, *witness)
    except OSError as error:
        refresher.fail(str(error))
        return
    if folder is not None:
        refresher.start(folder, step, **(circumstances or {}))
