"""Which losses the generator and the encoders of a RAG model learn from.

The generator learns from the marginal likelihood of the answer (RAG-Sequence, RAG-Token) or from
reading all documents at once (fusion in the decoder). The encoders learn from the same marginal
likelihood, or from what the generator tells them of the documents (Atlas, section 2.2); their loss
then leaves the generator alone, and the generator's leaves them alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pixelrag.losses.rag_marginal import (
    answer_log_probs,
    document_log_prior,
    rag_sequence_nll,
    rag_token_nll,
)
from pixelrag.losses.reader import emdr2, emdr2_per_token, loop, pdist

_MISSING = float("-inf")


@dataclass(frozen=True, slots=True)
class RagTerms:
    """One value a question, [B].

    Attributes:
        loss_B: what is minimised.
        answer_B: the generator's loss.
        retriever_B: the encoders' loss where it is not the generator's, else 0.
        prior_entropy_B: of p(z | x).
        posterior_entropy_B: of p(z | x, y); of the prior where no document is read by itself.
    """

    loss_B: torch.Tensor
    answer_B: torch.Tensor
    retriever_B: torch.Tensor
    prior_entropy_B: torch.Tensor
    posterior_entropy_B: torch.Tensor


@dataclass(frozen=True, slots=True)
class RagObjective:
    """The loss of each question.

    Args:
        answer: ``rag_sequence``, ``rag_token`` or ``fid``.
        retriever: ``marginal`` (not with ``fid``), ``emdr2`` (over whole answers, or over tokens
            with ``rag_token``), ``pdist`` or ``loop``.
        retriever_weight: factor on the encoders' own loss.
        reader_temperature: divides the generator's log-probabilities in ``pdist`` and ``loop``.
        exclude_bos: leave the first token of answers out of the generator's loss.
        contrastive_weight: factor on InfoNCE over relevant passages, which `gradcache.rag` adds.

    Raises:
        ValueError: an unknown name, or ``marginal`` with ``fid``.
    """

    answer: str = "rag_sequence"
    retriever: str = "marginal"
    retriever_weight: float = 1.0
    reader_temperature: float = 1.0
    exclude_bos: bool = False
    contrastive_weight: float = 0.0

    def __post_init__(self) -> None:
        if self.answer not in ("rag_sequence", "rag_token", "fid"):
            raise ValueError(f"answer: got {self.answer!r}")
        if self.retriever not in ("marginal", "emdr2", "pdist", "loop"):
            raise ValueError(f"retriever: got {self.retriever!r}")
        if self.answer == "fid" and self.retriever == "marginal":
            raise ValueError("fid reads all documents at once: nothing is marginalised")

    @property
    def reads_apart(self) -> bool:
        """Whether documents must be read by themselves beside what the generator learns from."""
        return self.answer == "fid" and self.retriever != "loop"

    @property
    def leaves_out(self) -> bool:
        """Whether documents must be read together, each left out in turn."""
        return self.answer == "fid" and self.retriever == "loop"

    def __call__(
        self,
        scores_BK: torch.Tensor,
        log_probs_NT: torch.Tensor,
        pair_BK: torch.Tensor,
        target_mask_BT: torch.Tensor,
        readings_NT: torch.Tensor | None = None,
    ) -> RagTerms:
        """Compute the terms of B questions.

        Args:
            scores_BK: floating point, divided by the temperature; -inf for a missing document.
            log_probs_NT: the generator's, one row a pair; for ``fid`` one row a question.
            pair_BK: int64, row of each document in ``log_probs_NT`` (``readings_NT`` for
                ``fid``); -1 for a missing one.
            target_mask_BT: bool.
            readings_NT: what ``reads_apart`` or ``leaves_out`` ask for, without gradient.
        """
        prior_BK = document_log_prior(scores_BK)
        if self.answer == "fid":
            answer_B = -_wide(log_probs_NT[: len(scores_BK)]).sum(1)
            if self.exclude_bos:
                answer_B = answer_B + _wide(log_probs_NT[: len(scores_BK), 0])
            apart = readings_NT
        else:
            apart = log_probs_NT
        apart_BKT = _chosen(apart, pair_BK, target_mask_BT.shape[1])
        answers_BK = answer_log_probs(apart_BKT, target_mask_BT)
        if self.answer != "fid":
            nll = rag_sequence_nll if self.answer == "rag_sequence" else rag_token_nll
            used_BK = scores_BK if self.retriever == "marginal" else scores_BK.detach()
            answer_B = nll(apart_BKT, used_BK, target_mask_BT, exclude_bos=self.exclude_bos)
        retriever_B = self._retriever(scores_BK, apart_BKT, answers_BK, target_mask_BT)
        posterior_BK = prior_BK.detach()
        if not self.leaves_out:
            posterior_BK = document_log_prior(posterior_BK + answers_BK.detach())
        return RagTerms(
            answer_B + self.retriever_weight * retriever_B,
            answer_B.detach(),
            retriever_B.detach(),
            _entropy(prior_BK.detach()),
            _entropy(posterior_BK),
        )

    def _retriever(
        self,
        scores_BK: torch.Tensor,
        apart_BKT: torch.Tensor,
        answers_BK: torch.Tensor,
        target_mask_BT: torch.Tensor,
    ) -> torch.Tensor:
        if self.retriever == "emdr2":
            if self.answer == "rag_token":
                return emdr2_per_token(scores_BK, apart_BKT, target_mask_BT)
            return emdr2(scores_BK, answers_BK)
        if self.retriever == "pdist":
            return pdist(scores_BK, answers_BK, temperature=self.reader_temperature)
        if self.retriever == "loop":
            left_out_BK = answers_BK if self.leaves_out else _without_each(scores_BK, answers_BK)
            return loop(scores_BK, left_out_BK, temperature=self.reader_temperature)
        return torch.zeros_like(scores_BK[:, 0])


def _without_each(scores_BK: torch.Tensor, answers_BK: torch.Tensor) -> torch.Tensor:
    """log p(y | x, all documents but z_k) of the marginal model, [B, K], without gradient.

    What a model that reads one document at a time has in the place of reading K - 1 of them: the
    marginal likelihood under the prior of the others. Without others it is the worst of answers.
    """
    with torch.no_grad():
        num_documents = scores_BK.shape[1]
        own = torch.eye(num_documents, dtype=torch.bool, device=scores_BK.device)
        others_BKK = scores_BK[:, None, :].masked_fill(own, _MISSING)
        joint_BKK = document_log_prior(others_BKK.flatten(0, 1)).unflatten(0, others_BKK.shape[:2])
        joint_BKK = joint_BKK + answers_BK[:, None, :]
        left_BK = joint_BKK.logsumexp(dim=2)
        return left_BK.masked_fill(left_BK == _MISSING, torch.finfo(left_BK.dtype).min / 4)


def _chosen(log_probs_NT: torch.Tensor, pair_BK: torch.Tensor, num_targets: int) -> torch.Tensor:
    """[B, K, T]; a missing pair holds zeros and takes no gradient."""
    missing = num_targets - log_probs_NT.shape[1]
    padded_NT = torch.nn.functional.pad(log_probs_NT, (0, missing))
    chosen_BKT = padded_NT[pair_BK.clamp_min(0)]
    return chosen_BKT.masked_fill((pair_BK < 0)[:, :, None], 0.0)


def _entropy(log_p_BK: torch.Tensor) -> torch.Tensor:
    p_BK = log_p_BK.exp()
    return -(p_BK * log_p_BK.masked_fill(p_BK == 0, 0.0)).sum(dim=1)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
