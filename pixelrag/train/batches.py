"""From rows to a rank's model inputs, in this process or in loader workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

from pixelrag.data.content import content_of
from pixelrag.data.pairs import PairDataset
from pixelrag.data.sampler import GlobalBatchSampler
from pixelrag.data.schema import Document, PairRow
from pixelrag.data.step_loader import load_ahead
from pixelrag.evaluate.pairs import document_length
from pixelrag.models.preprocess import Preprocessor


@dataclass(slots=True)
class PairBatch:
    """One rank's part of a global batch.

    Attributes:
        queries: inputs of [B] queries.
        documents: inputs of [M] documents, positives and hard negatives in any order; empty where
            their vectors are fixed.
        positive_BK: [B, K] int64, the documents that answer each query, padded with -1; K is 1
            where no row of the batch has several.
        content_M: [M] int64, equal for documents of equal content.
        for_guide: inputs of a guide, of the same queries and documents; None where there is none.
        num_real_queries: B, or 0 where the one row only fills the rank's place.
        query_ids: sample id of each query.
        document_ids: sample id of the row that each document belongs to.
    """

    queries: dict[str, torch.Tensor]
    documents: dict[str, torch.Tensor]
    positive_BK: torch.Tensor
    content_M: torch.Tensor
    num_real_queries: int
    query_ids: list[str]
    document_ids: list[str]
    for_guide: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None = None


class PairCollator(Dataset):
    """Maps a list of row indices to a ``PairBatch``; picklable.

    Queries and documents are sorted by length, so that the chunks cut from them pad little. The
    loss does not depend on their order.
    """

    def __init__(
        self,
        dataset: PairDataset | Sequence[PairRow],
        preprocessor: Preprocessor,
        guide: Preprocessor | None = None,
        *,
        fixed_documents: bool = False,
    ) -> None:
        self._fixed_documents = fixed_documents
        self._dataset = dataset
        self._preprocessor = preprocessor
        self._guide = guide

    def __getitem__(self, indices: list[int]) -> PairBatch:
        # An empty share still needs inputs: sharded forwards are collectives.
        rows = [self._dataset[i] for i in indices or [0]]
        rows.sort(key=lambda row: len(row.query))
        documents: list[tuple[Document, str, int | None]] = []
        for place, row in enumerate(rows):
            documents += [(positive, row.sample_id, place) for positive in row.positives]
            documents += [(negative, row.sample_id, None) for negative in row.negatives]
        documents.sort(key=lambda entry: document_length(entry[0]))
        positives: list[list[int]] = [[] for _ in rows]
        for index, (_, _, position) in enumerate(documents):
            if position is not None:
                positives[position].append(index)
        most = max(map(len, positives))
        padded = [found + [-1] * (most - len(found)) for found in positives]

        def queries(by: Preprocessor) -> dict[str, torch.Tensor]:
            return by.queries([row.query for row in rows])

        def passages(by: Preprocessor) -> dict[str, torch.Tensor]:
            return by.documents([entry[0] for entry in documents])

        guide = self._guide
        return PairBatch(
            queries(self._preprocessor),
            {} if self._fixed_documents else passages(self._preprocessor),
            positive_BK=torch.tensor(padded),
            content_M=torch.tensor([content_of(entry[0]) for entry in documents]),
            num_real_queries=len(indices),
            query_ids=[row.sample_id for row in rows],
            document_ids=[entry[1] for entry in documents],
            for_guide=None if guide is None else (queries(guide), passages(guide)),
        )


def load_batches(
    dataset: PairDataset,
    sampler: GlobalBatchSampler,
    preprocessor: Preprocessor,
    *,
    guide: Preprocessor | None = None,
    fixed_documents: bool = False,
    num_workers: int = 0,
    prefetch_factor: int = 2,
    timeout_seconds: float = 300,
) -> Iterator[PairBatch]:
    """Endless batches in the sampler's order.

    Args:
        dataset: the rows.
        sampler: names this rank's rows of each global batch.
        preprocessor: makes model inputs.
        guide: makes the inputs of a guide; None = there is none.
        fixed_documents: make no inputs of documents.
        num_workers, prefetch_factor, timeout_seconds: see `load_ahead`.
    """
    return load_ahead(
        PairCollator(dataset, preprocessor, guide, fixed_documents=fixed_documents),
        sampler,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        timeout_seconds=timeout_seconds,
    )
