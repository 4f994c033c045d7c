"""InfoNCE as a rank's partial sum, against the formula written out in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from pixelrag.losses.infonce import info_nce

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _batch(num_queries: int = 5, num_documents: int = 9, seed: int = 0) -> Tensors:
    """Normalised float64 queries and documents, and each query's positive."""
    generator = torch.Generator().manual_seed(seed)
    query_BD = torch.randn(num_queries, 6, generator=generator, dtype=torch.float64)
    document_ND = torch.randn(num_documents, 6, generator=generator, dtype=torch.float64)
    positive_B = torch.randperm(num_documents, generator=generator)[:num_queries]
    return F.normalize(query_BD, dim=-1), F.normalize(document_ND, dim=-1), positive_B


def _written_out(query_BD, document_ND, positive_B, scale) -> torch.Tensor:
    total = 0.0
    for query_D, positive in zip(query_BD, positive_B.tolist(), strict=True):
        terms = [torch.exp(scale * (query_D @ document_D)) for document_D in document_ND]
        total = total - torch.log(terms[positive] / sum(terms))
    return (total / len(query_BD)).sum()


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())


def test_loss_and_gradients_follow_the_formula() -> None:
    query_BD, document_ND, positive_B = _batch()
    leaves = [query_BD, document_ND, torch.tensor([14.0], dtype=torch.float64)]
    ours = [leaf.clone().requires_grad_() for leaf in leaves]
    theirs = [leaf.clone().requires_grad_() for leaf in leaves]
    loss = info_nce(ours[0], ours[1], positive_B, ours[2], num_queries=5).loss
    expected = _written_out(theirs[0], theirs[1], positive_B, theirs[2])
    loss.backward()
    expected.backward()
    assert loss.dtype == torch.float64
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for got, want in zip(ours, theirs, strict=True):
        assert _relative(got.grad, want.grad) < 1e-12
        assert float(got.grad.norm() / want.grad.norm()) == pytest.approx(1.0, abs=1e-12)


def test_partial_sums_of_ranks_add_up() -> None:
    query_BD, document_ND, positive_B = _batch(num_queries=7)
    scale = torch.tensor([20.0], dtype=torch.float64)
    whole = info_nce(query_BD, document_ND, positive_B, scale, num_queries=7)
    parts = [
        info_nce(query_BD[rows], document_ND, positive_B[rows], scale, num_queries=7)
        for rows in (slice(0, 4), slice(4, 7), slice(7, 7))
    ]
    assert sum(part.loss for part in parts).item() == pytest.approx(whole.loss.item(), rel=1e-12)
    assert sum(part.num_correct for part in parts) == whole.num_correct
    assert parts[2].loss == 0  # a rank without queries of its own still takes part


def test_a_rank_without_queries_has_zero_gradients() -> None:
    _, document_ND, positive_B = _batch()
    document_ND.requires_grad_()
    query_0D = torch.zeros(0, 6, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor([20.0], dtype=torch.float64, requires_grad=True)
    info_nce(query_0D, document_ND, positive_B[:0], scale, num_queries=5).loss.backward()
    assert torch.equal(document_ND.grad, torch.zeros_like(document_ND))
    assert torch.equal(scale.grad, torch.zeros_like(scale))


def test_padding_rows_count_for_nothing() -> None:
    query_BD, document_ND, positive_B = _batch()
    scale = torch.tensor([14.0], dtype=torch.float64)
    place_N = torch.tensor([0, 1, 2, 3, 4, 6, 7, 9, 10])  # rows 5 and 8 pad
    padded_ND = torch.full((11, 6), 3.0, dtype=torch.float64)  # would win if they counted
    padded_ND[place_N] = document_ND
    padded_ND.requires_grad_()
    is_document_N = torch.zeros(11, dtype=torch.bool)
    is_document_N[place_N] = True
    expected = info_nce(query_BD, document_ND, positive_B, scale, num_queries=5)
    got = info_nce(
        query_BD,
        padded_ND,
        place_N[positive_B],
        scale,
        num_queries=5,
        is_document_N=is_document_N,
    )
    got.loss.backward()
    assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-12)
    assert got.num_correct == expected.num_correct
    assert torch.equal(padded_ND.grad[~is_document_N], torch.zeros(2, 6, dtype=torch.float64))
    assert padded_ND.grad.isfinite().all()


@pytest.mark.parametrize("scale", [14.3, 100.0])
def test_autocast_does_not_round_the_similarities(scale: float) -> None:
    query_BD, document_ND, positive_B = _batch(num_queries=64, num_documents=64)
    exact, low = [], []
    for found, dtype, autocast in ((exact, torch.float64, False), (low, torch.float32, True)):
        leaf = query_BD.to(dtype, copy=True).requires_grad_()
        factor = torch.tensor([scale], dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = info_nce(leaf, document_ND.to(dtype), positive_B, factor, num_queries=64)
        result.loss.backward()  # as the step does, outside the forward's autocast
        found += [result.loss, leaf.grad]
    assert low[0].dtype == torch.float32
    assert _relative(low[0], exact[0]) < 1e-5
    assert _relative(low[1], exact[1]) < 1e-5


def test_low_precision_embeddings_are_compared_in_fp32() -> None:
    query_BD, document_ND, positive_B = _batch(num_queries=32, num_documents=64)
    low = [tensor.bfloat16() for tensor in (query_BD, document_ND)]
    scale = torch.tensor([100.0])
    got = info_nce(*low, positive_B, scale, num_queries=32).loss
    wide = [tensor.double() for tensor in low]
    expected = info_nce(*wide, positive_B, scale.double(), num_queries=32).loss
    assert got.dtype == torch.float32
    assert _relative(got, expected) < 1e-5


def test_the_largest_scale_does_not_overflow() -> None:
    query_BD = torch.tensor([[1.0, 0.0], [1.0, 0.0]], requires_grad=True)
    document_ND = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    loss = info_nce(
        query_BD, document_ND, torch.tensor([0, 1]), torch.tensor([100.0]), num_queries=2
    ).loss
    loss.backward()
    assert loss.item() == pytest.approx(100.0)  # mean of 200 and 0
    assert query_BD.grad.isfinite().all()


def test_a_tie_is_not_correct() -> None:
    document_ND = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    query_BD = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    result = info_nce(query_BD, document_ND, torch.tensor([0, 2]), torch.ones(1), num_queries=2)
    assert result.num_correct == 1


def test_one_document_alone_is_certain() -> None:
    result = info_nce(
        torch.ones(1, 2), torch.ones(1, 2), torch.tensor([0]), torch.ones(1), num_queries=1
    )
    assert result.loss == 0
    assert result.num_correct == 1


def test_what_is_not_a_number_stays_visible() -> None:
    query_BD, document_ND, positive_B = _batch()
    query_BD[2, 0] = math.nan
    result = info_nce(
        query_BD, document_ND, positive_B, torch.ones(1, dtype=torch.float64), num_queries=5
    )
    assert math.isnan(result.loss)
