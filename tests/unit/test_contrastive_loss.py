"""The contrastive loss with every option, in tiles and blocks, against plain float64 autograd.

The oracle (`verify.naive`) holds all similarities and loops over queries.
"""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from pixelrag.losses.contrastive import (
    EmbeddedBatch,
    Objective,
    contrastive_loss,
    whole_batch,
)
from pixelrag.losses.tiles import Columns
from pixelrag.verify.naive import naive_loss

D, NUM_QUERIES, NUM_DOCUMENTS = 6, 7, 16
# Several positives; 3 has one that equals another query's; 15 is a hard negative equal to 2.
POSITIVES = [[0], [1, 2], [3], [4, 5, 6], [7], [9], [12]]
CONTENT = [0, 1, 2, 3, 4, 5, 6, 3, 8, 9, 10, 11, 12, 13, 8, 2]
OPTIONS = {
    "hardness": {"hardness_alpha": 3.0},
    "smoothing": {"label_smoothing": 0.2},
    "bidirectional": {"bidirectional": True},
    "matryoshka": {"matryoshka": ((4, 0.5), (2, 2.0))},
    "margin": {"mask_margin": 0.05},
    "siglip": {"name": "siglip"},
    # These three are of the batch, not of the objective.
    "content": {},
    "positives": {},
    "guide": {},
}
PAIRS = [
    names
    for names in itertools.combinations_with_replacement(OPTIONS, 2)
    if set(names) != {"siglip", "bidirectional"}
]


def leaves(scale: float = 14.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {
        name: F.normalize(torch.randn(count, D, generator=generator, dtype=torch.float64), dim=1)
        for name, count in (("query", NUM_QUERIES), ("document", NUM_DOCUMENTS))
    }
    made |= {"scale": torch.tensor([scale]).double(), "bias": torch.tensor([-3.0]).double()}
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def guides() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(
        torch.randn(n, 3, generator=generator).double() for n in (NUM_QUERIES, NUM_DOCUMENTS)
    )


def padded(positives: Sequence[Sequence[int]]) -> torch.Tensor:
    most = max(map(len, positives))
    return torch.tensor([[*found, *[-1] * (most - len(found))] for found in positives])


def naive(objective: Objective, names: Sequence[str], x: dict[str, torch.Tensor]) -> torch.Tensor:
    guide = guides()
    return naive_loss(
        objective,
        x["query"],
        x["document"],
        POSITIVES if "positives" in names else [found[:1] for found in POSITIVES],
        x["scale"],
        x["bias"] if objective.name == "siglip" else None,
        content=CONTENT if "content" in names else None,
        guide_BN=guide[0] @ guide[1].T if "guide" in names else None,
    )


def ours(objective: Objective, names: Sequence[str], x: dict[str, torch.Tensor]) -> torch.Tensor:
    positives = padded(POSITIVES if "positives" in names else [f[:1] for f in POSITIVES])
    content = torch.tensor(CONTENT) if "content" in names else None
    guide = guides() if "guide" in names else None
    batch = whole_batch(x["query"], x["document"], positives, content, guide)
    bias = x["bias"] if objective.name == "siglip" else None
    return contrastive_loss(objective, batch, x["scale"], bias, num_queries=NUM_QUERIES).loss


def objective_of(names: Sequence[str], **more) -> Objective:
    chosen = {}
    for name in names:
        chosen |= OPTIONS[name]
    return Objective(**chosen | more)


def compare(
    got: torch.Tensor, expected: torch.Tensor, ours, theirs, tolerance: float = 1e-12
) -> None:
    """Equal losses, and gradients equal in direction and size."""
    assert got.item() == pytest.approx(expected.item(), rel=tolerance)
    got.backward()
    expected.backward()
    for name, leaf in theirs.items():
        if leaf.grad is None:
            assert ours[name].grad is None
            continue
        error = (ours[name].grad.double() - leaf.grad).norm() / leaf.grad.norm()
        ratio = ours[name].grad.double().norm() / leaf.grad.norm()
        assert float(error) < tolerance, name
        assert float(ratio) == pytest.approx(1.0, abs=tolerance), name


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_each_pair_of_options_is_the_formula_in_any_tiles(names: tuple[str, str]) -> None:
    for tile_size in (1, 3, 100):
        mine, theirs = leaves(), leaves()
        objective = objective_of(names, tile_size=tile_size)
        compare(ours(objective, names, mine), naive(objective, names, theirs), mine, theirs)


ALL = [name for name in OPTIONS if name != "siglip"]


def test_all_options_at_once_and_every_option_acts() -> None:
    for names in (ALL, [n for n in OPTIONS if n != "bidirectional"]):
        mine, theirs = leaves(), leaves()
        objective = objective_of(names, tile_size=3)
        everything = naive(objective, names, theirs)
        compare(ours(objective, names, mine), everything, mine, theirs)
        for name in names:
            fewer = [other for other in names if other != name]
            without = ours(objective_of(fewer), fewer, leaves())
            assert without.item() != pytest.approx(everything.item(), rel=1e-4), name


def test_single_precision_is_off_by_rounding_only() -> None:
    x = {name: leaf.detach().float().requires_grad_() for name, leaf in leaves().items()}
    wide = {name: leaf.detach().double().requires_grad_() for name, leaf in x.items()}
    objective = objective_of(ALL)
    compare(ours(objective, ALL, x), naive(objective, ALL, wide), x, wide, 3e-6)


# What ranks do, in one process ------------------------------------------------------------------


def test_partial_sums_of_ranks_add_up() -> None:
    names = ["positives", "content", "hardness", "smoothing"]
    objective = objective_of(names, tile_size=4)
    mine, theirs = leaves(), leaves()
    whole = whole_batch(mine["query"], mine["document"], padded(POSITIVES), torch.tensor(CONTENT))
    parts = []
    for rows in (slice(0, 4), slice(4, 7), slice(7, 7)):
        batch = EmbeddedBatch(whole.query_BD[rows], whole.positive_BK[rows], whole.documents)
        parts.append(contrastive_loss(objective, batch, mine["scale"], num_queries=NUM_QUERIES))
    assert parts[2].loss == 0  # a rank without queries of its own still takes part
    assert parts[2].loss.requires_grad
    expected = naive(objective, names, theirs)
    compare(sum(part.loss for part in parts), expected, mine, theirs)


def test_padding_columns_count_for_nothing() -> None:
    mine, theirs = leaves(), leaves()
    objective = Objective(label_smoothing=0.1, tile_size=4)
    place_N = torch.tensor([i + (i > 4) + (i > 6) for i in range(NUM_DOCUMENTS)])
    padded_ND = torch.full((NUM_DOCUMENTS + 2, D), 3.0).double()  # would win if they counted
    is_real_N = torch.zeros(len(padded_ND), dtype=torch.bool)
    is_real_N[place_N] = True
    columns = Columns(
        padded_ND.index_copy(0, place_N, mine["document"]),
        torch.arange(len(padded_ND))[None, :, None],
        is_real_N[None],
    )
    first = torch.tensor([found[0] for found in POSITIVES])
    batch = EmbeddedBatch(mine["query"], place_N[first][:, None], columns)
    got = contrastive_loss(objective, batch, mine["scale"], num_queries=NUM_QUERIES)
    expected = naive(objective, [], theirs)
    compare(got.loss, expected, mine, theirs)


# Edges ------------------------------------------------------------------------------------------


def infonce(query_BD, document_ND, positive_B, scale, **more):
    batch = whole_batch(query_BD, document_ND, torch.tensor(positive_B))
    objective = Objective(**more)
    return contrastive_loss(objective, batch, torch.tensor([scale]), num_queries=len(query_BD))


@pytest.mark.parametrize("scale", [14.3, 100.0])
def test_autocast_does_not_round_the_similarities(scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    query_BD = F.normalize(torch.randn(64, D, generator=generator), dim=1).requires_grad_()
    document_BD = F.normalize(torch.randn(64, D, generator=generator), dim=1)
    wide = query_BD.detach().double().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = infonce(query_BD, document_BD, list(range(64)), scale).loss
    got.backward()  # as the step does, outside the forward's autocast
    expected = F.cross_entropy(scale * wide @ document_BD.double().T, torch.arange(64))
    expected.backward()
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)
    assert float((query_BD.grad - wide.grad).norm() / wide.grad.norm()) < 1e-5


def test_low_precision_embeddings_are_compared_in_fp32() -> None:
    x = leaves()
    low = [x[name].detach().bfloat16() for name in ("query", "document")]
    got = infonce(*low, [0, 1, 3, 4, 7, 9, 12], 100.0).loss
    logits = 100.0 * low[0].double() @ low[1].double().T
    expected = F.cross_entropy(logits, torch.tensor([0, 1, 3, 4, 7, 9, 12]))
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_largest_scale_does_not_overflow() -> None:
    query_BD = torch.tensor([[1.0, 0.0], [1.0, 0.0]], requires_grad=True)
    loss = infonce(query_BD, torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), [0, 1], 100.0).loss
    loss.backward()
    assert loss.item() == pytest.approx(100.0)  # mean of 200 and 0
    assert query_BD.grad.isfinite().all()


