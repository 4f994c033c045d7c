"""Cuts a batch of model inputs into chunks of rows, by their number or by their size.

Row-aligned tensors are sliced. ``pixel_values`` is flat, all patches of all images one after the
other, and is cut where ``image_grid_thw`` says that a row's images end. Padding that no row of a
chunk needs is trimmed on whichever side it stands, so a chunk of short rows costs what its own
longest row costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from pixelrag.errors import DataError

_FLAT = ("pixel_values", "image_grid_thw")


def split_batch(
    inputs: Mapping[str, torch.Tensor], chunk_size: int
) -> list[dict[str, torch.Tensor]]:
    """Split model inputs into chunks of at most ``chunk_size`` rows.

    Args:
        inputs: ``input_ids`` and ``attention_mask`` [B, L]; optionally ``pixel_values``
            [patches, width], ``image_grid_thw`` [images, 3] and ``num_images`` [B]. Any other
            tensor must be aligned with the rows.
        chunk_size: rows per chunk, at least 1; the last chunk may be smaller.

    Returns:
        Chunks with the same keys; a chunk without images has no ``pixel_values``.

    Raises:
        DataError: the image tensors do not add up.
        ValueError: ``chunk_size`` is below 1.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size}, expected at least 1")
    num_rows = len(inputs["attention_mask"])
    return _cut(inputs, [*range(0, num_rows, chunk_size), num_rows], _images_of(inputs))


def split_by_tokens(
    inputs: Mapping[str, torch.Tensor], chunk_tokens: int
) -> list[dict[str, torch.Tensor]]:
    """Split model inputs, in their order, into chunks of at most ``chunk_tokens``.

    A chunk counts its rows times the tokens of its longest, padding included, and one for every
    patch of its images. A row that is larger by itself is a chunk by itself.

    Args:
        inputs: as of `split_batch`.
        chunk_tokens: at least 1.

    Raises:
        DataError: the image tensors do not add up.
        ValueError: ``chunk_tokens`` is below 1.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: got {chunk_tokens}, expected at least 1")
    mask_BL = inputs["attention_mask"].bool()
    positions_L = torch.arange(mask_BL.shape[1], device=mask_BL.device)
    # Columns that a row needs, on whichever side its padding stands.
    first_B = positions_L.where(mask_BL, mask_BL.shape[1]).amin(1).tolist()
    last_B = positions_L.where(mask_BL, -1).amax(1).tolist()
    images = _images_of(inputs)
    bounds, begin, end, patches = [0], first_B[0], -1, 0
    for row in range(len(mask_BL)):
        own = 0 if images is None else images.num_patches(row)
        begin, end, patches = min(begin, first_B[row]), max(end, last_B[row]), patches + own
        rows = row + 1 - bounds[-1]
        if rows > 1 and rows * (end + 1 - begin) + patches > chunk_tokens:
            bounds.append(row)
            begin, end, patches = first_B[row], last_B[row], own
    return _cut(inputs, [*bounds, len(mask_BL)], images)


def _images_of(inputs: Mapping[str, torch.Tensor]) -> _ImageRows | None:
    return _ImageRows(inputs) if inputs.get("pixel_values") is not None else None


def _cut(
    inputs: Mapping[str, torch.Tensor], bounds: Sequence[int], images: _ImageRows | None
) -> list[dict[str, torch.Tensor]]:
    chunks = []
    for start, stop in pairwise(bounds):
        chunk = {
            key: value[start:stop]
            for key, value in inputs.items()
            if key not in _FLAT and value is not None
        }
        chunk = _trim_padding(chunk)
        if images is not None:
            chunk |= images.slice(start, stop)
        chunks.append(chunk)
    return chunks


class _ImageRows:
    """Offsets of each row's images and patches in the flat tensors."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self._pixels = inputs["pixel_values"]
        self._grid = inputs["image_grid_thw"]
        num_rows = len(inputs["attention_mask"])
        per_row = inputs.get("num_images")
        if per_row is None:
            per_row = torch.ones(num_rows, dtype=torch.int64)
        patches = self._grid.prod(dim=1)
        if int(per_row.sum()) != len(self._grid) or int(patches.sum()) != len(self._pixels):
            raise DataError(
                f"image tensors do not add up: num_images sums to {int(per_row.sum())} for "
                f"{len(self._grid)} grids, which ask for {int(patches.sum())} patches of "
                f"{len(self._pixels)}; a batch with more or fewer than one image a row needs "
                "num_images"
            )
        zero = torch.zeros(1, dtype=torch.int64)
        self._image_ends = torch.cat([zero, per_row.cpu().cumsum(0)])
        self._patch_ends = torch.cat([zero, patches.cpu().cumsum(0)])

    def num_patches(self, row: int) -> int:
        first, last = int(self._image_ends[row]), int(self._image_ends[row + 1])
        return int(self._patch_ends[last] - self._patch_ends[first])

    def slice(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        first, last = int(self._image_ends[start]), int(self._image_ends[stop])
        if first == last:
            return {}
        patches = slice(int(self._patch_ends[first]), int(self._patch_ends[last]))
        return {"pixel_values": self._pixels[patches], "image_grid_thw": self._grid[first:last]}


def _trim_padding(chunk: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mask_BL = chunk["attention_mask"]
    used_L = mask_BL.any(dim=0).nonzero()
    if len(used_L) == 0:
        return chunk
    columns = slice(int(used_L[0]), int(used_L[-1]) + 1)
    if columns == slice(0, mask_BL.shape[1]):
        return chunk
    return {
        key: value[:, columns] if value.shape[:2] == mask_BL.shape else value
        for key, value in chunk.items()
    }
