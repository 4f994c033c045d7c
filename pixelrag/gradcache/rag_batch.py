"""One rank's part of a global batch of the RAG job, and how its generator inputs are cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pixelrag.gradcache.minibatch import split_batch
from pixelrag.gradcache.schedule import Chunk

Inputs = dict[str, torch.Tensor]

_TARGETS = ("target_ids", "target_mask")


@dataclass(slots=True)
class RagBatch:
    """Questions with their retrieved documents, as model inputs.

    A document that several questions of the rank retrieved is encoded once.

    Attributes:
        queries: inputs of B questions.
        documents: inputs of M distinct documents.
        generator: inputs of the generator: N (question, document) pairs with their answers; or,
            for fusion in the decoder, B questions with [B, K, P] prompts.
        document_BK: int64, the document (of M) of each question and rank; -1 = none was found.
        pair_BK: int64, the row of each pair, in ``generator`` or ``readings``; -1 = none.
        target_mask_BT: bool, tokens of each answer.
        num_real: B, or 0 where the rows only fill the rank's place.
        readings: inputs of the generator that are read without gradient, for losses that need
            more readings than the generator learns from: one row a pair; for the attention of
            encoder-decoders one row a question, with [B, K, P] prompts.
        document_keys: the passage (a number that all ranks share) of each document [M].
        gold: for each question the passages (numbers as above) that are known to be relevant.
    """

    queries: Inputs
    documents: Inputs
    generator: Inputs
    document_BK: torch.Tensor
    pair_BK: torch.Tensor
    target_mask_BT: torch.Tensor
    num_real: int
    readings: Inputs | None = None
    document_keys: tuple[int, ...] = ()
    gold: tuple[tuple[int, ...], ...] = ()


def split_targets(inputs: Mapping[str, torch.Tensor], chunk_size: int) -> list[Chunk]:
    """Cut generator inputs into chunks of rows, each padded no further than its own rows need.

    Args:
        inputs: `input_ids` and `attention_mask` [N, P] or [N, K, P], padded on either side,
            `target_ids` and `target_mask` [N, T], padded on the right; images as for
            `split_batch`.
        chunk_size: rows of a chunk, at least 1.

    Raises:
        DataError: the image tensors do not add up.
        ValueError: ``chunk_size`` is below 1.
    """
    prompts = {key: value for key, value in inputs.items() if key not in _TARGETS}
    mask = prompts["attention_mask"]
    if mask.dim() == 3:
        # Columns are cut alike for all documents of a row.
        flat = {key: value.flatten(1, 2) for key, value in prompts.items()}
        chunks = [_unfused(chunk, mask.shape[1:]) for chunk in _untrimmed(flat, chunk_size)]
    else:
        chunks = split_batch(prompts, chunk_size)
    start = 0
    for chunk in chunks:
        rows = slice(start, start + len(chunk["attention_mask"]))
        start = rows.stop
        width = max(1, int(inputs["target_mask"][rows].sum(1).max()))
        chunk |= {key: inputs[key][rows, :width] for key in _TARGETS}
    return chunks


def _untrimmed(inputs: Inputs, chunk_size: int) -> list[Chunk]:
    if chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size}, expected at least 1")
    parts = {key: value.split(chunk_size) for key, value in inputs.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]


def _unfused(chunk: Chunk, shape: torch.Size) -> Chunk:
    """Back to [N, K, P], without the columns that no document needs."""
    fused = {key: value.unflatten(1, shape) for key, value in chunk.items()}
    used_P = fused["attention_mask"].flatten(0, 1).any(dim=0).nonzero()
    if len(used_P) == 0:
        return fused
    return {k: v[..., int(used_P[0]) : int(used_P[-1]) + 1] for k, v in fused.items()}
