"""The contrastive loss does not care how its batch is ordered, split, cut into chunks or tiles.

In float64, over random losses and batches. Ranks are slices of one process here, since what a rank
computes is its partial sum; real ranks on real engines are tried on a few configurations more.
"""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pixelrag.distributed.env import process_group
from pixelrag.losses.contrastive import EmbeddedBatch, Objective, contrastive_loss
from pixelrag.losses.tiles import Columns
from pixelrag.verify.naive import naive_loss
from tests.distributed.harness import run_cases
from tests.distributed.trials import assert_exact, run_trial
from tests.property.numerics import assert_same, drawn, tried

RANDOM = st.randoms(use_true_random=False)
WIDTH = 6


def objective_of(draw: random.Random) -> dict[str, Any]:
    """Any loss that a configuration may ask for."""
    name = draw.choice(["infonce", "infonce", "siglip"])
    return {
        "name": name,
        "hardness_alpha": draw.choice([0.0, 0.5, 9.0]),
        "label_smoothing": draw.choice([0.0, 0.1, 0.6]),
        "bidirectional": name == "infonce" and draw.random() < 0.5,
        "matryoshka": draw.choice([(), ((2, 0.5),), ((1, 2.0), (WIDTH, 0.3))]),
        "mask_margin": draw.choice([None, 0.1, -0.2]),
        "tile_size": draw.choice([None, 1, 2, 5]),
    }


@dataclass(frozen=True)
class Batch:
    """Embeddings; the documents that answer each query; equal numbers for equal documents."""

    queries: torch.Tensor
    documents: torch.Tensor
    positives: list[list[int]]
    content: list[int]


def batch_of(draw: random.Random) -> Batch:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    positives, count = [], 0
    for _ in range(draw.randint(1, 6)):
        many = draw.choice([1, 1, 2, 3])
        positives.append(list(range(count, count + many)))
        count += many + draw.choice([0, 0, 1, 3])  # and so many hard negatives
    values = torch.randn(len(positives) + count, WIDTH, generator=generator, dtype=torch.double)
    embeddings = F.normalize(values, dim=1)
    content = [draw.randrange(i + 1) if draw.random() < 0.2 else i for i in range(count)]
    return Batch(embeddings[: len(positives)], embeddings[len(positives) :], positives, content)


def parts_of(draw: random.Random, total: int, most: int) -> list[slice]:
    """Consecutive slices that hold everything; some may be empty."""
    cuts = sorted(draw.randint(0, total) for _ in range(draw.randint(0, most - 1)))
    return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def _columns(emb: torch.Tensor, ids: torch.Tensor) -> Columns:
    return Columns(emb, ids[None])


