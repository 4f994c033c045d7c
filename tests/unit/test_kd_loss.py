"""The distillation loss and its gradients against float64 autograd over whole logits."""

from dataclasses import replace
from itertools import cycle, product
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pixelrag.losses.kd import Logits, Objective, TopK, distill_loss
from pixelrag.losses.kd_objective import Kind
from tests.unit.kd_reference import (
    assert_close,
    double,
    gradients,
    logits_of,
    make_models,
    naive,
    trained,
)

VOCAB = 50
OPTIONS = {"num_tokens": 91, "vocab_size": VOCAB}


def masked(labels, *, first=8):
    """Every third label goes, and the first ones, so that no token of a first block counts."""
    labels = labels.clone()
    labels[::3] = -100
    labels[:first] = -100
    return labels


def assert_equal_to_naive(student, teacher, labels, objective, *, error=1e-11, **options):
    expected = naive(student, teacher, labels, objective, **OPTIONS)
    got = distill_loss(student, teacher, labels, objective, **OPTIONS, **options)
    for name, value in zip(("total", "ce", "kd"), expected, strict=True):
        assert_close(getattr(got, name).detach(), value.detach(), error=error, name=name)
    theirs, mine = gradients(expected[0], student), gradients(got.total, student)
    for name in theirs:
        assert_close(mine[name], theirs[name], error=error, name=f"{objective} {name}")


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("restriction", [None, (7, "bucket"), (7, "renormalise"), (90, "bucket")])
def test_value_and_gradients_of_every_kind(kind, restriction):
    k, tail = restriction or (None, "bucket")
    chunks = cycle((1, 7, 1000, 8, 3))
    for temperature, weight, cap in product((1.0, 2.0, 3.3), (0.0, 0.3, 1.0), (None, 3.0)):
        objective = Objective(kind, temperature, weight, beta=0.3, top_k=k, tail=tail)
        student, teacher, labels = make_models(soft_cap=cap, logit_scale=1.3)
        assert trained(student).keys() == {"hidden", "weight", "bias", "a", "b"}
        assert_equal_to_naive(student, teacher, masked(labels), objective, chunk_size=next(chunks))


@pytest.mark.parametrize("chunk", [1, 5, 1000, "auto"])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_materialised_logits(kind, chunk):
    student, teacher, labels = make_models()
    z = logits_of(student, 56).detach().requires_grad_()
    objective = Objective(kind, 2.0, 0.3)
    for other in (teacher, Logits(logits_of(teacher, 59))):
        assert_equal_to_naive(Logits(z), other, masked(labels), objective, chunk_size=chunk)
    got = distill_loss(Logits(z), other, masked(labels), objective, chunk_size=chunk, **OPTIONS)
    gradient = gradients(got.total, Logits(z))["logits"]
    assert gradient.shape == z.shape
    assert not gradient[:, VOCAB:].any()
    assert not gradient[masked(labels) == -100].any()
    # A projected student can learn from materialised logits too.
    assert_equal_to_naive(student, other, masked(labels), objective, chunk_size=chunk)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 40),
    chunk=st.integers(1, 50),
    kept=st.floats(0, 1),
    kind=st.sampled_from(get_args(Kind)),
    temperature=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    seed=st.integers(0, 1000),
)
def test_any_shape_mask_and_chunk(tokens, chunk, kept, kind, temperature, seed):
    student, teacher, labels = make_models(tokens=tokens, seed=seed)
    drop = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) >= kept
    labels[drop] = -100
    objective = Objective(kind, temperature, 0.3)
    if not drop.all():
        assert_equal_to_naive(student, teacher, labels, objective, chunk_size=chunk)
    got = distill_loss(student, teacher, labels, objective, chunk_size=chunk, **OPTIONS)
    assert got.num_supervised == int((~drop).sum())
    assert not gradients(got.total, student)["hidden"][drop].any()


@pytest.mark.parametrize("kind", get_args(Kind))
def test_gradcheck(kind):
    student, teacher, labels = make_models(tokens=6, soft_cap=3.0)
    labels[::3] = -100
    objective = Objective(kind, 2.0, 0.3, top_k=9 if kind == "jsd" else None)

    def loss(*tensors):
        hidden, weight, bias, a, b = tensors
        lora = replace(student.head.lora, a_RH=a, b_VR=b)
        head = replace(student.head, weight_VH=weight, bias_V=bias, lora=lora)
        model = replace(student, hidden_TH=hidden, head=head)
        return distill_loss(model, teacher, labels, objective, chunk_size=2, **OPTIONS).total

    assert torch.autograd.gradcheck(loss, tuple(trained(student).values()), fast_mode=True)


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_fp32(kind, precision):
    """Rounding alone: fp32 against float64 on the same numbers, at a large vocabulary."""
    student, teacher, labels = make_models(
        vocab=3000, student_rows=3008, teacher_rows=3000, dtype=torch.float32, tokens=24
    )
    objective = Objective(kind, 2.0, 0.3)
    options = {"num_tokens": 24, "vocab_size": 3000}
    wide = double(student)
    expected = naive(wide, double(teacher), labels, objective, **options)[0]
    got = distill_loss(
        student, teacher, labels, objective, chunk_size=10, precision=precision, **options
    ).total
    assert got.dtype == torch.float32
    assert_close(got.detach(), expected.detach(), error=1e-6)
    theirs, mine = gradients(expected, wide), gradients(got, student)
    for name in theirs:
        assert mine[name].dtype == torch.float32
        assert_close(mine[name], theirs[name], error=5e-6, name=name)


