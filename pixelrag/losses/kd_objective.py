"""What a distillation loss measures: the divergences between teacher and student.

Notation: p is the teacher's distribution over outcomes v, q the student's, both at temperature T
(soft-max of logits / T). Each function gets both with their logarithms, [R, V], and returns its
value, [R], and the gradient of that value in the student's logits / T, [R, V]. With g_v the
derivative of the value in log q_v, that gradient is g_v - q_v * sum_w g_w, because log q is a
log-soft-max. A value counts T^2 in the loss (Hinton et al. 2015, section 2.1), which keeps the
gradient's size independent of T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

Kind = Literal["forward_kl", "reverse_kl", "jsd", "skewed_kl", "skewed_reverse_kl"]
Tail = Literal["bucket", "renormalise"]


@dataclass(frozen=True, slots=True)
class Objective:
    """Total = ce_weight * CE + (1 - ce_weight) * T^2 * divergence.

    Args:
        kind: `forward_kl`, `reverse_kl`, `jsd`, `skewed_kl` or `skewed_reverse_kl`; the
            functions below hold the formulas.
        temperature: T, above 0; divides both models' logits in the divergence, not in the CE.
        ce_weight: the playbook's alpha, 0 to 1.
        beta: the teacher's share in the mixture of `jsd`, between 0 and 1.
        skew: what share of the mixture of the skewed kinds is the distribution that is compared
            with it, 0 to below 1.
        top_k: compare only on the teacher's k likeliest tokens; None = the whole vocabulary.
        tail: what becomes of the rest. `bucket` adds it up to one more outcome in both
            distributions, so probability that the student puts outside costs; `renormalise`
            drops it from both, so that only the ratios among the k count.

    Raises:
        ValueError: a value outside its range.
    """

    kind: Kind = "forward_kl"
    temperature: float = 1.0
    ce_weight: float = 0.0
    beta: float = 0.5
    skew: float = 0.1
    top_k: int | None = None
    tail: Tail = "bucket"

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("kind", self.kind in get_args(Kind), f"one of {', '.join(get_args(Kind))}"),
            ("temperature", 0 < self.temperature < float("inf"), "a number above 0"),
            ("ce_weight", 0 <= self.ce_weight <= 1, "0 to 1"),
            ("beta", 0 < self.beta < 1, "between 0 and 1; use forward_kl or reverse_kl for them"),
            ("skew", 0 <= self.skew < 1, "0 to below 1"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1, or none"),
            ("tail", self.tail in get_args(Tail), f"one of {', '.join(get_args(Tail))}"),
        ):
            if not valid:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected {expected}")


class Pair(NamedTuple):
    """Student (q) and teacher (p) over the same outcomes, [R, V]; p and log_p may be overwritten.

    Probabilities may underflow to 0; logarithms are finite.
    """

    q: torch.Tensor
    log_q: torch.Tensor
    p: torch.Tensor
    log_p: torch.Tensor


def divergence(pair: Pair, objective: Objective) -> tuple[torch.Tensor, torch.Tensor]:
    """Evaluate the objective's kind.

    Returns:
        The value [R, 1] and its gradient in the student's logits / T [R, V], which may share
        memory with ``pair.p`` or ``pair.log_p``.
    """
    match objective.kind:
        case "forward_kl":
            return forward_kl(pair)
        case "reverse_kl":
            return reverse_kl(pair)
        case "jsd":
            return generalised_jsd(pair, objective.beta)
        case "skewed_kl":
            return skewed_kl(pair, objective.skew)
        case "skewed_reverse_kl":
            return skewed_reverse_kl(pair, objective.skew)


def forward_kl(pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(p || q) = sum_v p_v (log p_v - log q_v); gradient q - p.

    Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2.
    """
    q, log_q, p, log_p = pair
    value = _row_sum(log_p.sub_(log_q).mul_(p))
    return value, torch.sub(q, p, out=p)


def reverse_kl(pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(q || p) = sum_v q_v (log q_v - log p_v); gradient q (log q - log p - KL).

    Gu et al. 2024, "MiniLLM", section 2, here token by token.
    """
    q, log_q, p, log_p = pair
    ratio = torch.sub(log_q, log_p, out=log_p)
    value = _row_sum(torch.mul(q, ratio, out=p))
    return value, ratio.sub_(value).mul_(q)


def generalised_jsd(pair: Pair, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q.

    Gradient (1 - beta) q (log q - log m - KL(q || m)). Agarwal et al. 2024, "On-Policy
    Distillation of Language Models" (GKD), section 2. Divided by beta it tends to KL(p || q)
    for beta -> 0, divided by 1 - beta to KL(q || p) for beta -> 1.
    """
    q, log_q, p, log_p = pair
    log_m = _log(torch.lerp(q, p, beta))
    teacher_part = _row_sum(log_p.sub_(log_m).mul_(p))
    ratio = torch.sub(log_q, log_m, out=log_m)
    student_part = _row_sum(torch.mul(q, ratio, out=p))
    value = beta * teacher_part + (1 - beta) * student_part
    return value, ratio.sub_(student_part).mul_(q).mul_(1 - beta)


def skewed_kl(pair: Pair, skew: float) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(p || m), m = skew p + (1 - skew) q; with r = p q / m, gradient (1-skew) (q sum(r) - r).

    Ko et al. 2024, "DistiLLM", section 3.1. Skew 0 is the forward KL.
    """
    q, _, p, log_p = pair
    mixture = _positive(torch.lerp(q, p, skew))
    r = torch.mul(p, q).div_(mixture)
    value = _row_sum(log_p.sub_(mixture.log_()).mul_(p))
    return value, torch.mul(q, _row_sum(r), out=p).sub_(r).mul_(1 - skew)


def skewed_reverse_kl(pair: Pair, skew: float) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(q || m), m = skew q + (1 - skew) p.

    With h = log q - log m - skew q / m, gradient q (h - sum_v q_v h_v). Ko et al. 2024,
    "DistiLLM", section 3.1. Skew 0 is the reverse KL.
    """
    q, log_q, p, _ = pair
    mixture = _positive(torch.lerp(p, q, skew))
    share = torch.div(q, mixture, out=p).mul_(skew)
    ratio = torch.sub(log_q, mixture.log_(), out=mixture)
    value = _row_sum(ratio * q)
    h = ratio.sub_(share)
    return value, h.sub_(_row_sum(h * q)).mul_(q)


def _row_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1, keepdim=True)


def _positive(mixture: torch.Tensor) -> torch.Tensor:
    # Both probabilities underflow far in the tail; their terms vanish, 0 * log 0 would not.
    return mixture.clamp_min_(torch.finfo(mixture.dtype).tiny)


def _log(mixture: torch.Tensor) -> torch.Tensor:
    return _positive(mixture).log_()
