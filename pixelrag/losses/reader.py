"""What a reader tells its retriever: losses for the encoders alone (Atlas, section 2.2).

Notation of Izacard et al. 2022 ("Atlas: Few-shot Learning with Retrieval Augmented Language
Models"): with s_k the score of document d_k for the question q, divided by its temperature,

    p_RETR(d_k | q) = exp(s_k) / sum_j exp(s_j)

and the answer a. EMDR2 maximises a likelihood, the others minimise KL(p || p_RETR) to a
distribution p that the reader gives to the K documents. In all of them the reader's part is a
constant: its gradient is stopped here, so that a caller can hand over its outputs as they are.

Each function returns one loss a question, [B] in fp32 (fp64 when an input is), divided by nothing.
(`KLDivLoss()` in Atlas' code averages over B * K entries: a hidden factor of 1/K beside the mean.)

A score of -inf marks a document that is not there, as in `pixelrag.losses.rag_marginal`: it has
probability 0 on both sides, and no gradient. A question without documents has the loss 0.
"""

from __future__ import annotations

import torch

from pixelrag.losses.rag_marginal import document_log_prior, rag_sequence_nll, rag_token_nll

_MISSING = float("-inf")


def emdr2(doc_scores_BK: torch.Tensor, answer_log_probs_BK: torch.Tensor) -> torch.Tensor:
    """-log sum_k SG[p_LM(a | q, d_k)] p_RETR(d_k | q).

    The retriever's term of Sachan et al. 2021 ("End-to-End Training of Multi-Document Reader and
    Retriever for Open-Domain Question Answering"), as in Atlas, section 2.2. Its gradient in s_k
    is p_RETR(d_k | q) - p(d_k | q, a), prior less posterior. The reader's own term, -log p_LM(a |
    q, d_1..d_K), is the caller's.

    Args:
        doc_scores_BK: [B, K] scores, divided by the temperature.
        answer_log_probs_BK: [B, K] log p_LM(a | q, d_k), the answer given one document, see
            `pixelrag.losses.rag_marginal.answer_log_probs`.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check("emdr2", doc_scores_BK, answer_log_probs_BK)
    whole_B1 = torch.ones_like(doc_scores_BK[:, :1], dtype=torch.bool)
    return rag_sequence_nll(answer_log_probs_BK.detach()[:, :, None], doc_scores_BK, whole_B1)


def emdr2_per_token(
    doc_scores_BK: torch.Tensor, log_probs_BKT: torch.Tensor, target_mask_BT: torch.Tensor
) -> torch.Tensor:
    """-sum_t log sum_k SG[p_LM(a_t | q, d_k, a_<t)] p_RETR(d_k | q).

    What the released code of both EMDR2 (`get_loss_and_retriever_utility`) and Atlas (`logprob`)
    trains with, where the papers' formula is about the whole answer; both divide by the number of
    tokens of the batch, which is left to the caller.

    Args:
        doc_scores_BK: [B, K] scores, divided by the temperature.
        log_probs_BKT: [B, K, T] log p_LM(a_t | q, d_k, a_<t) of the answer's tokens.
        target_mask_BT: [B, T] bool, True for the tokens of the answer.

    Raises:
        ValueError: shapes that do not fit.
    """
    return rag_token_nll(log_probs_BKT.detach(), doc_scores_BK, target_mask_BT)


def pdist(
    doc_scores_BK: torch.Tensor, answer_log_probs_BK: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """Perplexity distillation: KL(p || p_RETR) with p_k = softmax_k SG[log p_LM(a | q, d_k)].

    Atlas, section 2.2: the posterior of the documents under a uniform prior. Atlas' code divides
    the log-probability by the number of the answer's tokens and by `temperature_gold`.

    Args:
        doc_scores_BK: [B, K] scores, divided by the temperature.
        answer_log_probs_BK: [B, K] log p_LM(a | q, d_k).
        temperature: divides the reader's log-probabilities; above 1 makes p flatter.

    Raises:
        ValueError: shapes that do not fit, or a temperature that is not above 0.
    """
    _check("pdist", doc_scores_BK, answer_log_probs_BK)
    return _distilled(doc_scores_BK, answer_log_probs_BK, temperature)


def loop(
    doc_scores_BK: torch.Tensor, left_out_log_probs_BK: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """Leave-one-out: KL(p || p_RETR) with p_k = softmax_k SG[-log p_LM(a | q, D without d_k)].

    Atlas, section 2.2: a document counts by how much worse the answer becomes without it. This is
    the one loss that sees documents together, at the price of K readings of K - 1 documents.

    Args:
        doc_scores_BK: [B, K] scores, divided by the temperature.
        left_out_log_probs_BK: [B, K] log-probability of the answer given all documents but d_k.
        temperature: divides the reader's log-probabilities.

    Raises:
        ValueError: shapes that do not fit, or a temperature that is not above 0.
    """
    _check("loop", doc_scores_BK, left_out_log_probs_BK)
    return _distilled(doc_scores_BK, -left_out_log_probs_BK, temperature)


def adist(
    doc_scores_BK: torch.Tensor, attention_BK: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """Attention distillation: KL(p || p_RETR) with p_k = softmax_k SG[attention_k].

    Izacard and Grave 2021 ("Distilling Knowledge from Reader to Retriever"), as in Atlas,
    section 2.2.

    Args:
        doc_scores_BK: [B, K] scores, divided by the temperature.
        attention_BK: [B, K] how much the decoder looked at each document, averaged over layers;
            see `pool_attention`.
        temperature: divides the attention.

    Raises:
        ValueError: shapes that do not fit, or a temperature that is not above 0.
    """
    _check("adist", doc_scores_BK, attention_BK)
    return _distilled(doc_scores_BK, attention_BK, temperature)


def pool_attention(
    attention_BHTS: torch.Tensor,
    value_norm_BHS: torch.Tensor,
    document_BS: torch.Tensor,
    target_mask_BT: torch.Tensor,
    num_documents: int,
) -> torch.Tensor:
    """One layer's attention as one number a document.

    Atlas, section 2.2: a token n of a document counts alpha_n ||v_n||, its attention weight times
    the norm of its value vector, averaged over heads and tokens of the answer (and over layers:
    average what this returns). Over the document's tokens it is added up, as in Atlas' code
    (`evalnormsum`), where the paper averages: the documents share the weight of one soft-max, and
    the mean of a document's share over its tokens would count against long ones. The code then
    divides by 256 and by a temperature of 0.01.

    Args:
        attention_BHTS: [B, heads, T, S] weights of T answer tokens over S source tokens, those of
            all documents one after the other (fusion in the decoder).
        value_norm_BHS: [B, heads, S] L2 norms of the value vectors.
        document_BS: [B, S] int64, the document of each source token, from 0; -1 for padding and
            what else belongs to none.
        target_mask_BT: [B, T] bool, True for the tokens of the answer.
        num_documents: K.

    Returns:
        [B, K] fp32 (fp64 when the weights are), without gradient; 0 for documents without tokens.
    """
    with torch.no_grad():
        wide = torch.promote_types(attention_BHTS.dtype, torch.float32)
        weight_BHTS = attention_BHTS.to(wide) * value_norm_BHS.to(wide)[:, :, None, :]
        # `where` rather than a product: padding may hold anything.
        weight_BHTS = torch.where(target_mask_BT[:, None, :, None], weight_BHTS, 0.0)
        num_targets_B1 = target_mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        token_BS = weight_BHTS.mean(dim=1).sum(dim=1) / num_targets_B1
        owned_BS = document_BS >= 0
        place_BS = document_BS.clamp(min=0)
        empty_BK = token_BS.new_zeros(len(token_BS), num_documents)
        return empty_BK.scatter_add(1, place_BS, torch.where(owned_BS, token_BS, 0.0))


def _distilled(
    doc_scores_BK: torch.Tensor, reader_BK: torch.Tensor, temperature: float
) -> torch.Tensor:
    """KL(softmax(SG[reader] / temperature) || softmax(scores)), [B]."""
    if not 0.0 < temperature < float("inf"):
        raise ValueError(f"temperature: got {temperature}, expected a number above 0")
    log_q_BK = document_log_prior(doc_scores_BK)
    missing_BK = log_q_BK == _MISSING
    reader_BK = reader_BK.detach().to(torch.promote_types(reader_BK.dtype, torch.float32))
    # What is all but impossible must not become infinite: a soft-max of nothing else is NaN.
    bound = torch.finfo(reader_BK.dtype).max / 4
    told_BK = (reader_BK / temperature).clamp(-bound, bound)
    log_p_BK = document_log_prior(told_BK.masked_fill(missing_BK, _MISSING))
    p_BK = log_p_BK.exp()
    # 0 log 0 = 0: also where the reader's probability underflows or is none at all.
    terms_BK = p_BK * (log_p_BK.masked_fill(p_BK == 0, 0.0) - log_q_BK.masked_fill(missing_BK, 0.0))
    return terms_BK.sum(dim=1)


def _check(name: str, doc_scores_BK: torch.Tensor, reader_BK: torch.Tensor) -> None:
    if doc_scores_BK.dim() != 2 or reader_BK.shape != doc_scores_BK.shape:
        raise ValueError(
            f"{name}: scores {list(doc_scores_BK.shape)} and reader's values "
            f"{list(reader_BK.shape)} do not fit; expected [B, K] of both"
        )
