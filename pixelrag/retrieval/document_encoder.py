"""Encodes passages outside the training: the same model, template and truncation as inside.

The parity check of a refresh, and `score == p(z|x)` at lag 0, rest on both sides making their
inputs with `passage_document` and the same `Preprocessor`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from pixelrag.config.parts import LoraConfig
from pixelrag.config.rag_models import EncoderConfig
from pixelrag.data.schema import Document
from pixelrag.errors import ModelError
from pixelrag.models.embedder import Embedder
from pixelrag.models.load import load_embedder
from pixelrag.models.preprocess import Preprocessor

TEMPLATE = "{title}\n{text}"
_FIELD = re.compile(r"\{(title|text)\}")


class Passage(Protocol):
    """What is encoded; see `pixelrag.data.passages.Passage`."""

    @property
    def id(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def text(self) -> str | None: ...
    @property
    def image(self) -> Path | None: ...


EncodePassages = Callable[[Sequence[Passage]], np.ndarray]


def passage_document(passage: Passage, template: str = TEMPLATE) -> Document:
    """The document that the encoder sees.

    Args:
        passage: with an image, the image alone is the document.
        template: of texts, with {title} and {text}; a passage without a title is its text alone.
    """
    if passage.image is not None:
        return Document.of_image(passage.image)
    text = passage.text or ""
    if passage.title:
        values = {"title": passage.title, "text": text}
        text = _FIELD.sub(lambda match: values[match.group(1)], template)
    return Document.of_text(text)


def encode_passages(
    model: Embedder,
    preprocessor: Preprocessor,
    passages: Sequence[Passage],
    *,
    batch_size: int,
    template: str = TEMPLATE,
    device: torch.device | str = "cpu",
    bf16: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Encode passages in eval mode without gradients, those of like length together.

    Args:
        model: on ``device``; its mode is put back.
        preprocessor: of the model.
        passages: what to encode.
        batch_size: passages at once.
        template: see `passage_document`.
        device: where the model is.
        bf16: compute in bfloat16 (autocast), as an engine of that precision does.
        progress: called after each batch.

    Returns:
        float32 [n, D], in the order of ``passages``.

    Raises:
        DataError: a passage that yields no token, or an image that cannot be read.
    """
    documents = [passage_document(passage, template) for passage in passages]
    order = sorted(range(len(documents)), key=lambda i: (-len(documents[i].text or ""), i))
    vectors = np.empty((len(documents), model.embedding_dim), dtype=np.float32)
    was_training = model.training
    model.eval()
    kind = torch.device(device).type
    try:
        with torch.inference_mode(), torch.autocast(kind, torch.bfloat16, enabled=bf16):
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                inputs = preprocessor.documents([documents[i] for i in chosen])
                inputs = {key: value.to(device) for key, value in inputs.items()}
                vectors[chosen] = model(**inputs).float().cpu().numpy()
                progress()
    finally:
        model.train(was_training)
    return vectors


def embedder(
    *,
    weights: Path,
    device: str,
    model_config: dict[str, Any],
    lora_config: dict[str, Any] | None = None,
    batch_size: int = 64,
    template: str = TEMPLATE,
    bf16: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> EncodePassages:
    """Build the encoder of a refresh from its configuration and a snapshot; for `RefreshSpec`.

    Args:
        weights: the snapshot; it may hold the trained weights alone.
        device: where to encode.
        model_config, lora_config: sections of the configuration, as plain values.
        batch_size, template, bf16, progress: see `encode_passages`.

    Raises:
        ModelError: the model is not there, or the snapshot is of another one.
    """
    lora = LoraConfig(**lora_config) if lora_config else None
    model, preprocessor = load_embedder(EncoderConfig(**model_config), lora, half_precision=bf16)
    load_snapshot(model, weights)
    model.to(device).eval()

    def encode(passages: Sequence[Passage]) -> np.ndarray:
        return encode_passages(
            model,
            preprocessor,
            passages,
            batch_size=batch_size,
            template=template,
            device=device,
            bf16=bf16,
            progress=progress,
        )

    return encode


def load_snapshot(model: torch.nn.Module, weights: Path) -> None:
    """Put a snapshot's weights into a model; those that are not trained may be left out.

    Raises:
        ModelError: it cannot be read, or names and shapes do not fit.
    """
    try:
        state = load_file(weights)
        missing, unexpected = model.load_state_dict(state, strict=False)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ModelError(f"{weights}: the snapshot does not fit the model ({error})") from error
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    absent = sorted(trained.intersection(missing))
    if absent or unexpected:
        raise ModelError(
            f"{weights}: the snapshot lacks {len(absent)} weights that are trained "
            f"({', '.join(absent[:3]) or '-'}) and has {len(unexpected)} of another model "
            f"({', '.join(unexpected[:3]) or '-'})"
        )


def fingerprints(
    model: Embedder, preprocessor: Preprocessor, *, template: str = TEMPLATE, bf16: bool = False
) -> dict[str, str]:
    """What besides weights and passages decides the vectors, by name; for manifests."""
    images = preprocessor.image_processor
    image_settings = None if images is None else images.to_json_string()
    tokenizer = json.loads(preprocessor.tokenizer.backend_tokenizer.to_str())
    for setting in ("truncation", "padding"):  # of the last call
        tokenizer.pop(setting, None)
    return {
        "tokenizer": _digest(json.dumps(tokenizer, sort_keys=True), image_settings),
        "template": _digest(template, preprocessor.document_instruction),
        "pooling": f"{model.pooling}, {'unit' if model.normalize else 'raw'}",
        "max_length": str(preprocessor.document_max_length),
        "dtype": "bf16" if bf16 else "fp32",
    }


def _digest(*parts: str | None) -> str:
    return hashlib.sha256(json.dumps(parts).encode("utf-8")).hexdigest()[:32]