def test_a_tie_is_not_correct() -> None:
    document_ND = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    result = infonce(torch.eye(2), document_ND, [0, 2], 1.0, hardness_alpha=2.0)
    assert result.num_correct == 1


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_a_query_without_negatives_is_certain(smoothing: float) -> None:
    query_BD = torch.ones(1, 2, requires_grad=True)
    result = infonce(query_BD, torch.ones(1, 2), [0], 1.0, label_smoothing=smoothing)
    result.loss.backward()
    assert result.loss == 0
    assert result.num_correct == 1
    assert torch.equal(query_BD.grad, torch.zeros(1, 2))


def test_several_positives_have_no_floor() -> None:
    """Khosla's loss would be log 3 here."""
    document_ND = torch.cat([torch.tensor([[1.0, 0.0]]).repeat(3, 1), torch.tensor([[-1.0, 0.0]])])
    assert infonce(torch.tensor([[1.0, 0.0]]), document_ND, [[0, 1, 2]], 50.0).loss < 1e-30


@pytest.mark.parametrize("name", ["infonce", "siglip"])
def test_what_is_not_a_number_stays_visible(name: str) -> None:
    x = leaves()
    for side in ("query", "document"):
        broken = {k: v.detach().clone() for k, v in x.items()}
        broken[side][8 if side == "document" else 2, 0] = math.nan
        assert math.isnan(ours(Objective(name=name), [], broken))


def test_a_prefix_longer_than_the_embeddings_is_refused() -> None:
    with pytest.raises(ValueError, match=r"matryoshka_dims: got 8, the embeddings have 6"):
        ours(Objective(matryoshka=((8, 1.0),)), [], leaves())
