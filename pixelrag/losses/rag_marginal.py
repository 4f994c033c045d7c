"""The likelihood of an answer with its documents marginalised (Lewis et al. 2020, section 2.1).

With s_k the score of document z_k for the question x, and its prior over the K retrieved documents

    p(z_k | x) = exp(s_k) / sum_j exp(s_j)

the answer y has, when one document is behind all of it (RAG-Sequence),

    p(y | x) = sum_k p(z_k | x) prod_t p(y_t | x, z_k, y_<t)

and, when each of its tokens may have another one (RAG-Token),

    p(y | x) = prod_t sum_k p(z_k | x) p(y_t | x, z_k, y_<t)

Both are computed as logarithms, in fp32 or wider. Their gradient reaches the generator through the
tokens' log-probabilities and both encoders through the scores. They take the log-probabilities of
the target tokens, [B, K, T], rather than logits over the vocabulary, so that documents can go
through the generator one chunk after the other.

**Missing documents.** An index may find fewer than K. A score of -inf marks a document that is not
there: it has prior 0, what stands at its place is not looked at, and no gradient reaches it.
A question without a single document has the loss 0; count those.

**Against transformers.** `RagSequenceForGeneration.get_nll` adds log p(z_k | x) to the second token
of the answer and masks padding afterwards, so an answer of one token loses its prior, or its whole
loss. Here the prior belongs to the document and counts once, whatever the length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MISSING = float("-inf")


@dataclass(frozen=True, slots=True)
class Smoothing:
    """Label smoothing as in the training of the RAG paper's models: `epsilon` of each token's
    target is spread evenly over the vocabulary.

    Args:
        epsilon: 0 to below 1.
        vocab_size: entries of the vocabulary.
        vocab_sum_BKT: [B, K, T] sum over the vocabulary of log p(v | x, z_k, y_<t).

    Raises:
        ValueError: a value outside its range.
    """

    epsilon: float
    vocab_size: int
    vocab_sum_BKT: torch.Tensor

    def __post_init__(self) -> None:
        if not 0.0 <= self.epsilon < 1.0 or self.vocab_size < 1:
            raise ValueError(
                f"smoothing: got epsilon {self.epsilon} and vocab_size {self.vocab_size}, expected "
                "0 <= epsilon < 1 and vocab_size >= 1"
            )


def document_log_prior(doc_scores_BK: torch.Tensor) -> torch.Tensor:
    """log p(z_k | x): the log-soft-max of the scores over the documents.

    Args:
        doc_scores_BK: [B, K] scores, divided by the temperature; -inf where there is no document.

    Returns:
        [B, K] fp32, or fp64 when the scores are; -inf where there is no document. Without one in
        the whole row, the row is -inf (and never NaN). No gradient reaches a missing document.
    """
    scores_BK = _wide(doc_scores_BK)
    missing_BK = scores_BK == _MISSING
    # A row of nothing but -inf has no soft-max; give it one, and take it away again.
    empty_B1 = missing_BK.all(dim=1, keepdim=True)
    prior_BK = scores_BK.masked_fill(empty_B1, 0.0).log_softmax(dim=1)
    return prior_BK.masked_fill(missing_BK, _MISSING)


def rag_sequence_nll(
    log_probs_BKT: torch.Tensor,
    doc_scores_BK: torch.Tensor,
    target_mask_BT: torch.Tensor,
    *,
    exclude_bos: bool = False,
    smoothing: Smoothing | None = None,
) -> torch.Tensor:
    """-log p(y | x) of RAG-Sequence: one document is behind the whole answer.

    Args:
        log_probs_BKT: [B, K, T] log p(y_t | x, z_k, y_<t) of the target tokens, any floating dtype.
        doc_scores_BK: [B, K] scores, divided by the temperature; -inf where there is no document.
        target_mask_BT: [B, T] bool, True for the tokens of the answer, False for padding.
        exclude_bos: leave the first position out of the score, for generators whose answers begin
            with a BOS token (`exclude_bos_score` of transformers). Transformers asks whether every
            answer of the batch does; here it is a property of the generator, so that a row's loss
            does not depend on the batch that it is in.
        smoothing: spread a part of each target over the vocabulary. The loss is then
            (1 - epsilon) NLL + epsilon / V * S with S the same marginal of the sums over the
            vocabulary, in which the prior counts V times, as in `get_nll`; S is over all tokens of
            the answer, the first one too.

    Returns:
        [B] fp32, or fp64 when an input is; 0 for a row without documents, -log sum_k p(z_k | x) = 0
        for one without tokens.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(log_probs_BKT, doc_scores_BK, target_mask_BT)
    prior_BK = document_log_prior(doc_scores_BK)
    scored_BT = _without_first(target_mask_BT) if exclude_bos else target_mask_BT
    nll_B = _marginal_nll(prior_BK, _answer_sum(log_probs_BKT, prior_BK, scored_BT))
    if smoothing is None:
        return nll_B
    if smoothing.vocab_sum_BKT.shape != log_probs_BKT.shape:
        raise ValueError(
            f"smoothing: vocab_sum_BKT is {list(smoothing.vocab_sum_BKT.shape)}, log_probs_BKT is "
            f"{list(log_probs_BKT.shape)}; expected the same shape"
        )
    sum_BK = _answer_sum(smoothing.vocab_sum_BKT, prior_BK, target_mask_BT)
    smooth_B = _marginal_nll(smoothing.vocab_size * prior_BK, sum_BK)
    share = smoothing.epsilon / smoothing.vocab_size
    return (1.0 - smoothing.epsilon) * nll_B + share * smooth_B


