"""The distillation loss by several implementations, from final states and heads.

`mixture` is 0.3 CE + 0.7 T^2 KL(teacher || student) at T = 2, `kl` its T^2 KL alone, both with the
gradients of the student's states and head:

pixelrag, -fast   `distill_loss`, precision exact and fast
naive             logits of all tokens, log-soft-maxes in fp32, autograd
chunked-logits    the same logits, the loss over them in chunks of tokens (the playbook's way)
liger, -compiled  liger-kernel's chunked JSD at beta 0, through torch.compile too (its default)
trl-recomputed    labelled tokens first, fp32 products of chunks, recomputed in the backward pass
trl               TRL's own chunked divergence (kl alone: it has no cross entropy)

`gradient_error` is the relative L2 distance to float64 autograd on the same rounded inputs, of the
worse of both gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from pixelrag.bench.cases import Ready, Skipped
from pixelrag.bench.kd_chunk import Inputs, make_inputs
from pixelrag.bench.models import DTYPES
from pixelrag.bench.rows import Case
from pixelrag.config.bench import KDChunkWork, PeersConfig
from pixelrag.losses.kd import Head, Objective, Precision, Projected, distill_loss

TEMPERATURE = 2.0
CE_WEIGHTS = {"mixture": 0.3, "kl": 0.0}
NEEDS = {"liger": "liger_kernel", "liger-compiled": "liger_kernel", "trl": "trl"}
Loss = Callable[[Inputs, float, int], torch.Tensor]


def groups(config: PeersConfig) -> list[list[Case]]:
    """Candidates by objective."""
    return [
        [
            {"objective": objective, "candidate": name}
            for name in CANDIDATES
            if name != "trl" or objective == "kl"
        ]
        for objective in CE_WEIGHTS
    ]


def prepare(
    config: PeersConfig, cases: Sequence[Case], device: torch.device
) -> list[Ready | Skipped]:
    """All on the same inputs."""
    work = config.kd
    vocab, dtype, chunk = work.vocab, DTYPES[work.dtype], work.chunk
    sizes = KDChunkWork(
        tokens=work.tokens, supervised=work.supervised, student_width=work.student_width,
        teacher_width=work.teacher_width,
    )  # fmt: skip
    x = make_inputs(sizes, vocab, dtype, device)
    supervised = int((x["labels"] != -100).sum())
    flops = 2.0 * supervised * vocab * (3 * work.student_width + work.teacher_width)
    few = sizes.model_copy(update={"tokens": work.error_tokens, "supervised": 1.0})

    @cache
    def small() -> Inputs:
        return make_inputs(few, vocab, dtype, device)

    def ready(case: Case) -> Ready:
        loss, weight = CANDIDATES[str(case["candidate"])], CE_WEIGHTS[str(case["objective"])]

        def step() -> None:
            x["h"].grad = x["w"].grad = None
            loss(x, weight, chunk).backward()

        def figures() -> Mapping[str, float]:
            if not few.tokens:
                return {}
            return {"gradient_error": gradient_error(loss, small(), weight, chunk)}

        return Ready(step, work.tokens, supervised, flops, None, work.dtype, figures)

    return [ready(case) for case in cases]


def gradient_error(loss: Loss, x: Inputs, ce_weight: float, chunk: int) -> float:
    """Relative L2 distance of the worse of both gradients to float64 autograd."""
    wide = {
        k: v.detach().double().requires_grad_(v.requires_grad) if k != "labels" else v
        for k, v in x.items()
    }
    expected = torch.autograd.grad(naive(wide, ce_weight, chunk), (wide["h"], wide["w"]))
    got = torch.autograd.grad(loss(x, ce_weight, chunk), (x["h"], x["w"]))
    return max(
        float((g.double() - e).norm() / e.norm()) for g, e in zip(got, expected, strict=True)
    )


def _logit_loss(
    z: torch.Tensor, t: torch.Tensor, labels: torch.Tensor, ce_weight: float
) -> torch.Tensor:
    wide = torch.promote_types(z.dtype, torch.float32)
    z, t = z.to(wide), t.to(wide)
    kl = F.kl_div(
        F.log_softmax(z / TEMPERATURE, -1), F.log_softmax(t / TEMPERATURE, -1),
        reduction="none", log_target=True,
    )  # fmt: skip
    kd = TEMPERATURE**2 * (kl.sum(-1) * (labels != -100)).sum()
    if not ce_weight:
        return kd
    ce = F.cross_entropy(z, labels, reduction="sum", ignore_index=-100)
    return ce_weight * ce + (1 - ce_weight) * kd


def ours(
    x: Inputs, ce_weight: float, chunk: int, *, precision: Precision = "exact"
) -> torch.Tensor:
    """This project's."""
    return distill_loss(
        Projected(x["h"], Head(x["w"])), Projected(x["ht"], Head(x["wt"])), x["labels"],
        Objective("forward_kl", TEMPERATURE, ce_weight), chunk_size=chunk, precision=precision,
        num_tokens=int((x["labels"] != -100).sum()),
    ).total  # fmt: skip


