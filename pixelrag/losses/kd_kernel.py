"""CE and divergence of a block of tokens, and their gradient, in place of the logits.

A block is so small that its passes stay in the cache: each of them reads and writes whole rows of
the vocabulary, some fifteen times in all, which from main memory would take longer than the
matrix products. Arithmetic is fp32, or fp64 for fp64 logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from pixelrag.losses.kd_objective import Objective, Pair, divergence


@dataclass(frozen=True, slots=True)
class Form:
    """How a model's logits come from its products: cap(scale * (products + bias)).

    Args:
        bias_V: [V] or None.
        scale: a factor.
        soft_cap: see `Head`; None = no cap.
    """

    bias_V: torch.Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """What is the same for all blocks of a call.

    Args:
        objective: see there.
        ce_scale: weight of one token's CE in the gradient.
        kd_scale: weight of one token's divergence in the gradient, without T^2.
        student, teacher: how their logits are formed.
        want_grad: form the gradient.
        count_top1: count the tokens on which both models' likeliest token is the same.
    """

    objective: Objective
    ce_scale: float
    kd_scale: float
    student: Form
    teacher: Form
    want_grad: bool
    count_top1: bool


class TopKRows(NamedTuple):
    """A teacher known by its k likeliest tokens: ids [R, K] int64 and log-probabilities [R, K]."""

    ids: torch.Tensor
    log_probs: torch.Tensor


class BlockTerms(NamedTuple):
    """Sums over a block's tokens: CE, divergence (without T^2), equal top-1 tokens; scalars."""

    ce: torch.Tensor
    kd: torch.Tensor
    top1: torch.Tensor


def block_terms(
    student_RV: torch.Tensor,
    teacher: torch.Tensor | TopKRows | None,
    labels_R: torch.Tensor,
    spec: BlockSpec,
    scratch_a_RV: torch.Tensor,
    scratch_b_RV: torch.Tensor,
) -> BlockTerms:
    """Turn logits into the loss' gradient in them.

    Args:
        student_RV: [R, V] fp32 or fp64, products of hidden states and head; holds the gradient in
            them afterwards.
        teacher: [R, V] likewise, overwritten; or its top k; or None, then there is no divergence.
        labels_R: [R] int64, all of them tokens.
        spec: see there.
        scratch_a_RV, scratch_b_RV: like ``student_RV``, overwritten.

    Returns:
        Unweighted sums over the block.
    """
    temperature = spec.objective.temperature
    _finish_logits(student_RV, spec.student, temperature)
    log_q, q, lse_R1 = _log_softmax(student_RV, scratch_a_RV)
    label_log_q = log_q.gather(1, labels_R[:, None])
    zero = student_RV.new_zeros(())
    kd = top1 = zero
    kd_gradient = None
    if teacher is not None:
        if isinstance(teacher, torch.Tensor):
            _finish_logits(teacher, spec.teacher, temperature)
            log_p, p, _ = _log_softmax(teacher, scratch_b_RV)
            best = log_p.argmax(-1, keepdim=True) if spec.count_top1 else None
            pair = Pair(q, log_q, p, log_p)
        else:
            best = teacher.ids.gather(1, teacher.log_probs.argmax(-1, keepdim=True))
            pair = None
        if best is not None and spec.count_top1:
            top1 = (log_q.gather(1, best) >= log_q.amax(-1, keepdim=True)).sum().to(kd.dtype)
        if pair is None or spec.objective.top_k is not None:
            value, kd_gradient = _restricted(q, log_q, pair, teacher, spec.objective, scratch_b_RV)
        else:
            value, kd_gradient = divergence(pair, spec.objective)
        kd = value.sum()
    weights, shift, total_R1 = _at_temperature_one(q, log_q, temperature)
    ce = (total_R1.log() + temperature * (shift - label_log_q)).sum()
    if spec.want_grad:
        _gradient(student_RV, lse_R1, weights, total_R1, labels_R, kd_gradient, spec)
    return BlockTerms(ce, kd, top1)


def _finish_logits(z: torch.Tensor, form: Form, temperature: float) -> None:
    """From products to logits / T, in place."""
    factor = form.scale
    if form.bias_V is not None:
        z.add_(form.bias_V)
    if form.soft_cap is not None:
        z.mul_(form.scale / form.soft_cap).tanh_()
        factor = form.soft_cap
    if factor != temperature:
        z.mul_(factor / temperature)


