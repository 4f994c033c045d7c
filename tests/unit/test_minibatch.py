"""Chunks put together again are the batch; images go with the rows that they belong to."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pixelrag.errors import DataError
from pixelrag.gradcache import split_batch
from pixelrag.gradcache.minibatch import split_by_tokens

Batch = dict[str, torch.Tensor]


def _batch(lengths: list[int], num_images: list[int], *, left: bool = False) -> Batch:
    """A padded batch in which every token, patch and grid has a value of its own."""
    width = max(lengths)
    mask_BL = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        columns = slice(width - length, width) if left else slice(0, length)
        mask_BL[row, columns] = 1
    ids_BL = torch.arange(mask_BL.numel()).reshape(mask_BL.shape) * mask_BL
    batch = {"input_ids": ids_BL, "attention_mask": mask_BL}
    batch["num_images"] = torch.tensor(num_images)
    total = sum(num_images)
    if total:
        grid = torch.tensor([[1, 1 + i % 3, 2] for i in range(total)])
        patches = int(grid.prod(1).sum())
        batch["image_grid_thw"] = grid
        batch["pixel_values"] = torch.arange(patches * 2, dtype=torch.float32).reshape(patches, 2)
    return batch


def _images_of_rows(batch: Batch) -> list[list[list[float]]]:
    """For each row the pixel values of each of its images, found independently."""
    images, patch = [], 0
    for grid in batch.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64)).tolist():
        size = grid[0] * grid[1] * grid[2]
        images.append(batch["pixel_values"][patch : patch + size].flatten().tolist())
        patch += size
    rows = []
    for count in batch["num_images"].tolist():
        rows.append(images[:count])
        images = images[count:]
    assert not images
    return rows


def _tokens_of_rows(batch: Batch) -> list[list[int]]:
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [ids[mask == 1].tolist() for ids, mask in rows]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=9),
    chunk_size=st.integers(1, 10),
    left=st.booleans(),
)
def test_chunks_hold_every_row_with_its_tokens_and_images(rows, chunk_size, left) -> None:
    batch = _batch([r[0] for r in rows], [r[1] for r in rows], left=left)
    chunks = split_batch(batch, chunk_size)
    sizes = [len(chunk["input_ids"]) for chunk in chunks]
    assert sizes[:-1] == [chunk_size] * (len(chunks) - 1)
    assert 1 <= sizes[-1] <= chunk_size
    for of_rows in (_tokens_of_rows, _images_of_rows):
        assert [row for chunk in chunks for row in of_rows(chunk)] == of_rows(batch)
    for chunk in chunks:
        has_images = int(chunk["num_images"].sum()) > 0
        assert ("pixel_values" in chunk) == ("image_grid_thw" in chunk) == has_images


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=9),
    chunk_tokens=st.integers(1, 40),
    left=st.booleans(),
)
def test_chunks_by_tokens_are_as_full_as_their_budget_allows(rows, chunk_tokens, left) -> None:
    batch = _batch([r[0] for r in rows], [r[1] for r in rows], left=left)
    chunks = split_by_tokens(batch, chunk_tokens)
    for of_rows in (_tokens_of_rows, _images_of_rows):
        assert [row for chunk in chunks for row in of_rows(chunk)] == of_rows(batch)
    patches = [sum(len(image) // 2 for image in images) for images in _images_of_rows(batch)]

    def cost(start: int, stop: int) -> int:
        width = max(length for length, _ in rows[start:stop])
        return (stop - start) * width + sum(patches[start:stop])

    stop = 0
    for chunk in chunks:
        start, stop = stop, stop + len(chunk["input_ids"])
        assert cost(start, stop) <= chunk_tokens or stop == start + 1
        assert stop == len(rows) or cost(start, stop + 1) > chunk_tokens


@pytest.mark.parametrize("left", [False, True])
def test_padding_that_no_row_of_the_chunk_needs_is_cut(left: bool) -> None:
    batch = _batch([2, 3, 6], [0, 0, 0], left=left) | {"token_type_ids": torch.ones(3, 6)}
    first, second = split_batch(batch, 2)
    assert first["input_ids"].shape == first["token_type_ids"].shape == (2, 3)
    assert second["input_ids"].shape == (1, 6)


def test_tensors_of_rows_are_not_cut_to_the_tokens() -> None:
    batch = _batch([1, 1, 4], [0, 0, 0]) | {"per_row": torch.arange(3.0)}
    first, second = split_batch(batch, 2)
    assert first["per_row"].tolist() == [0.0, 1.0]
    assert second["per_row"].tolist() == [2.0]


def test_a_chunk_at_least_as_large_as_the_batch_is_the_batch() -> None:
    batch = _batch([2, 3], [1, 2])
    (chunk,) = split_batch(batch, 1000)
    assert chunk.keys() == batch.keys()
    assert all(torch.equal(chunk[key], batch[key]) for key in batch)


def test_without_counts_every_row_has_one_image() -> None:
    batch = _batch([2, 3, 2], [1, 1, 1])
    expected = [chunk["pixel_values"] for chunk in split_batch(batch, 2)]
    del batch["num_images"]
    got = [chunk["pixel_values"] for chunk in split_batch(batch, 2)]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("fault", ["images", "patches"])
def test_images_that_do_not_add_up_are_an_error(fault: str) -> None:
    batch = _batch([2, 2], [1, 1])
    if fault == "images":
        batch["num_images"] = torch.tensor([1, 2])
    else:
        batch["pixel_values"] = batch["pixel_values"][:-1]
    with pytest.raises(DataError, match="image tensors do not add up"):
        split_batch(batch, 1)


@pytest.mark.parametrize("chunk_size", [0, -3])
def test_a_chunk_size_below_one_is_an_error(chunk_size: int) -> None:
    with pytest.raises(ValueError, match=rf"chunk_size: got {chunk_size}, expected at least 1"):
        split_batch(_batch([2], [0]), chunk_size)
    with pytest.raises(ValueError, match=rf"chunk_tokens: got {chunk_size}, expected at least 1"):
        split_by_tokens(_batch([2], [0]), chunk_size)
