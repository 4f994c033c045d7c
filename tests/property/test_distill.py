"""The distillation loss does not care how documents are packed, ordered, split or cut into chunks.

In float64, over random documents and losses, against dense arithmetic on one document after the
other.
"""

import functools
import random
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, note
from hypothesis import strategies as st

from pixelrag.config.distill_parts import KDLossConfig, StudentConfig, TeacherConfig
from pixelrag.losses.kd import Logits, distill_loss
from pixelrag.losses.kd_objective import Kind, Objective
from pixelrag.models.causal_load import load_frozen, load_student
from pixelrag.models.distill import DistillModel, Supervision
from pixelrag.models.rows import Rows
from pixelrag.models.teacher import LiveTeacher, TeacherRequest
from pixelrag.models.tiny_causal import save_tiny_causal
from tests.property.numerics import assert_same, tried

RANDOM = st.randoms(use_true_random=False)
CPU, VOCAB = torch.device("cpu"), 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("distill")
    save_tiny_causal(root / "student", "qwen3", padded_rows=5)
    save_tiny_causal(root / "teacher", "llama", hidden_size=48, seed=5)
    return root


@functools.cache
def _student(folder: Path):
    return load_student(StudentConfig(name_or_path=str(folder / "student")), dtype=torch.double)


@functools.cache
def _teacher(folder: Path) -> LiveTeacher:
    config = TeacherConfig(name_or_path=str(folder / "teacher"))
    return LiveTeacher(load_frozen(config, dtype=torch.double), device=CPU, student_device=CPU)


def loss_of(draw: random.Random) -> dict:
    return {
        "kind": draw.choice(get_args(Kind)),
        "temperature": draw.choice([0.5, 1.0, 2.0, 7.0]),
        "ce_weight": draw.choice([0.0, 0.3, 0.95]),
        "beta": draw.choice([0.1, 0.5]),
        "skew": draw.choice([0.0, 0.1, 0.7]),
    }


def _kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * (a.log() - b.log())).sum()


def _divergence(objective: Objective, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Of teacher p and student q, as the formulas have it."""
    s, beta = objective.skew, objective.beta
    if objective.kind == "jsd":
        mixture = beta * p + (1 - beta) * q
        return beta * _kl(p, mixture) + (1 - beta) * _kl(q, mixture)
    if objective.kind == "skewed_kl":
        return _kl(p, s * p + (1 - s) * q)
    if objective.kind == "skewed_reverse_kl":
        return _kl(q, s * q + (1 - s) * p)
    return _kl(p, q) if objective.kind == "forward_kl" else _kl(q, p)


def _dense(folder: Path, objective: Objective, documents, num_tokens) -> torch.Tensor:
    """The loss of each document by itself, written out."""
    total = torch.zeros((), dtype=torch.double)
    for ids, positions in documents:
        rows = Rows.single(ids[None])
        z = _student(folder).logits(rows)[0][positions, :VOCAB]
        with torch.no_grad():
            t = _teacher(folder).model.logits(rows)[0][positions, :VOCAB]
        temperature, w = objective.temperature, objective.ce_weight
        kd = _divergence(objective, F.softmax(t / temperature, -1), F.softmax(z / temperature, -1))
        ce = F.cross_entropy(z, ids[positions + 1], reduction="sum")
        total = total + (w * ce + (1 - w) * temperature**2 * kd) / num_tokens
    return total


def _packed(folder: Path, documents) -> tuple[Rows, torch.Tensor, torch.Tensor]:
    """Documents behind each other in one row: rows, supervised positions, labels."""
    ids = torch.cat([d for d, _ in documents])
    places = torch.cat([torch.arange(len(d)) for d, _ in documents])
    starts = torch.tensor([0, *(len(d) for d, _ in documents)]).cumsum(0).tolist()
    supervised = torch.cat([p + a for (_, p), a in zip(documents, starts, strict=False)])
    return Rows.of(ids[None], places[None]), supervised, ids[supervised + 1]


@tried(25)
@given(RANDOM)
def test_packing_order_micro_batches_and_chunks_change_nothing(folder, draw):
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    documents = []
    for _ in range(draw.randint(1, 6)):
        length = draw.randint(2, 12)
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        chosen = sorted(draw.sample(range(length - 1), draw.randint(1, length - 1)))
        documents.append((ids, torch.tensor(chosen)))
    num_tokens = sum(len(p) for _, p in documents)
    options = loss_of(draw)
    objective, student = Objective(**options), _student(folder)
    config = KDLossConfig(
        **options,
        chunk_size=draw.randint(1, 40),
        implementation=draw.choice(["fused", "logits"]),
    )
    note(f"{options} {config.chunk_size} {config.implementation} {[len(d) for d, _ in documents]}")
    model = DistillModel(student, config, vocab_size=VOCAB, half_precision=False)
    model.zero_grad()
    reference = _dense(folder, objective, documents, num_tokens)
    reference.backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model.zero_grad()
    draw.shuffle(documents)
    total = 0.0
    while documents:
        count = draw.randint(1, len(documents))
        micro, documents = documents[:count], documents[count:]
        rows, supervised_N, labels_N = _packed(folder, micro)
        answer = _teacher(folder).answer(TeacherRequest(rows, supervised_N))
        supervision = Supervision(supervised_N, labels_N, answer, num_tokens)
        loss = model("student", rows=rows, supervision=supervision).total
        loss.backward()
        total += loss.item()
    got = [p.grad for p in model.parameters() if p.grad is not None]
    assert_same([torch.tensor(total, dtype=torch.double)], [reference], 1e-9)
    assert_same(got, wanted, 1e-9)


@tried(60)
@given(RANDOM)
def test_no_valid_input_makes_nan(draw):
    """Logits of 1e4, temperatures of 0.01 and 100, bf16, a few of the teacher's tokens or all."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    dtype, size = draw.choice([torch.float32, torch.bfloat16]), draw.choice([1.0, 300.0, 1e4])
    count, columns = draw.randint(1, 5), draw.randint(2, 9)
    z, t = (size * torch.randn(count, columns, generator=generator) for _ in range(2))
    z, t = z.to(dtype).requires_grad_(), (z if draw.random() < 0.2 else t).to(dtype)
    options = loss_of(draw) | {"temperature": draw.choice([0.01, 1.0, 100.0])}
    top_k = draw.choice([None, 1, columns])
    objective = Objective(**options, top_k=top_k, tail=draw.choice(["bucket", "renormalise"]))
    labels = torch.randint(0, columns, (count,), generator=generator)
    got = distill_loss(Logits(z), Logits(t), labels, objective, num_tokens=count)
    assert torch.isfinite(got.total)
    assert torch.isfinite(torch.autograd.grad(got.total, z)[0]).all()
