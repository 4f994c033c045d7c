"""Sums over the rows of a similarity matrix that is never held whole.

A contrastive loss needs little of its B x N logits: for each row a sum over the columns, of
exponentials or of soft pluses. It is taken tile by tile (the online softmax of Milakov and
Gimelshein 2018, section 3), and the backward pass computes each tile again (as FlashAttention
does; Dao et al. 2022, section 3.1). Memory is one tile beside the embeddings and their gradients,
whatever B and N. Nothing is approximated.

Columns may come in blocks that other ranks hold. A block then goes from rank to rank, in the
backward pass together with the gradient that it collects, which is at home again at the end (as
the keys and values of ring attention; Liu et al. 2023, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

# Hands tensors on and returns those that arrive, of the same shapes in the same order.
Rotate = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
# Rows and columns of a tile: one that stays in a processor's cache, one that fills a GPU.
CPU_TILE, GPU_TILE = 1024, 8192


@dataclass(frozen=True, slots=True)
class Rows:
    """What is compared.

    Attributes:
        emb_RD: [R, D] embeddings.
        ids_RP: [R, P] int64, what each row is or is answered by; filled with -1.
        ceiling_R: [R], a column of a higher similarity is no negative; None = no ceiling.
        guide_RG, guide_ceiling_R: the same by a guide's embeddings.
    """

    emb_RD: torch.Tensor
    ids_RP: torch.Tensor
    ceiling_R: torch.Tensor | None = None
    guide_RG: torch.Tensor | None = None
    guide_ceiling_R: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """What rows are compared with: equal blocks, of which a process holds one at a time.

    Attributes:
        emb_CD: [C, D] embeddings of the block that it holds first.
        ids_NCP: [blocks, C, P] int64, of all blocks in the order in which they come, filled with
            -2. A column that shares an id with a row is no negative of it.
        is_real_NC: [blocks, C] bool, False where a column only pads; None where none does.
        guide_CG: [C, G] embeddings of the first block by a guide, or None.
        rotate: brings the next block; None where there is one.
    """

    emb_CD: torch.Tensor
    ids_NCP: torch.Tensor
    is_real_NC: torch.Tensor | None = None
    guide_CG: torch.Tensor | None = None
    rotate: Rotate | None = None

    def ids_of(self, column_RP: torch.Tensor, *, fill: int = -2) -> torch.Tensor:
        """The ids of columns of the first block that have one each, [R, P]; ``fill`` where -1."""
        ids_C = self.ids_NCP[0, :, 0]
        if len(ids_C) == 0:
            return torch.full_like(column_RP, fill)
        return ids_C[column_RP.clamp(min=0)].masked_fill(column_RP < 0, fill)


class RowSums(NamedTuple):
    """Over the logits z of each row's negatives, each [R].

    Attributes:
        reduced_R: log sum exp z (-inf without negatives), or sum softplus z.
        sum_R, count_R: sum z, and the number of negatives; zero where not asked for.
        best_R: max z, -inf without negatives. It and the count have no gradient.
    """

    reduced_R: torch.Tensor
    sum_R: torch.Tensor
    count_R: torch.Tensor
    best_R: torch.Tensor


def row_sums(
    rows: Rows,
    columns: Columns,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    kind: Literal["softmax", "sigmoid"],
    hardness: float = 0.0,
    with_sums: bool = False,
    tile_size: int | None = None,
) -> RowSums:
    """Sum over the negatives of each row; a collective where columns rotate, backward too.

    The logit of a row q and a column d is ``scale <q, d> + hardness sg(<q, d>) + bias``; no
    gradient flows through sg.

    Args:
        rows, columns: of one floating type, which is that of the sums.
        scale: [1]; with hardness it must be positive.
        bias: [1] or None.
        kind: softmax for log-sum-exp, sigmoid for the sum of soft pluses.
        hardness: see above.
        with_sums: whether ``sum_R`` and ``count_R`` are wanted.
        tile_size: rows and columns whose logits are held at once; None = as fits the device.
    """
    if tile_size is None:
        tile_size = CPU_TILE if rows.emb_RD.device.type == "cpu" else GPU_TILE
    tiles = _Tiles(rows, columns, kind == "softmax", hardness, with_sums, tile_size)
    return RowSums(*_RowSums.apply(rows.emb_RD, columns.emb_CD, scale, bias, tiles))


class _RowSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        row_RD: torch.Tensor,
        column_CD: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        tiles: _Tiles,
    ) -> tuple[torch.Tensor, ...]:
        sums = tiles.sums(row_RD, column_CD, scale, bias)
        ctx.save_for_backward(row_RD, column_CD, scale, bias, sums.reduced_R)
        ctx.tiles = tiles
        ctx.mark_non_differentiable(sums.count_R, sums.best_R)
        return tuple(sums)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, reduced_R: torch.Tensor, sum_R: torch.Tensor, _count: Any, _best: Any
    ) -> tuple[Any, ...]:
        gradients = ctx.tiles.gradients(*ctx.saved_tensors, reduced_R, sum_R)
        needed = zip(gradients, ctx.needs_input_grad, strict=False)
        return *(gradient if wanted else None for gradient, wanted in needed), None


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The loops over tiles, forward and backward."""

    rows: Rows
    columns: Columns
    softmax: bool
    hardness: float
    with_sums: bool
    tile_size: int

    def sums(
        self,
        row_RD: torch.Tensor,
        column_CD: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> RowSums:
        zero_R = row_RD.new_zeros(len(row_RD))
        lowest_R = torch.full_like(zero_R, -torch.inf)
        start_R = lowest_R if self.softmax else zero_R
        sums = RowSums(start_R.clone(), zero_R.clone(), zero_R.clone(), lowest_R)
        for number, block_CD, guide_CG in self._blocks([column_CD]):
            for rows, _, logits in self._logits(number, row_RD, block_CD, guide_CG, scale, bias):
                best = logits.amax(1)
                sums.best_R[rows] = torch.maximum(sums.best_R[rows], best)
                if self.with_sums:
                    counts = logits > -torch.inf
                    sums.count_R[rows] += counts.sum(1)
                    sums.sum_R[rows] += logits.where(counts, 0.0).sum(1)
                if self.softmax:
                    base = best.masked_fill(best == -torch.inf, 0.0)
                    part = logits.sub_(base[:, None]).exp_().sum(1).log_().add_(base)
                    sums.reduced_R[rows] = torch.logaddexp(sums.reduced_R[rows], part)
                else:
                    sums.reduced_R[rows] -= F.logsigmoid(logits.neg_()).sum(1)
        return sums

    def gradients(
        self,
        row_RD: torch.Tensor,
        column_CD: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        total_R: torch.Tensor,
        by_reduced_R: torch.Tensor,
        by_sum_R: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """By rows, columns, scale and bias, from the sums and the gradients by them."""
        row_gradient = torch.zeros_like(row_RD)
        bias_gradient = None if bias is None else torch.zeros_like(bias)
        # A row without negatives has no finite logit either: any base will do.
        base_R = total_R.masked_fill(total_R == -torch.inf, 0.0)
        riding = [column_CD, torch.zeros_like(column_CD)]
        for number, block_CD, guide_CG in self._blocks(riding):
            for rows, columns, logits in self._logits(
                number, row_RD, block_CD, guide_CG, scale, bias
            ):
                counts = logits > -torch.inf if self.with_sums else None
                if self.softmax:
                    logits.sub_(base_R[rows, None]).exp_()
                else:
                    logits.sigmoid_()
                logits.mul_(by_reduced_R[rows, None])
                if counts is not None:
                    logits.add_(by_sum_R[rows, None] * counts)
                row_gradient[rows].addmm_(logits, block_CD[columns])
                riding[1][columns].addmm_(logits.T, row_RD[rows])
                if bias_gradient is not None:
                    bias_gradient += logits.sum()
        scale_gradient = torch.linalg.vecdot(row_gradient, row_RD).sum().expand_as(scale)
        return row_gradient.mul_(scale), riding[1].mul_(scale), scale_gradient, bias_gradient

    def _blocks(
        self, riding: list[torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """Yield each block: its number, embeddings (the first of ``riding``), guide's embeddings.

        ``riding`` always holds what lies here; what comes after the embeddings ends at home.
        """
        count, rotate = len(self.columns.ids_NCP), self.columns.rotate
        guide = [] if self.columns.guide_CG is None else [self.columns.guide_CG]
        for number in range(count):
            yield number, riding[0], guide[0] if guide else None
            if rotate is not None and number + 1 < count:
                arrived = rotate([*riding, *guide])
                riding[:], guide = arrived[: len(riding)], arrived[len(riding) :]
        if rotate is not None and len(riding) > 1:
            riding[1:] = rotate(riding[1:])

    def _logits(
        self,
        number: int,
        row_RD: torch.Tensor,
        block_CD: torch.Tensor,
        guide_CG: torch.Tensor | None,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Yield each tile of a block: its rows, its columns, its logits (-inf where no negative).

        The logits lie in one buffer, for the caller to work in.
        """
        factor, size = scale + self.hardness, self.tile_size
        ends = len(row_RD), len(block_CD)
        buffer = row_RD.new_empty(min(size, ends[0]) * min(size, ends[1]))
        tiles = [[slice(i, min(i + size, end)) for i in range(0, end, size)] for end in ends]
        for rows in tiles[0]:
            scaled_RD = row_RD[rows] * factor
            for columns in tiles[1]:
                shape = len(scaled_RD), columns.stop - columns.start
                out = buffer[: shape[0] * shape[1]].view(shape)
                logits = torch.mm(scaled_RD, block_CD[columns].T, out=out)
                if bias is not None:
                    logits += bias
                for mask in self._masks(number, rows, columns, logits, factor, bias, guide_CG):
                    logits.masked_fill_(mask, -torch.inf)
                yield rows, columns, logits

    def _masks(
        self,
        number: int,
        rows: slice,
        columns: slice,
        logits: torch.Tensor,
        factor: torch.Tensor,
        bias: torch.Tensor | None,
        guide_CG: torch.Tensor | None,
    ) -> Iterator[torch.Tensor]:
        """Yield masks of what is no negative; the first looks at ``logits``."""
        mine, theirs = self.rows, self.columns
        if mine.ceiling_R is not None:
            ceiling_R = mine.ceiling_R[rows] * factor
            yield logits > (ceiling_R if bias is None else ceiling_R + bias)[:, None]
        if guide_CG is not None:
            assert mine.guide_RG is not None
            assert mine.guide_ceiling_R is not None
            similarity = mine.guide_RG[rows] @ guide_CG[columns].T
            yield similarity > mine.guide_ceiling_R[rows, None]
        for own_R in mine.ids_RP[rows].unbind(1):
            for other_C in theirs.ids_NCP[number, columns].unbind(1):
                yield own_R[:, None] == other_C
        if theirs.is_real_NC is not None:
            yield ~theirs.is_real_NC[number, columns]