def rag_token_nll(
    log_probs_BKT: torch.Tensor,
    doc_scores_BK: torch.Tensor,
    target_mask_BT: torch.Tensor,
    *,
    exclude_bos: bool = False,
) -> torch.Tensor:
    """-log p(y | x) of RAG-Token: each token may have another document behind it.

    Takes and returns what `rag_sequence_nll` does. Label smoothing adds `rag_token_vocab_nll`,
    which needs every document's whole distribution.
    """
    _check(log_probs_BKT, doc_scores_BK, target_mask_BT)
    prior_BK = document_log_prior(doc_scores_BK)
    scored_BT = _without_first(target_mask_BT) if exclude_bos else target_mask_BT
    token_BKT = _present(log_probs_BKT, prior_BK, scored_BT)
    empty_B = (prior_BK == _MISSING).all(dim=1)
    unscored_BT = ~scored_BT | empty_B[:, None]
    prior_BK = prior_BK.masked_fill(empty_B[:, None], 0.0)
    marginal_BT = _log_sum_exp(prior_BK[:, :, None] + token_BKT)
    return -marginal_BT.masked_fill(unscored_BT, 0.0).sum(dim=1)


def rag_token_vocab_nll(
    log_probs_NTV: torch.Tensor,
    pair_BK: torch.Tensor,
    doc_scores_BK: torch.Tensor,
    target_mask_BT: torch.Tensor,
) -> torch.Tensor:
    """-sum_t sum_v log sum_k p(z_k | x) p(v | x, z_k, y_<t): what smooths RAG-Token.

    With the share epsilon of each token's target spread over V entries of the vocabulary, the loss
    is (1 - epsilon) NLL + epsilon / V times this, as in `RagTokenForGeneration.get_nll`. The sum
    over documents stands inside the logarithm, so it takes all their distributions at once; what
    is made of them here is made question by question.

    Args:
        log_probs_NTV: log p(v | x, z, y_<t) for N pairs of question and document.
        pair_BK: int64, row of each document in ``log_probs_NTV``; -1 for a missing one.
        doc_scores_BK, target_mask_BT: as for `rag_sequence_nll`; all tokens of the answer count.

    Returns:
        [B] fp32, or fp64 when an input is; 0 for a row without documents.
    """
    prior_BK = document_log_prior(doc_scores_BK)
    losses = []
    for prior_K, pair_K, mask_T in zip(prior_BK, pair_BK, target_mask_BT, strict=True):
        there = (prior_K != _MISSING).nonzero().flatten()
        if len(there) == 0:
            losses.append(prior_BK.new_zeros(()))
            continue
        scored = mask_T.nonzero().flatten()
        joint_KTV = _wide(log_probs_NTV[pair_K[there]][:, scored]) + prior_K[there][:, None, None]
        losses.append(-_log_sum_exp(joint_KTV[None]).sum())
    return torch.stack(losses) if losses else prior_BK.new_zeros(0)


def answer_log_probs(log_probs_BKT: torch.Tensor, target_mask_BT: torch.Tensor) -> torch.Tensor:
    """log p(y | x, z_k), the sum over the tokens of the answer: [B, K] fp32 or fp64.

    Args:
        log_probs_BKT: [B, K, T] as for `rag_sequence_nll`; what padding holds is not looked at.
        target_mask_BT: [B, T] bool.
    """
    return _wide(log_probs_BKT).masked_fill(~target_mask_BT[:, None, :], 0.0).sum(dim=2)


def _marginal_nll(prior_BK: torch.Tensor, answer_BK: torch.Tensor) -> torch.Tensor:
    """-log sum_k exp(prior + answer), [B], 0 where every prior is -inf."""
    empty_B = (prior_BK == _MISSING).all(dim=1)
    joint_BK = prior_BK.masked_fill(empty_B[:, None], 0.0) + answer_BK
    return -_log_sum_exp(joint_BK).masked_fill(empty_B, 0.0)


def _log_sum_exp(joint: torch.Tensor) -> torch.Tensor:
    """log sum exp over the documents, dimension 1."""
    # Torch's own backward takes exp(joint - result), in which a result of -5e4 has lost three
    # digits of the weights in fp32. This way they are a soft-max, and add up to 1.
    top = joint.detach().amax(dim=1, keepdim=True)
    top = top.masked_fill(top == _MISSING, 0.0)
    return (joint - top).exp().sum(dim=1).log() + top.squeeze(1)


def _answer_sum(
    log_probs_BKT: torch.Tensor, prior_BK: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    return _present(log_probs_BKT, prior_BK, mask_BT).sum(dim=2)


def _present(
    log_probs_BKT: torch.Tensor, prior_BK: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """The log-probabilities with 0, and no gradient, for padding and missing documents."""
    hidden_BKT = ~mask_BT[:, None, :] | (prior_BK == _MISSING)[:, :, None]
    return _wide(log_probs_BKT).masked_fill(hidden_BKT, 0.0)


def _without_first(mask_BT: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(mask_BT[:, :1]), mask_BT[:, 1:]], dim=1)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check(
    log_probs_BKT: torch.Tensor, doc_scores_BK: torch.Tensor, target_mask_BT: torch.Tensor
) -> None:
    fits = (
        log_probs_BKT.dim() == 3
        and doc_scores_BK.shape == log_probs_BKT.shape[:2]
        and target_mask_BT.shape == log_probs_BKT.shape[::2]
        and log_probs_BKT.shape[1] > 0
    )
    if not fits or target_mask_BT.dtype != torch.bool:
        raise ValueError(
            f"RAG loss: log_probs_BKT {list(log_probs_BKT.shape)}, doc_scores_BK "
            f"{list(doc_scores_BK.shape)} and target_mask_BT {list(target_mask_BT.shape)} "
            f"{target_mask_BT.dtype} do not fit; expected [B, K, T], [B, K] and [B, T] bool, K >= 1"
        )
