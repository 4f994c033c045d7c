"""The distillation loss written down naively: whole logits, autograd, whatever dtype comes in."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from pixelrag.losses.kd import Head, Logits, Lora, Objective, Projected


def logits_of(model: Projected | Logits, vocab_size: int) -> torch.Tensor:
    """All logits of a model, real vocabulary only; dropout is not applied."""
    if isinstance(model, Logits):
        return model.logits_TV[:, :vocab_size]
    head = model.head
    z = model.hidden_TH @ head.weight_VH.t()
    if head.bias_V is not None:
        z = z + head.bias_V
    if head.lora is not None:
        z = z + head.lora.scaling * (model.hidden_TH @ head.lora.a_RH.t() @ head.lora.b_VR.t())
    z = z * head.logit_scale
    if head.soft_cap is not None:
        z = head.soft_cap * torch.tanh(z / head.soft_cap)
    return z[:, :vocab_size]


def _coarse(log_q, log_p, objective):
    if objective.top_k is None:
        return log_q, log_p
    ids = log_p.topk(min(objective.top_k, log_p.shape[1]), dim=-1).indices
    best_q, best_p = log_q.gather(1, ids), log_p.gather(1, ids)
    if objective.tail == "renormalise":
        return best_q.log_softmax(-1), best_p.log_softmax(-1)
    others = torch.ones_like(log_q, dtype=torch.bool).scatter(1, ids, False)

    def with_bucket(best, log_probs):
        tail = log_probs.masked_fill(~others, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat([best, tail], 1)

    return with_bucket(best_q, log_q), with_bucket(best_p, log_p)


def divergence_of(log_q, log_p, objective: Objective) -> torch.Tensor:
    """Sum over rows of the divergence of two log-distributions."""
    log_q, log_p = _coarse(log_q, log_p, objective)
    q, p = log_q.exp(), log_p.exp()

    def kl(a, b):
        return torch.where(a > 0, a * (a.log() - b.log()), torch.zeros_like(a)).sum()

    beta, skew = objective.beta, objective.skew
    match objective.kind:
        case "forward_kl":
            return (p * (log_p - log_q)).nan_to_num().sum()
        case "reverse_kl":
            return (q * (log_q - log_p)).nan_to_num().sum()
        case "jsd":
            m = beta * p + (1 - beta) * q
            return beta * kl(p, m) + (1 - beta) * kl(q, m)
        case "skewed_kl":
            return kl(p, skew * p + (1 - skew) * q)
        case "skewed_reverse_kl":
            return kl(q, skew * q + (1 - skew) * p)
    raise AssertionError(objective.kind)


def naive(student, teacher, labels_T, objective, *, num_tokens, vocab_size):
    """(total, ce, kd) with a graph."""
    valid = labels_T != -100
    z = logits_of(student, vocab_size)[valid]
    t = logits_of(teacher, vocab_size)[valid].detach()
    temperature = objective.temperature
    ce = F.cross_entropy(z, labels_T[valid], reduction="sum") / num_tokens
    kd = divergence_of((z / temperature).log_softmax(-1), (t / temperature).log_softmax(-1),
                       objective)  # fmt: skip
    kd = kd * temperature**2 / num_tokens
    return objective.ce_weight * ce + (1 - objective.ce_weight) * kd, ce, kd


def make_models(
    *, tokens=37, vocab=50, student_rows=56, teacher_rows=59, rank=3, dtype=torch.float64, seed=0,
    bias=True, lora=True, soft_cap=None, logit_scale=1.0,
):  # fmt: skip
    """A student with all the trimmings, whose tensors need gradients, and a wider teacher."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape, grad=True):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        return x.requires_grad_(grad)

    adapter = Lora(tensor(rank, 12), tensor(student_rows, rank), 0.5) if lora else None
    student = Projected(
        tensor(tokens, 12),
        Head(tensor(student_rows, 12), tensor(student_rows) if bias else None, adapter,
             logit_scale, soft_cap),
    )  # fmt: skip
    teacher = Projected(
        tensor(tokens, 20, grad=False),
        Head(tensor(teacher_rows, 20, grad=False), tensor(teacher_rows, grad=False), soft_cap=2.0),
    )
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    return student, teacher, labels


def trained(student: Projected | Logits) -> dict[str, torch.Tensor]:
    """The student's tensors that need a gradient, by name."""
    if isinstance(student, Logits):
        tensors = {"logits": student.logits_TV}
    else:
        head = student.head
        tensors = {"hidden": student.hidden_TH, "weight": head.weight_VH, "bias": head.bias_V}
        if head.lora is not None:
            tensors |= {"a": head.lora.a_RH, "b": head.lora.b_VR}
    return {k: v for k, v in tensors.items() if v is not None and v.requires_grad}


def gradients(loss, student) -> dict[str, torch.Tensor]:
    """Gradients of a scalar in the student's tensors."""
    tensors = trained(student)
    return dict(zip(tensors, torch.autograd.grad(loss, list(tensors.values())), strict=True))


def double(model: Projected) -> Projected:
    """The same numbers in float64, as new leaves."""

    def wide(x):
        return None if x is None else x.detach().double().requires_grad_(x.requires_grad)

    head = model.head
    lora = head.lora and replace(head.lora, a_RH=wide(head.lora.a_RH), b_VR=wide(head.lora.b_VR))
    head = replace(head, weight_VH=wide(head.weight_VH), bias_V=wide(head.bias_V), lora=lora)
    return Projected(wide(model.hidden_TH), head)


def assert_close(
    got: torch.Tensor, expected: torch.Tensor, *, error: float, name: str = ""
) -> None:
    """Relative L2 error and ratio of norms."""
    got, expected = got.double(), expected.double()
    norm = expected.norm()
    assert norm > 0, f"{name}: the reference is zero, which would prove nothing"
    distance = float((got - expected).norm() / norm)
    ratio = float(got.norm() / norm)
    assert distance <= error, f"{name}: relative L2 error {distance:.3g}, norm ratio {ratio:.6g}"
    assert abs(ratio - 1) <= error, f"{name}: norm ratio {ratio:.6g}"
