"""Writes a distilled student as a folder that `AutoModelForCausalLM.from_pretrained` loads.

Adapters are merged into the weights, so the folder stands alone: vLLM and others serve it as it is.
A head that alone was adapted is written apart from the embedding that it was tied to.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

import pixelrag
from pixelrag.errors import CheckpointError
from pixelrag.export.folder import MAX_SHARD_SIZE, plain_name, replacing
from pixelrag.export.merge import merged
from pixelrag.models.causal import CausalLM
from pixelrag.models.generator import Generator
from pixelrag.models.load import quiet
from pixelrag.models.source import SETTINGS_FILE, SETTINGS_FORMAT


def export_causal(
    student: CausalLM | Generator,
    tokenizer: Any,
    state_dict: Mapping[str, torch.Tensor],
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    kind: str = "causal",
    ema_decay: float | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    card: str | None = None,
) -> Path:
    """Write the folder; call it on one rank.

    The student's own parameters are never read, so they may be sharded.

    Args:
        student: the model whose architecture and adapters apply.
        tokenizer: is saved beside it; a generator's whole preprocessor likewise.
        state_dict: full CPU tensors under the keys of `student.state_dict()`, adapters and frozen
            weights included.
        folder: where to; a folder that an earlier export wrote is replaced.
        dtype: of the written weights.
        kind: of model, for `pixelrag.json`.
        ema_decay, max_shard_size, card: as for `export_embedder`.

    Returns:
        The folder.

    Raises:
        CheckpointError: a weight is missing, unknown or misshapen; `folder` holds something that
            is no export; or it cannot be written. Nothing is left half-written.
    """
    folder = Path(folder)
    named = {plain_name(key).removeprefix("lm."): t for key, t in state_dict.items()}
    if isinstance(student.lm, PeftModel):
        named = merged(named, student.lm)
    twin = _twin(student, untied=_adapted_head_alone(student))
    weights = _checked(named, twin, dtype)
    settings = {"format": SETTINGS_FORMAT, "pixelrag": pixelrag.__version__, "kind": kind}
    settings |= {} if ema_decay is None else {"ema_decay": ema_decay}
    with replacing(folder) as part:
        with quiet():
            twin.save_pretrained(part, state_dict=weights, max_shard_size=max_shard_size)
            tokenizer.save_pretrained(part)
        (part / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if card is not None:
            (part / "README.md").write_text(card, encoding="utf-8")
    return folder


def _twin(student: CausalLM | Generator, *, untied: bool) -> PreTrainedModel:
    """A model of the same form without storage: it knows names, shapes and ties."""
    model = student.base_model
    # The engine may have turned the class into a sharded one; the saved name is the original's.
    model_class = next(kind for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))
    config = copy.deepcopy(model.config)
    config.use_cache = config.get_text_config().use_cache = True
    if untied:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    with torch.device("meta"):
        twin = model_class(config)
    if model.generation_config is not None:
        twin.generation_config = copy.deepcopy(model.generation_config)
        twin.generation_config.use_cache = True
    return twin


def _adapted_head_alone(student: CausalLM | Generator) -> bool:
    model = student.base_model
    embedding = model.get_input_embeddings()
    return isinstance(model.get_output_embeddings(), LoraLayer) and not isinstance(
        embedding, LoraLayer
    )


def _checked(
    named: Mapping[str, torch.Tensor], twin: PreTrainedModel, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The twin's weights, complete, of the right shapes, each tied one once."""
    expected = twin.state_dict()
    tied = set(getattr(twin, "all_tied_weights_keys", None) or ())
    unknown = sorted(set(named) - set(expected))
    missing = sorted(set(expected) - set(named) - tied)
    if unknown or missing:
        raise CheckpointError(
            "the weights to export are not those of the model: "
            f"{len(missing)} missing, first {(missing or ['none'])[0]}; "
            f"{len(unknown)} unknown, first {(unknown or ['none'])[0]}"
        )
    weights = {}
    for key, tensor in named.items():
        if tensor.shape != expected[key].shape:
            raise CheckpointError(
                f"weight {key} to export has shape {list(tensor.shape)}, expected "
                f"{list(expected[key].shape)}; was it gathered?"
            )
        if key not in tied:
            tensor = tensor.detach().cpu()
            weights[key] = (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
    # The saved configuration names it.
    twin.to(dtype)  # type: ignore[arg-type]  # transformers' wrapper hides what `to` takes
    return weights
