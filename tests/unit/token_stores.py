"""Small stores of made-up samples."""

import numpy as np

from pixelrag.data.text_encoder import Tokens
from pixelrag.data.token_store import TokenStore, TokenStoreBuilder


def token_store(masks: list[list[bool]], seed: int = 0, vocab_size: int = 1000) -> TokenStore:
    """One sample for each mask, of random tokens; sample `i` is "train.jsonl:i+1"."""
    draw = np.random.default_rng(seed)
    builder = TokenStoreBuilder()
    for number, mask in enumerate(masks, start=1):
        ids = draw.integers(0, vocab_size, len(mask)).astype(np.int32)
        builder.add(Tokens(ids, np.array(mask, np.bool_)), 0, number)
    return builder.build(["train.jsonl"])


def random_masks(num: int, longest: int, seed: int = 0, shortest: int = 2) -> list[list[bool]]:
    """Masks of random length: a prompt, then an answer of one token or more."""
    draw = np.random.default_rng(seed)
    masks = []
    for length in draw.integers(shortest, longest + 1, num).tolist():
        prompt = int(draw.integers(0, length))
        masks.append([False] * prompt + [True] * (length - prompt))
    return masks