@tried(60)
@given(RANDOM)
def test_order_ranks_and_tiles_change_nothing(draw):
    batch, objective = batch_of(draw), Objective(**objective_of(draw))
    scale = torch.tensor([draw.choice([1.0, 14.0, 100.0, 1e4])], dtype=torch.double)
    bias = torch.tensor([-3.0], dtype=torch.double) if objective.name == "siglip" else None
    leaves = [t for t in (batch.queries, batch.documents, scale, bias) if t is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    reference = naive_loss(
        objective, batch.queries, batch.documents, batch.positives, scale, bias,
        content=batch.content,
    )  # fmt: skip
    wanted = torch.autograd.grad(reference, leaves)

    order_B, order_N = (
        draw.sample(range(len(t)), len(t)) for t in (batch.queries, batch.documents)
    )
    place = {old: new for new, old in enumerate(order_N)}
    most = max(map(len, batch.positives))
    found_BK = torch.tensor(
        [
            [place[p] for p in batch.positives[b]] + [-1] * (most - len(batch.positives[b]))
            for b in order_B
        ]
    )
    content_N = torch.tensor(batch.content)[order_N]
    documents = _columns(batch.documents[order_N], content_N[:, None])
    asking = _columns(batch.queries[order_B], documents.ids_of(found_BK))
    total = torch.zeros((), dtype=torch.double)
    for part in parts_of(draw, len(order_B), 4):
        mine = EmbeddedBatch(batch.queries[order_B][part], found_BK[part], documents, asking)
        total = (
            total + contrastive_loss(objective, mine, scale, bias, num_queries=len(order_B)).loss
        )
    rounding = {"bar": 1e-9, "floor": max(1e-4, 1e-6 * scale.item())}  # logits of 1e4 hold 1e-12
    assert_same([total], [reference], **rounding)
    assert_same(torch.autograd.grad(total, leaves), wanted, **rounding)


@tried(60)
@given(RANDOM)
def test_no_valid_input_makes_nan(draw):
    """Any scale, bf16, equal embeddings, and rows that the masks leave without a negative."""
    batch, options = batch_of(draw), objective_of(draw)
    objective = Objective(**options | {"mask_margin": draw.choice([None, -2.0, 0.0])})
    dtype = draw.choice([torch.float32, torch.bfloat16])
    queries, documents = batch.queries.to(dtype), batch.documents.to(dtype)
    if draw.random() < 0.3:
        queries[:], documents[:] = queries[0], queries[0]
    scale = torch.tensor([draw.choice([1.0, 100.0, 1e4])])
    bias = torch.tensor([draw.choice([-10.0, 1e4])]) if objective.name == "siglip" else None
    leaves = [t for t in (queries, documents, scale, bias) if t is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    most = max(map(len, batch.positives))
    found_BK = torch.tensor([p + [-1] * (most - len(p)) for p in batch.positives])
    columns = _columns(documents, torch.tensor(batch.content)[:, None])
    asking = _columns(queries, columns.ids_of(found_BK))
    mine = EmbeddedBatch(queries, found_BK, columns, asking)
    loss = contrastive_loss(objective, mine, scale, bias, num_queries=len(queries)).loss
    assert torch.isfinite(loss)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(loss, leaves))


def trial_of(draw: random.Random) -> dict[str, Any]:
    """A step of GradCache as a user may configure it."""
    loss = objective_of(draw)
    return {
        "dtype": "float64",
        "steps": 1,
        "chunk_size": draw.randint(1, 9),
        "chunk_tokens": draw.choice([None, None, 16]),
        "negatives": draw.randint(0, 3),
        "positives": draw.randint(1, 2),
        "content": draw.random() < 0.5,
        "loss": loss | {"mask_margin": draw.choice([None, 0.1])},
        "replay": draw.choice(["all", 0, 1, 3, 99]),
        "exchange": draw.choice(["all_gather", "ring"]),
        "images": draw.choice(["varied", "none", "some", "all"]),
        "accumulate": draw.randint(1, 3),
        "tied": draw.random() < 0.3,
        "checkpointing": draw.random() < 0.3,
    }


@tried(8)
@given(RANDOM)
def test_chunks_kept_graphs_and_accumulation_change_nothing(draw):
    with process_group("cpu") as world:
        assert_exact([run_trial(world, trial_of(draw))], 1e-10)


def _on_an_engine(draw: random.Random) -> dict[str, Any]:
    case = trial_of(draw) | {"engine": draw.choice(["ddp", "zero2", "zero3", "fsdp2"])}
    if case["engine"].startswith("zero"):  # DeepSpeed keeps its masters in fp32
        case["dtype"] = "float32"
    case["negatives"] = draw.randint(1, 3)  # without any the loss is 0, and has no relative error
    sizes = [draw.randint(1, 4), draw.randint(2, 4)]
    return case | {"rows": sizes, "grad_sync": draw.choice(["deferred", "per_chunk"])}


ENGINES = drawn(_on_an_engine, 10)


@pytest.fixture(scope="module")
def ranks():
    return run_cases("tests.distributed.trials:run_trial", ENGINES, nproc=2)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ENGINES)
def test_ranks_and_engines_change_nothing(ranks, name):
    exact = ENGINES[name]["dtype"] == "float64"
    for result in ranks[name]:
        if not exact:  # the first step of AdamW makes of a gradient that is rounding a whole step
            result.pop("weights", None)
    assert_exact(ranks[name], 1e-10 if exact else 1e-4)