@pytest.mark.parametrize("scale", [2.0, 3.0, 0.25])
def test_upstream_gradient_scales_and_backward_can_run_twice(scale):
    """DeepSpeed multiplies the loss by the world size; a loss scale does the like."""
    student, teacher, labels = make_models()
    labels = masked(labels)
    objective = Objective("jsd", 2.0, 0.3)
    total = distill_loss(student, teacher, labels, objective, chunk_size=7, **OPTIONS).total
    tensors = list(trained(student).values())
    expected = gradients(naive(student, teacher, labels, objective, **OPTIONS)[0], student)
    for factor in (scale, 1.0, scale):
        got = torch.autograd.grad(total * factor, tensors, retain_graph=True)
        for mine, theirs in zip(got, expected.values(), strict=True):
            assert_close(mine, theirs * factor, error=1e-11)


def test_partial_sums_add_up_however_tokens_are_split():
    """Micro-batches, ranks and packing orders: the divisor is the global count, the sum the same.

    One of the parts has no supervised token.
    """
    student, teacher, labels = make_models(tokens=40)
    labels = masked(labels, first=10)
    count = int((labels != -100).sum())
    objective = Objective("forward_kl", 2.0, 0.3)
    options = {"num_tokens": count, "vocab_size": VOCAB, "chunk_size": 3}
    whole = distill_loss(student, teacher, labels, objective, **options)
    expected = gradients(whole.total, student)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    for parts in (
        [torch.arange(10), torch.arange(10, 13), torch.arange(13, 40)],
        list(order.split([1, 2, 30, 7])),
    ):
        summed = dict.fromkeys(expected, 0.0)
        value = kd = 0.0
        for rows in parts:
            part = distill_loss(
                replace(student, hidden_TH=student.hidden_TH[rows]),
                replace(teacher, hidden_TH=teacher.hidden_TH[rows]),
                labels[rows], objective, **options,
            )  # fmt: skip
            value, kd = value + part.total.detach(), kd + part.kd
            for name, gradient in gradients(part.total, student).items():
                summed[name] = summed[name] + gradient
        assert_close(value, whole.total.detach(), error=1e-12)
        assert_close(kd, whole.kd, error=1e-12)
        for name, gradient in expected.items():
            assert_close(summed[name], gradient, error=1e-11, name=name)


@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_cached_top_k_equals_the_live_teacher_restricted(kind, tail):
    student, teacher, labels = make_models()
    labels = masked(labels)
    objective = Objective(kind, 2.0, 0.3, top_k=6, tail=tail)
    log_p = (logits_of(teacher, VOCAB) / 2.0).log_softmax(-1)
    best = log_p.topk(6)
    cached = TopK(best.indices, best.values)
    valid = labels != -100
    compact = TopK(best.indices[valid], best.values[valid])
    totals = [
        distill_loss(student, other, labels, objective, chunk_size=5, **OPTIONS).total
        for other in (teacher, cached, compact)
    ]
    expected, *rest = [gradients(total, student) for total in totals]
    for total, found in zip(totals[1:], rest, strict=True):
        assert_close(total.detach(), totals[0].detach(), error=1e-12)
        for name, gradient in found.items():
            assert_close(gradient, expected[name], error=1e-11, name=name)


def test_a_teacher_may_send_the_supervised_tokens_alone():
    student, teacher, labels = make_models()
    labels = masked(labels)
    compact = replace(teacher, hidden_TH=teacher.hidden_TH[labels != -100])
    objective = Objective("forward_kl", 2.0, 0.3)
    a, b = (
        distill_loss(student, t, labels, objective, chunk_size=5, **OPTIONS).total
        for t in (teacher, compact)
    )
    assert torch.equal(a, b)


def test_top_1_agreement_is_counted():
    student, teacher, labels = make_models()
    labels = masked(labels)
    valid = labels != -100
    z, t = (logits_of(m, VOCAB)[valid].argmax(-1) for m in (student, teacher))
    objective = Objective("reverse_kl", 2.0, 0.3)
    options = OPTIONS | {"chunk_size": 4, "count_top1": True}
    with torch.no_grad():
        got = distill_loss(student, teacher, labels, objective, **options)
        assert int(got.num_top1_equal) == int((z == t).sum())
        itself = replace(student, hidden_TH=student.hidden_TH.detach())
        assert int(distill_loss(student, itself, labels, objective, **options).num_top1_equal) == (
            int(valid.sum())
        )
