"""One index over all ranks: each holds some of its files, and answers for everyone's queries."""

from __future__ import annotations

import numpy as np
import torch

from pixelrag.distributed.collectives import exchange, gather_with_grad
from pixelrag.distributed.together import together
from pixelrag.retrieval.generation import Generation
from pixelrag.retrieval.hits import Hits, merge_top_k


def shards_of_rank(num_shards: int, rank: int, world_size: int) -> list[int]:
    """The index files that a rank opens; maybe none."""
    return list(range(rank, num_shards, world_size))


@torch.no_grad()
def sharded_search(
    generation: Generation, queries_QD: np.ndarray, k: int, *, device: torch.device | str = "cpu"
) -> Hits:
    """The best ``k`` over all ranks' index files for this rank's queries; a collective.

    Queries, scores and rows travel, never passages. The result is that of one process that
    opened all files.

    Args:
        generation: opened with this rank's files (`shards_of_rank`).
        queries_QD: float32, this rank's own; ranks may have unlike numbers of them, or none.
        k: hits a query.
        device: where collectives of the group work.

    Raises:
        IndexError_: a rank's queries do not fit; on all ranks.
    """
    with together():
        queries_QD = generation.check_queries(queries_QD, k)
    counts = [row[0] for row in exchange([len(queries_QD)])]
    most = max(counts)
    if most == 0:
        return merge_top_k([], k)
    padded = np.zeros((most, queries_QD.shape[1]), np.float32)
    padded[: len(queries_QD)] = queries_QD
    everyone = gather_with_grad(torch.from_numpy(padded).to(device)).cpu().numpy()
    hits = generation.search(everyone, k)
    scores = _gather(hits.scores_Qk, device, len(counts), most)
    rows = _gather(hits.rows_Qk, device, len(counts), most)
    rank = torch.distributed.get_rank()
    own = slice(rank * most, rank * most + len(queries_QD))
    parts = [Hits(scores[r, own], rows[r, own]) for r in range(len(counts))]
    return merge_top_k(parts, k, num_queries=len(queries_QD))


def _gather(
    values_Pk: np.ndarray, device: torch.device | str, world_size: int, most: int
) -> np.ndarray:
    """Every rank's array, [rank, all ranks' queries, k]."""
    gathered = gather_with_grad(torch.from_numpy(values_Pk).to(device)).cpu().numpy()
    return gathered.reshape(world_size, world_size * most, -1)