def naive(x: Inputs, ce_weight: float, chunk: int) -> torch.Tensor:
    """All logits at once."""
    with torch.no_grad():
        t = x["ht"] @ x["wt"].t()
    loss = _logit_loss(x["h"] @ x["w"].t(), t, x["labels"], ce_weight)
    return loss / (x["labels"] != -100).sum()


def chunked_logits(x: Inputs, ce_weight: float, chunk: int) -> torch.Tensor:
    """All logits, the loss in chunks of them."""
    with torch.no_grad():
        t = x["ht"] @ x["wt"].t()
    z = x["h"] @ x["w"].t()
    parts = zip(z.split(chunk), t.split(chunk), x["labels"].split(chunk), strict=True)
    losses = torch.stack([_logit_loss(*part, ce_weight) for part in parts])
    return losses.sum() / (x["labels"] != -100).sum()


def liger(x: Inputs, ce_weight: float, chunk: int, *, compiled: bool) -> torch.Tensor:
    """The package's own loss; T^2 goes into its weight."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=ce_weight, weight_soft_loss=(1 - ce_weight) * TEMPERATURE**2, beta=0.0,
        temperature=TEMPERATURE, compiled=compiled, chunk_size=chunk,
    )  # fmt: skip
    return loss(x["h"], x["w"], x["ht"], x["wt"], x["labels"])


def trl_recomputed(x: Inputs, ce_weight: float, chunk: int) -> torch.Tensor:
    """Checkpointed chunks of the labelled tokens, products in fp32 (TRL pull request 6526)."""
    valid = x["labels"] != -100
    order = valid.to(torch.int8).argsort(descending=True, stable=True)
    h, ht, labels = x["h"][order], x["ht"][order], x["labels"][order]
    wide = torch.promote_types(h.dtype, torch.float32)

    def part(h: torch.Tensor, ht: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        z = h.to(wide) @ x["w"].to(wide).t()
        with torch.no_grad():
            t = ht.to(wide) @ x["wt"].to(wide).t()
        return _logit_loss(z, t, labels, ce_weight)

    total = h.new_zeros((), dtype=wide)
    for start in range(0, int(valid.sum()), chunk):
        rows = slice(start, start + chunk)
        total = total + checkpoint(part, h[rows], ht[rows], labels[rows], use_reentrant=False)
    return total / valid.sum()


def trl(x: Inputs, ce_weight: float, chunk: int) -> torch.Tensor:
    """TRL's function as its trainer calls it; it picks its own tiles."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    valid = x["labels"] != -100
    divergence, _ = ChunkedDivergenceFunction.apply(
        x["h"][valid], x["w"], None, x["ht"][valid], x["wt"], None,
        0.0, TEMPERATURE, 1.0, None, 1.0, None,
    )  # fmt: skip
    return TEMPERATURE**2 * divergence.sum() / valid.sum()


CANDIDATES: dict[str, Loss] = {
    "pixelrag": ours,
    "pixelrag-fast": partial(ours, precision="fast"),
    "naive": naive,
    "chunked-logits": chunked_logits,
    "liger": partial(liger, compiled=False),
    "liger-compiled": partial(liger, compiled=True),
    "trl-recomputed": trl_recomputed,
    "trl": trl,
}
