"""What ranks agree on before a step, with the exchange between them stood in for."""

from __future__ import annotations

import pytest
import torch

from pixelrag.errors import DataError
from pixelrag.gradcache import schedule
from pixelrag.gradcache.schedule import Side, agree_on_schedule, rows_of


def _chunk(rows: int, images: bool = False) -> dict[str, torch.Tensor]:
    chunk = {"attention_mask": torch.ones(rows, 3, dtype=torch.int64)}
    if images:
        chunk["pixel_values"] = torch.ones(rows, 2)
    return chunk


def _agree(
    monkeypatch: pytest.MonkeyPatch,
    others: list[list[int]],
    queries: list[dict],
    documents: list[dict],
    *,
    real: tuple[int, int] | None = None,
    touches_every_chunk: bool = False,
) -> tuple[Side, Side]:
    """Agree as rank 0, with what the other ranks would send (and their tokens: none)."""
    others = [[*row, 0, 0] for row in others]
    monkeypatch.setattr(schedule, "exchange", lambda mine: [mine, *others])
    if real is None:
        real = (sum(map(rows_of, queries)), sum(map(rows_of, documents)))
    roles = {"query": queries, "document": documents}
    return agree_on_schedule(roles, real, rank=0, touches_every_chunk=touches_every_chunk)


def test_a_rank_short_of_chunks_runs_padding_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, documents = [_chunk(2), _chunk(1)], [_chunk(2)]
    # query chunks, document chunks, query rows, document rows, query images, document images
    query, document = _agree(monkeypatch, [[5, 3, 9, 6, 0, 0]], queries, documents)
    assert query.num_rows == [3, 9]
    assert document.num_rows == [2, 6]
    assert (query.num_padding_chunks, document.num_padding_chunks) == (3, 2)
    assert (query.max_rows, document.max_rows) == (9, 6)
    calls = query.calls()
    assert [counts for _, counts in calls] == [True, True, False, False, False]
    assert calls[0][0] is queries[0]
    assert calls[1][0] is queries[1]
    assert all(chunk is queries[0] for chunk, counts in calls if not counts)


def test_the_fullest_rank_pads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query, document = _agree(monkeypatch, [[1, 1, 1, 1, 0, 0]], [_chunk(1)] * 3, [_chunk(1)] * 4)
    assert (query.num_padding_chunks, document.num_padding_chunks) == (0, 0)


@pytest.mark.parametrize(
    ("own", "other", "touches", "expected"),
    [
        ((False, False), (0, 0), False, (False, False)),
        ((False, False), (0, 1), False, (False, True)),
        ((False, True), (0, 0), False, (False, True)),
        ((True, False), (0, 0), False, (True, False)),
        # ZeRO-3 with resident parameters records one trace: one side's images touch both.
        ((False, False), (0, 1), True, (True, True)),
        ((False, False), (0, 0), True, (False, False)),
    ],
)
def test_images_anywhere_touch_vision_everywhere(
    monkeypatch: pytest.MonkeyPatch,
    own: tuple[bool, bool],
    other: tuple[int, int],
    touches: bool,
    expected: tuple[bool, bool],
) -> None:
    sides = _agree(
        monkeypatch,
        [[1, 1, 1, 1, *other]],
        [_chunk(1, images=own[0])],
        [_chunk(1, images=own[1])],
        touches_every_chunk=touches,
    )
    assert tuple(side.touch_vision for side in sides) == expected
    for side in sides:
        assert not side.must_touch(_chunk(1, images=True))  # a real pass is enough
        assert side.must_touch(_chunk(1)) == side.touch_vision


def test_a_filler_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query, document = _agree(
        monkeypatch, [[2, 4, 4, 8, 0, 0]], [_chunk(1)], [_chunk(1)], real=(0, 0)
    )
    assert query.num_rows == [0, 4]
    assert document.num_rows == [0, 8]


@pytest.mark.parametrize("row", [[0, 1, 0, 1, 0, 0], [1, 0, 1, 0, 0, 0]])
def test_a_rank_without_any_chunk_is_named_on_all(
    monkeypatch: pytest.MonkeyPatch, row: list[int]
) -> None:
    with pytest.raises(DataError, match=r"rank 0: ranks \[1\] have no query or document chunk"):
        _agree(monkeypatch, [row], [_chunk(1)], [_chunk(1)])
    with pytest.raises(DataError, match=r"rank 0: ranks \[0\] have no query or document chunk"):
        _agree(monkeypatch, [[1, 1, 1, 1, 0, 0]], [], [_chunk(1)])


def test_tokens_of_all_ranks_are_counted_but_not_those_of_fillers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule, "exchange", lambda mine: [mine, [1, 1, 1, 1, 0, 0, 10, 20]])
    chunk = _chunk(2)
    chunk["attention_mask"][1, 2] = 0
    roles = {"query": [chunk], "document": [_chunk(2)]}
    options = {"rank": 0, "touches_every_chunk": False}
    query, document = agree_on_schedule(roles, (2, 2), **options)
    assert (query.num_tokens, document.num_tokens) == (15, 26)
    query, document = agree_on_schedule(roles, (0, 0), **options)
    assert (query.num_tokens, document.num_tokens) == (10, 20)
