"""Pooling against a plain loop, on both padding sides, in every precision."""

import pytest
import torch

from pixelrag.models.pooling import POOLING_MODES, embeddings, pool

LENGTHS = [1, 5, 3, 7]


def _padded(side: str) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """States with NaN at padding, mask, and the real states of each row."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in LENGTHS]
    hidden = torch.full((len(rows), max(LENGTHS), 6), float("nan"), dtype=torch.float64)
    mask = torch.zeros(len(rows), max(LENGTHS), dtype=torch.int64)
    for index, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(max(LENGTHS) - len(row), None)
        hidden[index, place] = row
        mask[index, place] = 1
    return hidden, mask, rows


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mode", POOLING_MODES)
def test_pools_real_tokens_only(side: str, mode: str) -> None:
    hidden, mask, rows = _padded(side)
    naive = {"mean": lambda r: r.mean(0), "cls": lambda r: r[0], "last": lambda r: r[-1]}[mode]
    expected = torch.stack([naive(row) for row in rows])
    torch.testing.assert_close(pool(hidden, mask, mode), expected, rtol=1e-14, atol=0)


def test_unknown_mode_is_refused() -> None:
    hidden, mask, _ = _padded("right")
    with pytest.raises(ValueError, match=r"'max'.*mean, cls, last"):
        pool(hidden, mask, "max")


@pytest.mark.parametrize("mode", POOLING_MODES)
def test_unit_norm_and_gradient_skip_padding(mode: str) -> None:
    hidden, mask, _ = _padded("left")
    hidden.requires_grad_()
    emb = embeddings(hidden, mask, mode)
    torch.testing.assert_close(emb.norm(dim=1), torch.ones(4, dtype=torch.float64))
    (emb * torch.arange(6)).sum().backward()
    assert torch.isfinite(hidden.grad).all()
    assert (hidden.grad[mask == 0] == 0).all()
    assert (hidden.grad != 0).any()


def test_bf16_states_are_summed_in_float32_under_autocast() -> None:
    torch.manual_seed(0)
    hidden = (1 + 0.1 * torch.randn(2, 4096, 8)).bfloat16()
    mask = torch.ones(2, 4096, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        emb = embeddings(hidden, mask, "mean")
    exact = hidden.double().mean(1)
    exact = exact / exact.norm(dim=1, keepdim=True)
    assert emb.dtype == torch.float32
    assert (emb - exact).norm() / exact.norm() < 1e-6


def test_tiny_vectors_are_not_shrunk_by_an_epsilon() -> None:
    hidden = torch.full((1, 1, 4), 1e-15)
    emb = embeddings(hidden, torch.ones(1, 1, dtype=torch.int64), "last")
    torch.testing.assert_close(emb, torch.full((1, 4), 0.5))
