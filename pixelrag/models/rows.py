"""A batch of token rows as a causal language model reads it, and where its documents lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of tokens, each one document, or several behind each other.

    No mask goes with them: padding stands at a row's end, where causal attention hides it from
    every real token. transformers isolates packed documents by their positions only if it gets
    neither a mask nor a cache.

    Attributes:
        input_ids_BT: int64.
        position_ids_BT: int64; each document counts from 0, or the whole row does.
        bounds: where documents begin and end in the flattened rows, 0 to B * T; a bound stands
            between any two rows.
        cu_seqlens: the bounds as int32, beside the tokens.
        max_length: tokens of the longest document.
    """

    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    bounds: tuple[int, ...]
    cu_seqlens: torch.Tensor
    max_length: int

    @classmethod
    def of(
        cls,
        input_ids_BT: torch.Tensor,
        position_ids_BT: torch.Tensor,
        lengths_B: list[int] | None = None,
    ) -> Rows:
        """Find the documents: one begins wherever a position is not its predecessor's plus one.

        Args:
            input_ids_BT: int64 on the CPU.
            position_ids_BT: int64 on the CPU.
            lengths_B: real tokens of each row; what follows them counts as one document. None =
                all are real.
        """
        num_rows, length = input_ids_BT.shape
        first_BT = torch.ones_like(position_ids_BT, dtype=torch.bool)
        first_BT[:, 1:] = position_ids_BT.diff(dim=1) != 1
        for row, real in enumerate(lengths_B or []):
            first_BT[row, real:] = False
            if real < length:
                first_BT[row, real] = True
        starts = first_BT.flatten().nonzero().flatten().tolist()
        bounds = (*starts, num_rows * length)
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        longest = int(cu_seqlens.diff().max()) if num_rows * length else 0
        return cls(input_ids_BT, position_ids_BT, bounds, cu_seqlens, longest)

    @classmethod
    def single(cls, input_ids_BT: torch.Tensor) -> Rows:
        """Rows of one document each (padding, if any, at the end)."""
        positions_BT = torch.arange(input_ids_BT.shape[1]).expand(input_ids_BT.shape)
        return cls.of(input_ids_BT, positions_BT)

    def to(self, device: torch.device) -> Rows:
        """The same on another device."""
        return Rows(
            self.input_ids_BT.to(device, non_blocking=True),
            self.position_ids_BT.to(device, non_blocking=True),
            self.bounds,
            self.cu_seqlens.to(device, non_blocking=True),
            self.max_length,
        )
