"""What the exact gradient costs in time, and what memory it saves, beside the plain step.

plain       the whole batch at once: one forward with graph, one backward
all         the same gradient in chunks, each run forward twice (`batch.replay: all`)
half, none  the same with the graphs of half of the chunks kept, or of all of them

With a backward as dear as two forwards, `all` over `none` is (1 + 1 + 2) / (1 + 2) = 4/3 in theory.
All rows have the same number of tokens, so that no way pads more than another. Needed operations
are those of one forward and backward of every row, counted on a chunk of the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import cast

import torch

from pixelrag.bench.cases import Ready, Skipped, measure_in_turns
from pixelrag.bench.flops import count_flops
from pixelrag.bench.models import (
    FIRST_WORD,
    IMAGE,
    MAX_NORM,
    VISION_START,
    adamw,
    biencoder,
    text_config,
    vision_config,
)
from pixelrag.bench.rows import Case, Row
from pixelrag.config.bench import GradCacheConfig, GradCacheWork
from pixelrag.engine import Engine, build_engine
from pixelrag.gradcache import gradcache_step, split_batch
from pixelrag.gradcache.keep import Keeper, Replay
from pixelrag.losses.contrastive import Objective, contrastive_loss, whole_batch
from pixelrag.losses.temperature import scale_from_log
from pixelrag.models.biencoder import BiEncoder

SUITE = "gradcache"
Batch = dict[str, torch.Tensor]


def groups(config: GradCacheConfig) -> list[list[Case]]:
    """Ways by tower, batch and chunk; `plain` knows no chunk and stands with the first of them."""
    work = config.work

    def cases(tower: str, batch: int, chunk: int) -> list[Case]:
        first = chunk == work.chunks[0] and batch <= work.plain_up_to
        return [
            {
                "tower": tower,
                "batch": batch,
                "chunk": batch if way == "plain" else chunk,
                "replay": way,
            }
            for way in work.replay
            if way != "plain" or first
        ]

    found = [cases(*key) for key in product(work.towers, work.batches, work.chunks)]
    return [group for group in found if group]


def measure(config: GradCacheConfig, cases: Sequence[Case]) -> Iterator[Row]:
    """Times in turns, memory alone."""
    return measure_in_turns(SUITE, prepare, config, cases)


def tower(config: GradCacheConfig, name: str, device: torch.device) -> BiEncoder:
    """The model of a tower; on `meta` without weights."""
    text = config.text
    sizes = text_config(text) if name == "text" else vision_config(text, config.vision)
    return biencoder(sizes, device)


def prepare(
    config: GradCacheConfig, cases: Sequence[Case], device: torch.device
) -> list[Ready | Skipped]:
    """One model and engine for all cases of a tower."""
    work, name = config.work, str(cases[0]["tower"])
    module = tower(config, name, device)
    size = int(cases[0]["batch"])
    queries, documents = (rows_of(module, work, name, size, seed, device) for seed in (0, 1))
    tokens = int(queries["attention_mask"].sum() + documents["attention_mask"].sum())
    smallest = min(int(case["chunk"]) for case in cases)
    flops = 0.0

    def differentiate(role: str, chunk: Batch) -> None:
        module(role, **chunk)[0].sum().backward()

    for role, batch in (("query", queries), ("document", documents)):
        chunk = split_batch(batch, smallest)[0]
        of_chunk = count_flops(partial(differentiate, role, chunk))
        flops += of_chunk / len(chunk["attention_mask"]) * size
    module.zero_grad(set_to_none=True)
    engine = build_engine(module, adamw, device=device, precision=work.precision)
    moved = 3.0 * sum(p.numel() * p.element_size() for p in module.parameters())
    return [
        Ready(step_of(case, engine, queries, documents), tokens, None, flops, moved, work.precision)
        for case in cases
    ]


def rows_of(
    module: BiEncoder, work: GradCacheWork, name: str, rows: int, seed: int, device: torch.device
) -> Batch:
    """Rows of random tokens; documents (seed 1) of the vision tower are an image each."""
    draw = torch.Generator().manual_seed(seed)
    vocabulary = module.encoder.base_model.config.get_text_config().vocab_size
    ids_BT = torch.randint(FIRST_WORD, vocabulary, (rows, work.tokens), generator=draw)
    batch: Batch = {}
    if name == "vision" and seed == 1:
        side = work.image_side // 32 * 2  # patches of 16 pixels, an even number of them
        patches = side * side
        head = torch.tensor([VISION_START] + [IMAGE] * (patches // 4))
        ids_BT = torch.cat([head.expand(rows, -1), ids_BT], 1)
        values = 3 * 2 * 16 * 16
        batch = {
            "pixel_values": torch.randn(rows * patches, values, generator=draw),
            "image_grid_thw": torch.tensor([[1, side, side]]).repeat(rows, 1),
            "num_images": torch.ones(rows, dtype=torch.int64),
        }
    batch |= {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT)}
    return {key: value.to(device) for key, value in batch.items()}


def step_of(case: Case, engine: Engine, queries: Batch, documents: Batch) -> Callable[[], None]:
    """One whole step of a case."""
    chunk, replay = int(case["chunk"]), case["replay"]
    half = -(-len(queries["attention_mask"]) // chunk)  # of queries' and documents' chunks together
    keeper = None
    if replay != "plain":
        keeper = Keeper(half if replay == "half" else cast(Replay, replay))

    def step() -> None:
        if keeper is None:
            plain(engine, queries, documents)
        else:
            cached(engine, queries, documents, chunk, keeper)
        engine.step(MAX_NORM)

    return step


def cached(
    engine: Engine, queries: Batch, documents: Batch, chunk: int, keeper: Keeper | None = None
) -> None:
    """Gradients by GradCache."""
    positive_B = torch.arange(len(queries["attention_mask"]))
    chunks = split_batch(queries, chunk), split_batch(documents, chunk)
    gradcache_step(engine, *chunks, positive_B, keeper=keeper)


def plain(engine: Engine, queries: Batch, documents: Batch) -> None:
    """Gradients of the whole batch at once."""
    query_BD, _ = engine("query", **queries)
    document_BD, log_scale = engine("document", **documents)
    rows = len(query_BD)
    batch = whole_batch(query_BD, document_BD, torch.arange(rows, device=query_BD.device))
    result = contrastive_loss(Objective(), batch, scale_from_log(log_scale), num_queries=rows)
    engine.backward(result.loss, last=True)
