"""A container of two towers of which a forward uses one, both or none."""

from __future__ import annotations

import torch
from torch import nn

SIZE = 6


class Towers(nn.Module):
    """``forward`` names the towers to use; their outputs add up, times one shared scale."""

    def __init__(self, *, second_size: int = SIZE) -> None:
        super().__init__()
        self.left = nn.Linear(SIZE, SIZE)
        self.right = nn.Linear(SIZE, second_size)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, role: str, *, x_BS: torch.Tensor, use: str) -> torch.Tensor:
        """The sum of the squared outputs of the towers in ``use`` (``left right``), a scalar."""
        total = self.scale.sum() * x_BS.sum()
        for name in use.split():
            total = total + (getattr(self, name)(x_BS) * self.scale).square().sum()
        return total


def make_towers(*, second_size: int = SIZE) -> Towers:
    """Fixed weights."""
    torch.manual_seed(5)
    return Towers(second_size=second_size)


def double(module: Towers) -> Towers:
    """The same module in float64, for a reference."""
    return module.double()


def make_input(rank: int, index: int = 0) -> torch.Tensor:
    """Rows that differ by rank and index."""
    generator = torch.Generator().manual_seed(100 * index + rank)
    return torch.randn(3, SIZE, generator=generator)
