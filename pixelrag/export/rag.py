"""Writes a trained RAG model: a folder of Hugging Face folders, one a part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from pixelrag.export.causal import export_causal
from pixelrag.export.folder import MAX_SHARD_SIZE
from pixelrag.export.hf import export_embedder
from pixelrag.models.generator_prompt import GeneratorPreprocessor
from pixelrag.models.preprocess import Preprocessor
from pixelrag.models.rag import RagModel


def export_rag(
    model: RagModel,
    queries: Preprocessor,
    documents: Preprocessor,
    generator: GeneratorPreprocessor,
    state_dict: Mapping[str, torch.Tensor],
    folder: str | Path,
    *,
    temperature: float,
    dtype: torch.dtype = torch.float32,
    encoder_dtype: torch.dtype = torch.float32,
    max_shard_size: str = MAX_SHARD_SIZE,
    cards: Mapping[str, str] | None = None,
) -> Path:
    """Write `question_encoder/`, `document_encoder/` (unless shared) and `generator/`.

    Encoders load as `export_embedder` says, the generator with the `AutoModelFor...` of its kind.
    Call it on one rank; no parameter of ``model`` is read, so they may be sharded.

    Args:
        model: the container.
        queries, documents, generator: saved beside the weights.
        state_dict: full CPU tensors under the keys of ``model.state_dict()``.
        folder: where to; what earlier exports wrote there is replaced, part by part.
        temperature: of the scores.
        dtype: of the generator's written weights.
        encoder_dtype: of the encoders'.
        max_shard_size: as for `export_embedder`.
        cards: content of each part's `README.md`.

    Raises:
        CheckpointError: see `export_embedder` and `export_causal`.
    """
    folder, cards = Path(folder), cards or {}
    parts = {name: _part(state_dict, name) for name in ("question_encoder", "document_encoder")}
    for name, prepare in (("question_encoder", queries), ("document_encoder", documents)):
        encoder = getattr(model, name)
        if encoder is not None:
            export_embedder(
                encoder, prepare, parts[name], folder / name, temperature=temperature,
                dtype=encoder_dtype, max_shard_size=max_shard_size, card=cards.get(name),
            )  # fmt: skip
    weights = _part(state_dict, "generator")
    export_causal(
        model.generator, generator, weights, folder / "generator",
        dtype=dtype, kind="generator", max_shard_size=max_shard_size, card=cards.get("generator"),
    )  # fmt: skip
    return folder


def _part(state_dict: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    prefix = f"{name}."
    return {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
