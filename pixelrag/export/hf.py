"""Writes a trained encoder as a Hugging Face folder.

A full model loads with `AutoModel.from_pretrained(folder)`. Qwen3-VL keeps the form of the
published checkpoints (architecture `Qwen3VLForConditionalGeneration`, keys `model.visual.*` and
`model.language_model.*`), so it also loads under that name, as servers such as vLLM expect; a
head that is not tied to the token embeddings (8B) is left out, embeddings have no use for it. A
LoRA model becomes `adapter_config.json` and `adapter_model.safetensors`, which
`PeftModel.from_pretrained(base, folder)` loads; where weights beside the adapters were trained,
which those files would leave out, it is merged into a full model. Either way the tokenizer lies
beside it, `pixelrag.json` says how to pool and what to put to queries and documents, and so do, for
sentence-transformers, the files of `pixelrag.export.sentence_transformers`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import PreTrainedModel, Qwen3VLForConditionalGeneration

import pixelrag
from pixelrag.errors import CheckpointError
from pixelrag.export.folder import MAX_SHARD_SIZE, plain_name, replacing
from pixelrag.export.merge import merged
from pixelrag.export.sentence_transformers import write_modules
from pixelrag.models import Embedder, Preprocessor
from pixelrag.models.load import quiet, takes_pooling_layer
from pixelrag.models.lora import ADAPTER_WEIGHTS
from pixelrag.models.source import SETTINGS_FILE, SETTINGS_FORMAT
from pixelrag.models.tower_parts import trains_beside_adapters


def export_embedder(
    embedder: Embedder,
    preprocessor: Preprocessor,
    state_dict: Mapping[str, torch.Tensor],
    folder: str | Path,
    *,
    temperature: float,
    bias: float | None = None,
    ema_decay: float | None = None,
    document_encoder: str | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = MAX_SHARD_SIZE,
    card: str | None = None,
) -> Path:
    """Write the folder; call it on one rank.

    The embedder's own parameters are never read, so they may be sharded. Everything is written
    beside `folder` first and renamed at the end; a folder that an earlier export wrote is replaced.

    Args:
        embedder: the model whose architecture, pooling and adapters apply.
        preprocessor: its tokenizer, image processor and instructions are saved.
        state_dict: full CPU tensors under the keys of `embedder.state_dict()`; for LoRA alone
            the adapters' suffice.
        folder: where to.
        temperature: the trained temperature, for `pixelrag.json`.
        bias: the trained bias of a sigmoid loss, for the same file; None = there is none.
        ema_decay: where the weights are a moving average, its decay, for the same file.
        document_encoder: the model that embeds documents, where this one was trained for queries
            alone; for the same file. None = this one.
        dtype: of the written weights.
        max_shard_size: weights of a whole model beyond this are several files and an index; as
            much is held in memory a second time while it is written.
        card: content of `README.md`.

    Returns:
        The folder.

    Raises:
        CheckpointError: a weight is missing, unknown or misshapen; `folder` holds something that
            is no export; or it cannot be written. Nothing is left half-written.
    """
    folder = Path(folder)
    model = embedder.backbone
    adapted = model if isinstance(model, PeftModel) else None
    is_adapter = adapted is not None and not trains_beside_adapters(adapted)
    weights = _checked(state_dict, embedder, adapters_alone=is_adapter)
    if adapted is not None and not is_adapter:
        weights = merged(weights, adapted)
    weights = {key: _portable(tensor, dtype) for key, tensor in weights.items()}
    with replacing(folder) as part:
        with quiet():
            if adapted is not None and is_adapter:
                _write_adapter(adapted, weights, part)
            else:
                _write_model(embedder.base_model, weights, part, dtype, max_shard_size)
        preprocessor.save(part)
        write_modules(part, embedder, preprocessor)
        settings = _settings(embedder, preprocessor, temperature)
        settings |= {} if bias is None else {"bias": bias}
        settings |= {} if ema_decay is None else {"ema_decay": ema_decay}
        if document_encoder is not None:
            settings |= {"trained": ["query"], "document_encoder": document_encoder}
        text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        (part / SETTINGS_FILE).write_text(text, encoding="utf-8")
        if card is not None:
            (part / "README.md").write_text(card, encoding="utf-8")
    return folder


def _checked(
    state_dict: Mapping[str, torch.Tensor], embedder: Embedder, *, adapters_alone: bool
) -> dict[str, torch.Tensor]:
    """The backbone's weights by its own names, complete and not empty."""
    given = {plain_name(key): tensor for key, tensor in state_dict.items()}
    expected = set(embedder.state_dict(keep_vars=True))
    unknown = sorted(set(given) - expected)
    missing = expected - set(given)
    if adapters_alone:
        missing = {key for key in missing if "lora_" in key}
    if unknown or missing:
        raise CheckpointError(
            "the weights to export are not those of the model: "
            f"{len(missing)} missing, first {min(missing, default='none')}; "
            f"{len(unknown)} unknown, first {min(unknown, default='none')}"
        )
    empty = [key for key, tensor in given.items() if tensor.numel() == 0]
    if empty:
        raise CheckpointError(
            f"{len(empty)} weights to export are empty, first {empty[0]}; were they gathered?"
        )
    return {key.removeprefix("backbone."): tensor for key, tensor in given.items()}


def _portable(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    tensor = tensor.detach().to("cpu")
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()


def _write_model(
    model: PreTrainedModel,
    weights: dict[str, torch.Tensor],
    folder: Path,
    dtype: torch.dtype,
    max_shard_size: str,
) -> None:
    # The engine may have turned the class into a sharded one; the saved name is the original's.
    model_class = next(kind for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))
    config = copy.deepcopy(model.config)
    config.use_cache = config.get_text_config().use_cache = True
    options = {"add_pooling_layer": False} if takes_pooling_layer(model_class) else {}
    if config.model_type == "qwen3_vl":
        model_class = Qwen3VLForConditionalGeneration
        weights = {f"model.{key}": tensor for key, tensor in weights.items()}
    # A twin without storage: saving asks the model for its tied weights and names only.
    with torch.device("meta"):
        twin = model_class(config, **options).to(dtype)
    shapes = {key: tensor.shape for key, tensor in twin.state_dict().items()}
    for key, tensor in weights.items():
        if tensor.shape != shapes[key]:
            raise CheckpointError(
                f"weight {key} to export has shape {list(tensor.shape)}, expected "
                f"{list(shapes[key])}; was it gathered?"
            )
    twin.save_pretrained(folder, state_dict=weights, max_shard_size=max_shard_size)


def _write_adapter(model: PeftModel, weights: dict[str, torch.Tensor], folder: Path) -> None:
    adapter = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    save_file(adapter, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = copy.deepcopy(model.peft_config["default"])
    config.inference_mode = True
    config.save_pretrained(str(folder))


def _settings(embedder: Embedder, preprocessor: Preprocessor, temperature: float) -> dict[str, Any]:
    return {
        "format": SETTINGS_FORMAT,
        "pixelrag": pixelrag.__version__,
        "pooling": embedder.pooling,
        "normalize": embedder.normalize,
        "query_instruction": preprocessor.query_instruction,
        "document_instruction": preprocessor.document_instruction,
        "query_max_length": preprocessor.query_max_length,
        "document_max_length": preprocessor.document_max_length,
        "max_visual_tokens": preprocessor.max_visual_tokens,
        "temperature": temperature,
    }
