"""Which losses the generator and the encoders of a RAG model learn from.

The generator learns from the marginal likelihood of the answer (RAG-Sequence, RAG-Token) or from
reading all documents at once (fusion in the decoder). The encoders learn from the same marginal
likelihood, or from what the generator tells them of the documents (Atlas, section 2.2); their loss
then leaves the generator alone, and the generator's leaves them alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import pad

from pixelrag.losses.rag_marginal import (
    Smoothing,
    answer_log_probs,
    document_log_prior,
    rag_sequence_nll,
    rag_token_nll,
    rag_token_vocab_nll,
)
from pixelrag.losses.reader import adist, emdr2, emdr2_per_token, loop, pdist

Vocabulary = Literal["none", "sum", "all"]
"""What is told of a token beside the target's log-probability; see `RagObjective.vocabulary`."""

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
            with ``rag_token``), ``pdist``, ``loop`` or ``adist``.
        retriever_weight: factor on the encoders' own loss.
        reader_temperature: divides what the generator says of documents in ``pdist``, ``loop`` and
            ``adist``.
        exclude_bos: leave the first token of answers out of the generator's loss.
        label_smoothing: share of each target token that is spread over the vocabulary, in the
            generator's loss (and through it in the encoders' with ``marginal``).
        vocab_size: entries of the generator's vocabulary; needed for smoothing.
        contrastive_weight: factor on InfoNCE over relevant passages, which `gradcache.rag` adds.

    Raises:
        ValueError: an unknown name, ``marginal`` with ``fid``, or smoothing out of its range.
    """

    answer: str = "rag_sequence"
    retriever: str = "marginal"
    retriever_weight: float = 1.0
    reader_temperature: float = 1.0
    exclude_bos: bool = False
    label_smoothing: float = 0.0
    vocab_size: int = 0
    contrastive_weight: float = 0.0

    def __post_init__(self) -> None:
        if self.answer not in ("rag_sequence", "rag_token", "fid"):
            raise ValueError(f"answer: got {self.answer!r}")
        if self.retriever not in ("marginal", "emdr2", "pdist", "loop", "adist"):
            raise ValueError(f"retriever: got {self.retriever!r}")
        if self.answer == "fid" and self.retriever == "marginal":
            raise ValueError("fid reads all documents at once: nothing is marginalised")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing: got {self.label_smoothing}, expected 0 to below 1")
        if self.label_smoothing and self.vocab_size < 1:
            raise ValueError("label_smoothing needs vocab_size")

    @property
    def reads_apart(self) -> bool:
        """Whether documents must be read by themselves beside what the generator learns from."""
        return self.answer == "fid" and self.retriever in ("emdr2", "pdist")

    @property
    def leaves_out(self) -> bool:
        """Whether documents must be read together, each left out in turn."""
        return self.answer == "fid" and self.retriever == "loop"

    @property
    def watches(self) -> bool:
        """Whether the generator's attention to the documents is asked for."""
        return self.retriever == "adist"

    @property
    def vocabulary(self) -> Vocabulary:
        """What the generator must tell of each token beside the target's log-probability."""
        if not self.label_smoothing:
            return "none"
        return "all" if self.answer == "rag_token" else "sum"

    def __call__(
        self,
        scores_BK: torch.Tensor,
        said_NX: torch.Tensor,
        pair_BK: torch.Tensor,
        target_mask_BT: torch.Tensor,
        *,
        readings_NT: torch.Tensor | None = None,
        attention_BK: torch.Tensor | None = None,
    ) -> RagTerms:
        """Compute the terms of B questions.

        Args:
            scores_BK: floating point, divided by the temperature; -inf for a missing document.
            said_NX: the generator's, one row a pair; for ``fid`` one row a question. Of each of the
                answer's tokens in turn: the target's log-probability, and behind it what
                ``vocabulary`` asks for: the ``sum`` of the log-probabilities of all entries, or
                ``all`` of them.
            pair_BK: int64, row of each document in ``said_NX`` (``readings_NT`` for ``fid``); -1
                for a missing one.
            target_mask_BT: bool.
            readings_NT: what ``reads_apart`` or ``leaves_out`` ask for, without gradient.
            attention_BK: what ``watches`` asks for; see `pixelrag.losses.reader.adist`.
        """
        num_targets = target_mask_BT.shape[1]
        said_NTW = said_NX.unflatten(1, (-1, self._width))
        said_NTW = pad(said_NTW, (0, 0, 0, num_targets - said_NTW.shape[1]))
        if self.answer == "fid":
            # One reading a question, certain a priori.
            row_B1 = torch.arange(len(scores_BK), device=pair_BK.device)[:, None]
            certain_B1 = torch.zeros_like(scores_BK[:, :1])
            answer_B = self._generator(certain_B1, said_NTW, row_B1, target_mask_BT)
            apart_NT = readings_NT
        else:
            used_BK = scores_BK if self.retriever == "marginal" else scores_BK.detach()
            answer_B = self._generator(used_BK, said_NTW, pair_BK, target_mask_BT)
            apart_NT = said_NTW[..., 0]
        apart_BKT = answers_BK = None
        if apart_NT is not None:
            apart_NT = pad(apart_NT, (0, num_targets - apart_NT.shape[1]))
            apart_BKT = _chosen(apart_NT, pair_BK)
            answers_BK = answer_log_probs(apart_BKT, target_mask_BT)
        retriever_B = self._retriever(
            scores_BK, apart_BKT, answers_BK, attention_BK, target_mask_BT
        )
        prior_BK = document_log_prior(scores_BK).detach()
        posterior_BK = prior_BK
        if answers_BK is not None and not self.leaves_out:
            posterior_BK = document_log_prior(posterior_BK + answers_BK.detach())
        return RagTerms(
            answer_B + self.retriever_weight * retriever_B,
            answer_B.detach(),
            retriever_B.detach(),
            _entropy(prior_BK),
            _entropy(posterior_BK),
        )

    @property
    def _width(self) -> int:
        return {"none": 1, "sum": 2, "all": 1 + self.vocab_size}[self.vocabulary]

    def _generator(
        self,
        scores_BK: torch.Tensor,
        said_NTW: torch.Tensor,
        pair_BK: torch.Tensor,
        target_mask_BT: torch.Tensor,
    ) -> torch.Tensor:
        """The generator's loss, [B], smoothed where that is wanted."""
        log_probs_BKT = _chosen(said_NTW[..., 0], pair_BK)
        share, size = self.label_smoothing, self.vocab_size
        if self.answer == "rag_token":
            nll_B = rag_token_nll(
                log_probs_BKT, scores_BK, target_mask_BT, exclude_bos=self.exclude_bos
            )
            if not share:
                return nll_B
            vocab_B = rag_token_vocab_nll(said_NTW[..., 1:], pair_BK, scores_BK, target_mask_BT)
            return (1.0 - share) * nll_B + share / size * vocab_B
        smoothing = None
        if share:
            smoothing = Smoothing(share, size, _chosen(said_NTW[..., 1], pair_BK))
        return rag_sequence_nll(
            log_probs_BKT,
            scores_BK,
            target_mask_BT,
            exclude_bos=self.exclude_bos,
            smoothing=smoothing,
        )

    def _retriever(
        self,
        scores_BK: torch.Tensor,
        apart_BKT: torch.Tensor | None,
        answers_BK: torch.Tensor | None,
        attention_BK: torch.Tensor | None,
        target_mask_BT: torch.Tensor,
    ) -> torch.Tensor:
        """The encoders' own loss, [B]; 0 where they share the generator's."""
        if self.retriever == "emdr2" and self.answer == "rag_token":
            assert apart_BKT is not None  # by what `needs` asks for
            return emdr2_per_token(scores_BK, apart_BKT, target_mask_BT)
        if self.retriever == "adist":
            assert attention_BK is not None
            return adist(scores_BK, attention_BK, temperature=self.reader_temperature)
        if self.retriever == "marginal":
            return torch.zeros_like(scores_BK[:, 0])
        assert answers_BK is not None
        if self.retriever == "emdr2":
            return emdr2(scores_BK, answers_BK)
        if self.retriever == "pdist":
            return pdist(scores_BK, answers_BK, temperature=self.reader_temperature)
        left_out_BK = answers_BK if self.leaves_out else _without_each(scores_BK, answers_BK)
        return loop(scores_BK, left_out_BK, temperature=self.reader_temperature)


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


def _chosen(said_NT: torch.Tensor, pair_BK: torch.Tensor) -> torch.Tensor:
    """[B, K, T]; a missing pair holds zeros and takes no gradient."""
    return said_NT[pair_BK.clamp_min(0)].masked_fill((pair_BK < 0)[:, :, None], 0.0)


def _entropy(log_p_BK: torch.Tensor) -> torch.Tensor:
    p_BK = log_p_BK.exp()
    return -(p_BK * log_p_BK.masked_fill(p_BK == 0, 0.0)).sum(dim=1)
