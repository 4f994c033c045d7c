"""The distillation loss against the ways others compute it: time, memory, error of the gradient.

    python -m benchmarks.kd_loss --dtype fp32 --vocab 151936 --tokens 2048 --output FILE.jsonl

All candidates compute 0.3 CE + 0.7 T^2 KL(teacher || student) at T = 2 from final hidden states
and lm_head weights, with the gradients of the student's hidden states and weight:

naive             logits of all tokens, log-soft-maxes in fp32, autograd
seed-256          the same logits, the loss over them in chunks of tokens (the playbook's way)
liger-256         liger-kernel's chunked JSD at beta 0 (pip install --no-deps liger-kernel triton)
liger-compiled    the same through torch.compile, its default
trl-256           TRL's chunked divergence, re-expressed: labelled tokens first, fp32 products of
                  chunks, recomputed in the backward pass
exact-C, fast-C   `distill_loss` with chunk C; fast-compiled-C with its kernel compiled

Each timing runs in a fresh process, after one call that is not measured, and all candidates take
turns. A ratio is that of one round. Memory is the peak of the resident set above the inputs.

Errors are relative L2 distances to float64 autograd on the same (rounded) inputs, of the worse of
the two gradients, for the mixture above and for KL alone at several distances of the two models.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks import common
from pixelrag.losses.kd import Head, Objective, Projected, distill_loss

TEMPERATURE, CE_WEIGHT = 2.0, 0.3
STUDENT_WIDTH, TEACHER_WIDTH = 512, 1024
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
# Standard deviations of the difference of the models' logits.
DISTANCES = (2.0, 0.6, 0.2)
Inputs = dict[str, torch.Tensor]
Loss = Callable[[Inputs, float], torch.Tensor]


def make_inputs(
    tokens: int, vocab: int, dtype: torch.dtype, *, supervised: float, distance: float
) -> Inputs:
    """Two models whose logits differ by noise of a standard deviation of ``distance``.

    The first half of the teacher's width repeats the student's, the second half is the noise.
    """
    torch.manual_seed(0)
    width, noise = STUDENT_WIDTH, TEACHER_WIDTH - STUDENT_WIDTH
    h = torch.randn(tokens, width)
    w = torch.randn(vocab, width).mul_(3 / width**0.5)
    labels = torch.randint(0, vocab, (tokens,))
    labels[torch.rand(tokens) >= supervised] = -100
    ht = torch.cat([h, torch.randn(tokens, noise)], 1).to(dtype)
    wt = torch.cat([w, torch.randn(vocab, noise).mul_(distance / noise**0.5)], 1).to(dtype)
    return {
        "h": h.to(dtype).requires_grad_(), "w": w.to(dtype).requires_grad_(),
        "ht": ht, "wt": wt, "labels": labels,
    }  # fmt: skip


def _logit_loss(
    z: torch.Tensor, t: torch.Tensor, labels: torch.Tensor, ce_weight: float
) -> torch.Tensor:
    wide = torch.promote_types(z.dtype, torch.float32)
    z, t = z.to(wide), t.to(wide)
    ce = F.cross_entropy(z, labels, reduction="sum", ignore_index=-100) if ce_weight else 0.0
    kl = F.kl_div(
        F.log_softmax(z / TEMPERATURE, -1), F.log_softmax(t / TEMPERATURE, -1),
        reduction="none", log_target=True,
    )  # fmt: skip
    kd = (kl.sum(-1) * (labels != -100)).sum()
    return ce_weight * ce + (1 - ce_weight) * TEMPERATURE**2 * kd


def naive(x: Inputs, ce_weight: float) -> torch.Tensor:
    """All logits at once."""
    with torch.no_grad():
        t = x["ht"] @ x["wt"].t()
    loss = _logit_loss(x["h"] @ x["w"].t(), t, x["labels"], ce_weight)
    return loss / (x["labels"] != -100).sum()


def seed_chunked(x: Inputs, ce_weight: float, chunk: int = 256) -> torch.Tensor:
    """All logits, the loss in chunks of them."""
    with torch.no_grad():
        t = x["ht"] @ x["wt"].t()
    parts = zip((x["h"] @ x["w"].t()).split(chunk), t.split(chunk), x["labels"].split(chunk),
                strict=True)  # fmt: skip
    return sum(_logit_loss(*part, ce_weight) for part in parts) / (x["labels"] != -100).sum()


def trl(x: Inputs, ce_weight: float, chunk: int = 256) -> torch.Tensor:
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


def liger(chunk: int, *, compiled: bool) -> Loss:
    """The package's own loss; T^2 goes into its weight."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    def run(x: Inputs, ce_weight: float) -> torch.Tensor:
        loss = LigerFusedLinearJSDLoss(
            weight_hard_loss=ce_weight, weight_soft_loss=(1 - ce_weight) * TEMPERATURE**2, beta=0.0,
            temperature=TEMPERATURE, compiled=compiled, chunk_size=chunk,
        )  # fmt: skip
        return loss(x["h"], x["w"], x["ht"], x["wt"], x["labels"])

    return run


