"""Rows of a plan as tensors.

A row is laid out from true lengths alone. No token's identity decides what attends to what, or what
is padding: tokenizers use one token as padding, as separator and as the end of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.utils.data import Dataset

from pixelrag.data.pack_plan import EpochRows, PackPlan
from pixelrag.data.packed_sampler import PackedSampler

IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A micro-batch of B rows, L tokens wide.

    Attributes:
        input_ids: [B, L] int64.
        labels: `input_ids` where a token is learnt from, elsewhere -100; [B, L] int64. Not
            shifted: the label at `t` is what the model is to predict at `t - 1`. A row's first
            label is -100, so shifting loses none.
        position_ids: [B, L] int64. Isolated: each sample, and the padding, counts from 0;
            concatenated: the row counts.
        document_ids: number of each token's sample in its row, -1 for padding; [B, L] int64. A
            separator belongs to the sample before it. Concatenated: 0, as a row is one document.
        attention_mask: what is no padding; [B, L] bool.
        cu_seqlens: where documents, and stretches of padding, start in the flattened
            [B * L] tokens, and their end; [D + 1] int32.
        max_seqlen: the longest of them, in tokens.
        sample_ids: where the samples of each row come from, in order.
        num_rows: B, or 0 where one row of padding only fills the rank's place.
        num_supervised: labels that are not -100.
        num_tokens: tokens that are no padding.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor
    attention_mask: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    sample_ids: tuple[tuple[str, ...], ...]
    num_rows: int
    num_supervised: int
    num_tokens: int

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedBatch:
        """The same batch with its tensors on a device."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """The same batch in pinned memory; `DataLoader` calls this."""
        return self._mapped(torch.Tensor.pin_memory)

    def _mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PackedBatch:
        tensors: dict[str, Any] = {
            field.name: function(value)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **tensors)


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One rank's part of an optimizer step.

    Attributes:
        position: number of the global batch, over all epochs.
        micro_batches: as many on every rank.
        num_supervised: tokens that are learnt from in the global batch, over all ranks and
            micro-batches: what every rank divides its sum of losses by.
        num_tokens: tokens of the global batch, padding not counted.
    """

    position: int
    micro_batches: list[PackedBatch]
    num_supervised: int
    num_tokens: int

    def pin_memory(self) -> PackedStep:
        """The same step in pinned memory; `DataLoader` calls this."""
        return replace(self, micro_batches=[batch.pin_memory() for batch in self.micro_batches])


def count_supervised(labels: torch.Tensor) -> int:
    """Targets among unshifted labels [B, L]: those that are not -100, a row's first left out."""
    return int((labels[:, 1:] != IGNORE_INDEX).sum())


class PackedCollator:
    """Makes a micro-batch of rows.

    Args:
        plan: the rows.
        pad_id: token that fills rows up; any will do.
        fixed_width: make every batch as wide as a row may be, for compiled models; otherwise it is
            as wide as its longest row.
    """

    def __init__(self, plan: PackPlan, pad_id: int, *, fixed_width: bool = False) -> None:
        self._plan = plan
        self._pad_id = pad_id
        self._fixed_width = fixed_width

    def __call__(self, epoch: int, rows: Sequence[int]) -> PackedBatch:
        """The batch of some rows of an epoch; of none, a row of padding that teaches nothing."""
        of_epoch = self._plan.epoch(epoch)
        # Two tokens are the least that a shifted loss can do with.
        longest = max((int(of_epoch.tokens[row]) for row in rows), default=2)
        width = self._plan.settings.row_length if self._fixed_width else max(2, longest)
        batch = _Rows(self._plan, max(1, len(rows)), width, self._pad_id)
        for place, row in enumerate(rows):
            batch.fill(place, of_epoch, row)
        return batch.finish(len(rows))


class _Rows:
    def __init__(self, plan: PackPlan, num_rows: int, width: int, pad_id: int) -> None:
        shape = num_rows, width
        self._plan = plan
        self._width = width
        self._input_ids = torch.full(shape, pad_id, dtype=torch.int64)
        self._labels = torch.full(shape, IGNORE_INDEX, dtype=torch.int64)
        self._position_ids = torch.arange(width).repeat(num_rows, 1)
        self._document_ids = torch.full(shape, -1, dtype=torch.int64)
        self._sample_ids: list[tuple[str, ...]] = [() for _ in range(num_rows)]
        self._num_tokens = [0] * num_rows
        self._starts: list[list[int]] = [[0] for _ in range(num_rows)]

    def fill(self, place: int, of_epoch: EpochRows, row: int) -> None:
        """Lay out a row of an epoch."""
        settings, pieces, store = self._plan.settings, self._plan.pieces, self._plan.store
        isolated = settings.attention == "isolated"
        separators = [settings.separator_id] if settings.separator else []
        members = of_epoch.row(row).tolist()
        at, names, starts = 0, [], []
        for document, piece in enumerate(members):
            sample, first = int(pieces.samples[piece]), int(pieces.starts[piece])
            length = int(pieces.lengths[piece])
            tokens = store[sample]
            ids = torch.tensor(tokens.ids[first : first + length], dtype=torch.int64)
            learnt = torch.tensor(tokens.supervised[first : first + length])
            # A sample's first token follows nothing of its own; a later piece's was learnt already.
            opens = settings.learns_openings and document > 0 and first == 0
            learnt[0] &= opens
            stop = at + length
            self._input_ids[place, at:stop] = ids
            self._labels[place, at:stop] = torch.where(learnt, ids, IGNORE_INDEX)
            if document + 1 < len(members):
                end = stop + len(separators)
                self._input_ids[place, stop:end] = torch.tensor(separators, dtype=torch.int64)
                stop = end
            self._document_ids[place, at:stop] = document if isolated else 0
            if isolated:
                self._position_ids[place, at:stop] = torch.arange(stop - at)
            starts.append(at)
            names.append(store.sample_id(sample))
            at = stop
        if isolated:
            self._position_ids[place, at:] = torch.arange(self._width - at)
        self._starts[place] = starts if isolated else [0]
        if at < self._width:
            self._starts[place].append(at)
        self._num_tokens[place] = at
        self._sample_ids[place] = tuple(names)

    def finish(self, num_rows: int) -> PackedBatch:
        """The batch as it stands."""
        starts = [place * self._width + at for place, row in enumerate(self._starts) for at in row]
        cu_seqlens = torch.tensor([*starts, self._input_ids.numel()], dtype=torch.int32)
        used = torch.tensor(self._num_tokens)
        return PackedBatch(
            self._input_ids,
            self._labels,
            self._position_ids,
            self._document_ids,
            torch.arange(self._width) < used[:, None],
            cu_seqlens,
            int(cu_seqlens.diff().max()),
            tuple(self._sample_ids),
            num_rows,
            count_supervised(self._labels),
            int(used.sum()),
        )


class PackedSteps(Dataset[PackedStep]):
    """Maps the number of a global batch to this rank's part of it, as tensors.

    It keeps no state, so it serves in this process as well as in any number of loader workers,
    and goes on anywhere.

    Args:
        sampler: names the rows.
        collator: makes tensors of them.
    """

    def __init__(self, sampler: PackedSampler, collator: PackedCollator) -> None:
        self._sampler = sampler
        self._collator = collator

    def __getitem__(self, position: int) -> PackedStep:
        step = self._sampler.step(position)
        return PackedStep(
            position,
            [self._collator(step.epoch, rows) for rows in step.micro_batches],
            step.num_supervised,
            step.num_tokens,
        )
