"""Retrieval ranks and metrics, exact, without ever holding a queries x documents matrix.

**The order.** Documents are sorted by score (dot product), highest first; equal scores by position
in the corpus, lowest first. So the rank of a document is

    1 + number of documents that score higher + number of equal ones that stand before it

A tie is therefore never resolved in favour of the relevant document because it is relevant: an
encoder that has collapsed to one vector ranks every corpus in its own order and gets recall@k at
chance level (k / N when each document answers one query), not 1.0.

**Equal.** Scores are computed in float64 and rounded to `TIE_RESOLUTION` of the largest possible
score. Two copies of one document thus tie exactly, on every device and for every block size, while
float32 embeddings (resolution 6e-8) that differ at all stay apart.

**The metrics.** Relevance is binary; a query may have any number of relevant documents (at least
one). recall@k is the share of a query's relevant documents in the first k, MRR is one over the rank
of its best one, nDCG@k is Jarvelin and Kekalainen's (ACM TOIS 20(4), 2002) with gain 1 and discount
log2(1 + rank). k may exceed the corpus. Every metric exists per query (for intervals and paired
tests) and as a mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pixelrag.errors import DataError, NonFiniteError

TIE_RESOLUTION = 1e-10
METRIC_NAMES = ("recall@1", "recall@5", "recall@10", "mrr", "ndcg@10")
UNRANKED = np.iinfo(np.int64).max
"""The rank of a document that a search of limited depth did not find."""
# Entries of the largest score block unless told otherwise: 2**22 float64 are 32 MiB.
_BLOCK_ENTRIES = 2**22


@dataclass(frozen=True, slots=True)
class Ranks:
    """The 1-based rank of every (query, relevant document) pair.

    Attributes:
        query_P: int64 [P], the query of each pair, ascending.
        rank_P: int64 [P], the rank of its document among all `num_documents`, or `UNRANKED`.
        num_queries: queries ranked; each has at least one pair.
        num_documents: size of the corpus.
    """

    query_P: np.ndarray
    rank_P: np.ndarray
    num_queries: int
    num_documents: int

    def best(self) -> np.ndarray:
        """int64 [Q]: the rank of each query's best relevant document."""
        best_Q = np.full(self.num_queries, UNRANKED, dtype=np.int64)
        np.minimum.at(best_Q, self.query_P, self.rank_P)
        return best_Q

    def num_relevant(self) -> np.ndarray:
        """int64 [Q]: how many relevant documents each query has."""
        return np.bincount(self.query_P, minlength=self.num_queries)