def _log_softmax(
    u: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Overwrite u by its log-soft-max and probs by the soft-max; also return log-sum-exp."""
    # Not torch.softmax: on CPUs its exp is good to 20 units in the last place only, which shows
    # in the difference of two close distributions.
    largest = u.amax(-1, keepdim=True)
    torch.exp(u.sub_(largest), out=probs)
    total = probs.sum(-1, keepdim=True)
    probs.mul_(1 / total)
    log_total = total.log()
    return u.sub_(log_total), probs, largest + log_total


def _at_temperature_one(
    q: torch.Tensor, log_q: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor | float, torch.Tensor]:
    """Overwrite q by exp(T (log q - shift)), which is the soft-max at T = 1 but for its sum."""
    shift: torch.Tensor | float = 0.0
    if temperature == 2:
        q.mul_(q)  # a product costs a twentieth of an exp
    elif temperature != 1:
        shift = log_q.amax(-1, keepdim=True)
        torch.sub(log_q, shift, out=q).mul_(temperature).exp_()
    return q, shift, q.sum(-1, keepdim=True)


def _gradient(
    student: torch.Tensor,
    lse_R1: torch.Tensor,
    weights: torch.Tensor,
    total_R1: torch.Tensor,
    labels_R: torch.Tensor,
    kd_gradient: torch.Tensor | None,
    spec: BlockSpec,
) -> None:
    temperature, form = spec.objective.temperature, spec.student
    ce_scale = spec.ce_scale * form.scale
    # T^2 of the loss, 1 / T of logits / T.
    kd_scale = spec.kd_scale * temperature * form.scale
    weights.mul_(ce_scale / total_R1)
    weights.scatter_add_(1, labels_R[:, None], torch.full_like(total_R1, -ce_scale))
    if form.soft_cap is not None:
        # student holds log q: rebuild the capped logits, then d cap tanh(z / cap) / dz.
        slope = student.add_(lse_R1).mul_(temperature / form.soft_cap).square_().neg_().add_(1)
        if kd_gradient is not None:
            weights.add_(kd_gradient, alpha=kd_scale)
        slope.mul_(weights)
    elif kd_gradient is not None:
        torch.add(weights, kd_gradient, alpha=kd_scale, out=student)
    else:
        student.copy_(weights)


def _restricted(
    q: torch.Tensor,
    log_q: torch.Tensor,
    pair: Pair | None,
    cached: torch.Tensor | TopKRows,
    objective: Objective,
    out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The divergence over K tokens and, as a bucket, all others together.

    An outcome's logit is that of its token, or log-sum-exp over the tokens of the bucket, whose
    derivatives are 1 and q_v / q_bucket: that carries the gradient back to the vocabulary.
    """
    tiny = torch.finfo(q.dtype).tiny
    if pair is not None:
        ids = pair.p.topk(min(objective.top_k or 1, q.shape[1]), sorted=False).indices
        log_p = pair.log_p.gather(1, ids)
        tail_p = pair.p.scatter_(1, ids, 0.0).sum(-1, keepdim=True)
    else:
        ids, log_p = cached
        log_p = log_p.to(q.dtype)
        tail_p = 1 - log_p.exp().sum(-1, keepdim=True)
    log_q_k = log_q.gather(1, ids)
    if objective.tail == "renormalise":
        log_p, log_q_k = log_p.log_softmax(-1), log_q_k.log_softmax(-1)
        value, gradient = divergence(Pair(log_q_k.exp(), log_q_k, log_p.exp(), log_p), objective)
        return value, out.zero_().scatter_(1, ids, gradient)
    # Added up, not 1 - sum: the student's tail can be far below fp32's resolution at 1.
    tail_q = out.copy_(q).scatter_(1, ids, 0.0).sum(-1, keepdim=True).clamp_min_(tiny)
    log_q_k = torch.cat([log_q_k, tail_q.log()], 1)
    log_p = torch.cat([log_p, tail_p.clamp_min(tiny).log()], 1)
    value, gradient = divergence(Pair(log_q_k.exp(), log_q_k, log_p.exp(), log_p), objective)
    out.mul_(gradient[:, -1:] / tail_q)
    return value, out.scatter_(1, ids, gradient[:, :-1])