def ours(chunk: int, precision: str, *, compiled: bool) -> Loss:
    """This project's."""

    def run(x: Inputs, ce_weight: float) -> torch.Tensor:
        return distill_loss(
            Projected(x["h"], Head(x["w"])), Projected(x["ht"], Head(x["wt"])), x["labels"],
            Objective("forward_kl", TEMPERATURE, ce_weight), chunk_size=chunk, precision=precision,
            num_tokens=int((x["labels"] != -100).sum()), compile_kernel=compiled,
        ).total  # fmt: skip

    return run


def candidate(name: str) -> Loss:
    """Look a candidate up by its name on the command line."""
    kind, _, chunk = name.rpartition("-")
    size = int(chunk)
    match kind:
        case "naive":
            return naive
        case "seed":
            return lambda x, weight: seed_chunked(x, weight, size)
        case "trl":
            return lambda x, weight: trl(x, weight, size)
        case "liger" | "liger-compiled":
            return liger(size, compiled=kind.endswith("compiled"))
        case "exact" | "fast" | "exact-compiled" | "fast-compiled":
            precision, _, compiled = kind.partition("-")
            return ours(size, precision, compiled=bool(compiled))
    raise SystemExit(f"kd_loss: no candidate is called {name}")


def measure(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """One process' measurement: a call to warm up, then the measured ones."""
    dtype = DTYPES[arguments.dtype]
    x = make_inputs(
        arguments.tokens, arguments.vocab, dtype, supervised=arguments.supervised, distance=0.6
    )
    loss = candidate(name)
    torch.ones(64, 64).requires_grad_().sum().backward()  # start autograd's threads
    taken = []
    added = 0.0
    for call in range(1 + arguments.calls):
        x["h"].grad = x["w"].grad = None
        common.reset_peak()
        before = common.resident_mib()
        wall, cpu = time.perf_counter(), time.process_time()
        value = loss(x, CE_WEIGHT)
        value.backward()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if call:
            taken.append((cpu, wall))
            added = common.peak_mib() - before
        del value
    cpu, wall = min(taken)
    return {"cpu": cpu, "wall": wall, "added_mib": added}


def errors(names: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Distances of every candidate's gradients from float64 autograd."""
    rows = []
    for distance, ce_weight in [(0.6, CE_WEIGHT), *((d, 0.0) for d in DISTANCES)]:
        dtype = DTYPES[arguments.dtype]
        x = make_inputs(
            arguments.error_tokens, arguments.vocab, dtype, supervised=1.0, distance=distance
        )
        wide = {
            k: v.detach().double().requires_grad_(v.requires_grad) if k != "labels" else v
            for k, v in x.items()
        }
        value = naive(wide, ce_weight)
        expected = torch.autograd.grad(value, (wide["h"], wide["w"]))
        row = {"kind": "error", "ce_weight": ce_weight, "loss": float(value.detach())}
        if ce_weight == 0:
            row["kl"] = row["loss"] / TEMPERATURE**2
        for name in names:
            got = torch.autograd.grad(candidate(name)(x, ce_weight), (x["h"], x["w"]))
            row[name] = max(
                float((g.double() - e).norm() / e.norm())
                for g, e in zip(got, expected, strict=True)
            )
        rows.append(row)
    return rows


def main(argv: list[str]) -> None:
    """Run the rounds and print a row of JSON for each measurement, then the ratios to naive."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kd_loss", description=__doc__)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--supervised", type=float, default=1.0, help="share of labelled tokens")
    parser.add_argument("--error-tokens", type=int, default=256, help="0: no errors")
    parser.add_argument("--calls", type=int, default=1, help="measured calls of a process")
    parser.add_argument("--rounds", type=int, default=2, help="0: only the errors")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--candidates", default="naive-0,exact-256,exact-512")
    parser.add_argument("--output", type=Path, help="JSONL file to write")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, arguments)))
        return
    names = arguments.candidates.split(",")
    command = ["benchmarks.kd_loss", *argv]
    results = common.Results(arguments.output, arguments.threads, command)
    passed = [
        f"--{key}={getattr(arguments, key)}"
        for key in ("dtype", "vocab", "tokens", "supervised", "calls", "threads")
    ]
    rounds: list[dict[str, dict[str, float]]] = []
    for turn in range(arguments.rounds):
        rounds.append({})
        for name in names if turn % 2 == 0 else names[::-1]:
            arguments_of_one = [*passed, f"--worker={name}"]
            rounds[-1][name] = common.fresh_process("benchmarks.kd_loss", arguments_of_one)
            results.add({"kind": "call", "round": turn, "candidate": name, **rounds[-1][name]})
    for name in names if rounds else ():
        mine = [r[name] for r in rounds]
        row = {"kind": "summary", "candidate": name}
        row |= {k: round(min(m[k] for m in mine), 2) for k in ("cpu", "wall", "added_mib")}
        for key in ("cpu", "wall", "added_mib"):
            ratio = [r[name][key] / r[names[0]][key] for r in rounds]
            row[f"{key}_to_{names[0]}"] = round(statistics.median(ratio), 3)
        results.add(row)
    if arguments.error_tokens:
        for row in errors(names, arguments):
            results.add({k: float(f"{v:.3g}") if isinstance(v, float) else v
                         for k, v in row.items()})  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
