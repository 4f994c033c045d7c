"""PixelRAG's `training_state.pt`: what a run can begin with is taken, and the rest is named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from pixelrag.errors import ModelError
from pixelrag.models.biencoder import BiEncoder

logger = logging.getLogger("pixelrag")


@torch.no_grad()
def load_training_state(path: str, container: BiEncoder) -> None:
    """Take weights and temperature out of a `training_state.pt`; a log line says what.

    Step, epoch, optimizer and scheduler are not taken: the run begins at its first step. A fixed
    temperature stays what the configuration says.

    Args:
        path: the file, or the checkpoint's folder that holds it.
        container: as built, on the CPU.

    Raises:
        ModelError: the file cannot be read without running code, or is of another model.
    """
    file = Path(path) / "training_state.pt" if Path(path).is_dir() else Path(path)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises pickle's, zipfile's and its own
        raise ModelError(f"model.training_state {file}: cannot be read: {error}") from error
    if not isinstance(state, dict) or "step" not in state:
        raise ModelError(f"model.training_state {file} is no training state of PixelRAG's trainer")
    taken = []
    if (weights := state.get("model_state_dict")) is not None:
        taken.append(f"{_copy(weights, container.encoder.backbone, file)} tensors")
    scale = state.get("logit_scale_state_dict") or {"log_scale": state.get("logit_scale")}
    parameter = container.logit_scale.log_scale
    if isinstance(scale.get("log_scale"), torch.Tensor) and parameter.requires_grad:
        parameter.copy_(scale["log_scale"].reshape(1))
        taken.append(f"temperature {1 / float(parameter.exp()):.4g}")
    left = [key for key in state if key not in ("model_state_dict", "logit_scale_state_dict")]
    if not taken:
        raise ModelError(f"model.training_state {file} has nothing to take; it has {left}")
    logger.info("%s: took %s; not taken: %s", file, " and ".join(taken), ", ".join(left))


def _copy(weights: dict[str, Any], backbone: torch.nn.Module, file: Path) -> int:
    own = backbone.state_dict()
    unlike = sorted(own.keys() ^ weights.keys())
    unlike += [k for k in own.keys() & weights.keys() if own[k].shape != weights[k].shape]
    if unlike:
        raise ModelError(
            f"model.training_state {file}: {len(unlike)} tensors are in only one of file and "
            f"model or differ in shape, first {unlike[0]!r}; model and lora must be as in its run"
        )
    for name, tensor in own.items():
        tensor.copy_(weights[name])
    return len(own)