def rank_relevant(
    query_emb: Tensor,
    doc_emb: Tensor,
    relevant: Tensor | Sequence[Sequence[int]],
    *,
    block_entries: int = _BLOCK_ENTRIES,
) -> Ranks:
    """Rank the relevant documents of every query among all documents.

    Args:
        query_emb: [Q, D], any floating dtype, on any device.
        doc_emb: [N, D], the whole corpus, on the same device.
        relevant: int64 [Q] with one document index a query, or one sequence of document indices a
            query (the qrels); an index given twice counts once.
        block_entries: most scores held at once; memory, never the result, depends on it.

    Returns:
        `Ranks`, on the CPU.

    Raises:
        DataError: shapes that do not fit, no queries or documents, a query without a relevant
            document, an index outside the corpus.
        NonFiniteError: an embedding holds NaN or infinity. No metric is made of those.
    """
    if query_emb.dim() != 2 or doc_emb.dim() != 2 or query_emb.shape[1] != doc_emb.shape[1]:
        raise DataError(
            f"ranking: queries {list(query_emb.shape)} and documents {list(doc_emb.shape)} do not "
            "fit; expected [Q, D] and [N, D] with the same D: encode both with one model"
        )
    num_queries, num_docs = query_emb.shape[0], doc_emb.shape[0]
    if num_queries == 0 or num_docs == 0:
        raise DataError(
            f"ranking: got {num_queries} queries and {num_docs} documents; expected at least one "
            "of each: check data.eval and eval.corpus"
        )
    pair_query, pair_doc = _pairs(relevant, num_queries, num_docs)
    query_QD, doc_ND, quantum = _in_quanta(query_emb, doc_emb)
    device = doc_ND.device
    rows = max(1, min(len(pair_query), 1024))
    cols = max(1, min(num_docs, block_entries // rows))
    rows = max(1, min(len(pair_query), block_entries // cols))

    rank_P = torch.ones(len(pair_query), dtype=torch.int64)
    for start in range(0, len(pair_query), rows):
        query_R = torch.from_numpy(pair_query[start : start + rows]).to(device)
        doc_R = torch.from_numpy(pair_doc[start : start + rows]).to(device)
        own_R1 = ((query_QD[query_R] * doc_ND[doc_R]).sum(1, keepdim=True) / quantum).round()
        # A query with many relevant documents is scored once a block, not once a document.
        unique_U, which_R = torch.unique(query_R, return_inverse=True)
        before_R = torch.zeros(len(query_R), dtype=torch.int64, device=device)
        for first in range(0, num_docs, cols):
            block_CD = doc_ND[first : first + cols]
            score_RC = (query_QD[unique_U] @ block_CD.T / quantum).round()[which_R]
            index_C = torch.arange(first, first + len(block_CD), device=device)
            higher_RC = score_RC > own_R1
            tied_RC = (score_RC == own_R1) & (index_C < doc_R[:, None])
            # The document itself never stands before itself, however its score was rounded.
            ahead_RC = (higher_RC | tied_RC) & (index_C != doc_R[:, None])
            before_R += ahead_RC.sum(1)
        rank_P[start : start + rows] += before_R.cpu()
    return Ranks(pair_query, rank_P.numpy(), num_queries, num_docs)


def best_documents(
    query_emb: Tensor, doc_emb: Tensor, k: int, *, block_entries: int = _BLOCK_ENTRIES
) -> tuple[np.ndarray, np.ndarray]:
    """The first ``k`` documents of every query, in the order that `rank_relevant` counts by.

    Args:
        query_emb, doc_emb, block_entries: as for `rank_relevant`; one query's scores are held at
            least.
        k: documents of a query; all of them where the corpus is smaller.

    Returns:
        int64 [Q, k] rows of the corpus, and float64 [Q, k] scores.

    Raises:
        NonFiniteError: an embedding holds NaN or infinity.
    """
    _check_k(k)
    query_QD, doc_ND, quantum = _in_quanta(query_emb, doc_emb)
    k = min(k, len(doc_ND))
    step = max(1, block_entries // len(doc_ND))
    rows, scores = [], []
    for start in range(0, len(query_QD), step):
        score_RN = (query_QD[start : start + step] @ doc_ND.T / quantum).round()
        # Stable, so equal scores stay in the order of the corpus.
        ordered = score_RN.sort(dim=1, descending=True, stable=True)
        rows.append(ordered.indices[:, :k].cpu().numpy())
        scores.append((ordered.values[:, :k] * quantum).cpu().numpy())
    return np.concatenate(rows), np.concatenate(scores)


def recall_at(ranks: Ranks, k: int) -> np.ndarray:
    """float64 [Q]: the share of each query's relevant documents that rank k or better."""
    _check_k(k)
    found_Q = np.bincount(ranks.query_P[ranks.rank_P <= k], minlength=ranks.num_queries)
    return found_Q / ranks.num_relevant()


def reciprocal_rank(ranks: Ranks) -> np.ndarray:
    """float64 [Q]: one over the rank of each query's best relevant document, 0 without one; the
    mean is MRR."""
    best_Q = ranks.best()
    return np.where(best_Q == UNRANKED, 0.0, 1.0 / best_Q)


def ndcg_at(ranks: Ranks, k: int) -> np.ndarray:
    """float64 [Q]: binary nDCG@k; 1.0 when min(k, relevant) relevant documents come first."""
    _check_k(k)
    gain_P = np.where(ranks.rank_P <= k, 1.0 / np.log2(1.0 + ranks.rank_P), 0.0)
    dcg_Q = np.bincount(ranks.query_P, weights=gain_P, minlength=ranks.num_queries)
    ideal = np.cumsum(1.0 / np.log2(np.arange(2, min(k, int(ranks.num_relevant().max())) + 2)))
    return dcg_Q / ideal[np.minimum(ranks.num_relevant(), len(ideal)) - 1]


def per_query_metrics(ranks: Ranks) -> dict[str, np.ndarray]:
    """Every metric of `METRIC_NAMES` for every query: name -> float64 [Q]."""
    return {
        "recall@1": recall_at(ranks, 1),
        "recall@5": recall_at(ranks, 5),
        "recall@10": recall_at(ranks, 10),
        "mrr": reciprocal_rank(ranks),
        "ndcg@10": ndcg_at(ranks, 10),
    }


def summarize(per_query: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Mean over queries of each metric: name -> float in [0, 1].

    Raises:
        DataError: a metric without a single query.
    """
    for name, values in per_query.items():
        if len(values) == 0:
            raise DataError(f"{name}: no queries to average; check data.eval")
    return {name: float(np.mean(values)) for name, values in per_query.items()}


def _pairs(
    relevant: Tensor | Sequence[Sequence[int]], num_queries: int, num_docs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Flatten qrels into (query, document) pairs, sorted by query, each pair once."""
    if len(relevant) != num_queries:
        raise DataError(
            f"ranking: relevance for {len(relevant)} queries, embeddings of {num_queries}"
        )
    if isinstance(relevant, Tensor):
        if relevant.dim() != 1 or relevant.is_floating_point() or relevant.dtype == torch.bool:
            raise DataError(
                f"ranking: relevant is {relevant.dtype} {list(relevant.shape)}; expected integer "
                "[Q], or one sequence of document indices a query"
            )
        query_P = np.arange(num_queries, dtype=np.int64)
        doc_P = relevant.detach().cpu().to(torch.int64).numpy()
    else:
        rows = [sorted({int(doc) for doc in docs}) for docs in relevant]
        for query, docs in enumerate(rows):
            if not docs:
                raise DataError(
                    f"ranking: query {query} has no relevant document; drop it or give it one"
                )
        query_P = np.repeat(np.arange(num_queries, dtype=np.int64), [len(docs) for docs in rows])
        doc_P = np.array([doc for docs in rows for doc in docs], dtype=np.int64)
    outside = np.flatnonzero((doc_P < 0) | (doc_P >= num_docs))
    if len(outside):
        raise DataError(
            f"ranking: query {query_P[outside[0]]} names document {doc_P[outside[0]]}; the corpus "
            f"holds 0..{num_docs - 1}"
        )
    return query_P, doc_P


def _in_quanta(query_emb: Tensor, doc_emb: Tensor) -> tuple[Tensor, Tensor, float]:
    """Both in float64, and the resolution that scores are rounded to."""
    _check_finite("query", query_emb)
    _check_finite("document", doc_emb)
    query_QD, doc_ND = query_emb.detach().double(), doc_emb.detach().double()
    # |q.d| <= |q||d|, so this is the largest score there can be (1 for normalised embeddings).
    largest = float(query_QD.norm(dim=1).max() * doc_ND.norm(dim=1).max())
    return query_QD, doc_ND, largest * TIE_RESOLUTION if largest > 0 else 1.0


def _check_finite(what: str, emb: Tensor) -> None:
    finite_rows = torch.isfinite(emb).all(dim=1)
    if not bool(finite_rows.all()):
        bad = (~finite_rows).nonzero().flatten()
        raise NonFiniteError(
            f"ranking: {len(bad)} of {len(emb)} {what} embeddings hold NaN or infinity, the first "
            f"is row {int(bad[0])}; no metric is computed from them. Lower optim.learning_rate, "
            "use engine.precision fp32, or evaluate an earlier checkpoint"
        )


def _check_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"k={k}: expected at least 1")
