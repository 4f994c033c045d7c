"""Lets a causal language model go on with a prompt, token by token, the likeliest each time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import GenerationConfig

from pixelrag.models.attention import VARLEN
from pixelrag.models.causal import CausalLM


def write_greedily(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    device: torch.device,
    ends: Sequence[int],
    max_new_tokens: int,
) -> list[list[int]]:
    """The tokens behind each prompt, greedily; a collective where parameters are sharded.

    Args:
        model: in eval mode, where gradients are off.
        prompts: their tokens, at least one each; all ranks need the same ones.
        device: the model's.
        ends: tokens after which one ends; the first of them is also what fills up.
        max_new_tokens: at most.

    Returns:
        Tokens, without the end that came.
    """
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=list(ends),
        pad_token_id=ends[0],
    )
    width = max(map(len, prompts))
    ids_BT = torch.full((len(prompts), width), ends[0], dtype=torch.int64)
    mask_BT = torch.zeros_like(ids_BT)
    for row, prompt in enumerate(prompts):  # on the left: what is written follows at once
        ids_BT[row, width - len(prompt) :] = torch.tensor(prompt)
        mask_BT[row, width - len(prompt) :] = 1
    several = dist.is_initialized() and dist.get_world_size() > 1
    base: Any = model.base_model
    with _with_cache(model):
        tokens_BN = base.generate(
            input_ids=ids_BT.to(device),
            attention_mask=mask_BT.to(device),
            generation_config=config,
            synced_gpus=several,
        )[:, width:]
    return [
        list(itertools.takewhile(lambda token: token not in ends, row))
        for row in tokens_BN.tolist()
    ]


def longest_prompt(model: CausalLM, max_new_tokens: int) -> int | None:
    """Tokens of a prompt behind which the model can still tell positions apart; None = any."""
    limit = getattr(model.base_model.config.get_text_config(), "max_position_embeddings", None)
    return max(1, limit - max_new_tokens) if limit else None


@contextlib.contextmanager
def _with_cache(model: CausalLM) -> Iterator[None]:
    """Attention document by document knows no cache; eager attention does what all others do."""
    before = model.attention
    if before == VARLEN:
        model.use_attention("eager")
    try:
        yield
    finally:
        if before == VARLEN:
            model.use_attention(before)
