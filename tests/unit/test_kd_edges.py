"""What must not happen in the distillation loss, and what must be refused."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pixelrag.errors import DataError, ModelError
from pixelrag.losses.kd import Head, Logits, Lora, Objective, Projected, TopK, distill_loss
from pixelrag.losses.kd_objective import Kind
from tests.unit.kd_reference import assert_close, gradients, logits_of, make_models, naive, trained

VOCAB = 50
WIDTHS = (3, 12, 20)
KL = Objective("forward_kl", 2.0, 0.3)
OPTIONS = {"num_tokens": 40, "vocab_size": VOCAB}


class Shapes(TorchDispatchMode):
    """Records the shape of every tensor that an operation returns, views among them."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {tuple(x.shape) for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        return out

    def widest(self):
        """The most tokens by the vocabulary; transposed weights (12, 20 and 3 rows) are none."""
        return max(s[0] for s in self.seen if len(s) == 2 and s[1] == VOCAB and s[0] not in WIDTHS)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_no_supervised_token_gives_a_connected_zero(kind):
    student, teacher, labels = make_models()
    nothing = torch.full_like(labels, -100)
    for num_tokens in (0, 40):
        got = distill_loss(
            student, teacher, nothing, Objective(kind, 2.0, 0.3), num_tokens=num_tokens,
            vocab_size=VOCAB,
        )  # fmt: skip
        assert (float(got.total.detach()), float(got.ce), float(got.kd)) == (0, 0, 0)
        assert got.num_supervised == 0
        for name, gradient in gradients(got.total, student).items():
            assert gradient.shape == trained(student)[name].shape
            assert not gradient.any()


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_student_like_its_teacher_has_no_divergence_and_no_gradient(kind):
    _, teacher, labels = make_models()
    student = Projected(
        teacher.hidden_TH.clone().requires_grad_(),
        replace(teacher.head, weight_VH=teacher.head.weight_VH.clone().requires_grad_()),
    )
    got = distill_loss(student, teacher, labels, Objective(kind, 2.0), **OPTIONS)
    assert abs(float(got.kd)) < 1e-14
    assert all(g.abs().max() < 1e-15 for g in gradients(got.total, student).values())


@pytest.mark.parametrize("kind", get_args(Kind))
def test_extreme_logits_stay_finite(kind):
    """Probabilities that underflow in fp32, on either side, in tail and bucket."""
    z = torch.tensor([[300.0, -300.0, 0.0], [0.0, 200.0, -200.0]]).requires_grad_()
    t = torch.tensor([[-300.0, 300.0, 0.0], [0.0, 200.0, -200.0]])
    for top_k in (None, 1):
        objective = Objective(kind, 1.0, 0.5, top_k=top_k)
        got = distill_loss(Logits(z), Logits(t), torch.tensor([1, 1]), objective, num_tokens=2)
        assert torch.isfinite(got.total)
        assert float(got.ce) == pytest.approx(300)
        assert torch.isfinite(torch.autograd.grad(got.total, z)[0]).all()


def test_masked_rows_change_nothing_not_even_by_nan():
    student, teacher, labels = make_models()
    labels[::3] = -100
    drop = labels == -100
    want = distill_loss(student, teacher, labels, KL, **OPTIONS)
    expected = gradients(want.total, student)
    spoilt = replace(student, hidden_TH=student.hidden_TH.detach().clone().requires_grad_())
    spoilt.hidden_TH.data[drop] = math.nan
    teacher.hidden_TH[drop] = math.inf
    got = distill_loss(spoilt, teacher, labels, KL, **OPTIONS)
    assert torch.equal(got.total, want.total)
    for name, gradient in gradients(got.total, spoilt).items():
        assert torch.equal(gradient, expected[name])


def test_masked_tokens_never_reach_a_head():
    student, teacher, labels = make_models()
    labels[5:] = -100
    with Shapes() as shapes, torch.no_grad():
        distill_loss(student, teacher, labels, KL, chunk_size=100, **OPTIONS)
    assert shapes.widest() == 5


def test_padded_vocabulary_rows_get_no_probability_and_no_gradient():
    student, teacher, labels = make_models()
    want = distill_loss(student, teacher, labels, KL, **OPTIONS)
    for model in (student, teacher):
        model.head.weight_VH.data[VOCAB:] = 1e3
    got = distill_loss(student, teacher, labels, KL, **OPTIONS)
    assert torch.equal(got.total, want.total)
    found = gradients(got.total, student)
    for name in ("weight", "bias", "b"):
        assert not found[name][VOCAB:].any()
        assert found[name][:VOCAB].any()


def test_no_tensor_of_all_tokens_and_the_vocabulary_is_made():
    student, teacher, labels = make_models(tokens=64)
    with Shapes() as shapes:
        distill_loss(student, teacher, labels, KL, chunk_size=4, num_tokens=64, vocab_size=VOCAB)
    assert shapes.widest() == 4


def test_an_adapter_on_a_frozen_head_never_forms_a_gradient_of_the_head():
    student, teacher, labels = make_models(rank=3)
    expected = gradients(distill_loss(student, teacher, labels, KL, **OPTIONS).total, student)
    student.head.weight_VH.requires_grad_(False)
    student.head.bias_V.requires_grad_(False)
    with Shapes() as shapes:
        total = distill_loss(student, teacher, labels, KL, chunk_size=4, **OPTIONS).total
        found = gradients(total, student)
    assert found.keys() == {"hidden", "a", "b"}
    for name, gradient in found.items():
        assert_close(gradient, expected[name], error=1e-12, name=name)
    assert (56, 12) not in shapes.seen


def test_a_frozen_head_costs_no_gradient_and_hidden_states_none_where_frozen():
    student, teacher, labels = make_models(lora=False)
    for name in ("weight_VH", "bias_V"):
        getattr(student.head, name).requires_grad_(False)
    with Shapes() as shapes:
        total = distill_loss(student, teacher, labels, KL, **OPTIONS).total
        assert gradients(total, student).keys() == {"hidden"}
    assert (56, 12) not in shapes.seen
    student, teacher, labels = make_models(lora=False)
    student.hidden_TH.requires_grad_(False)
    total = distill_loss(student, teacher, labels, KL, **OPTIONS).total
    assert gradients(total, student).keys() == {"weight", "bias"}


def test_without_gradient_mode_nothing_is_formed():
    student, teacher, labels = make_models()
    want = distill_loss(student, teacher, labels, KL, **OPTIONS)
    with Shapes() as shapes, torch.no_grad():
        got = distill_loss(student, teacher, labels, KL, **OPTIONS)
    assert not got.total.requires_grad
    assert (56, 12) not in shapes.seen
    assert torch.equal(got.total, want.total.detach())
    assert not want.ce.requires_grad
    assert not want.kd.requires_grad


def test_a_tied_head_adds_to_the_embeddings_gradient():
    torch.manual_seed(0)
    embedding = torch.randn(VOCAB, 12, dtype=torch.float64, requires_grad=True)
    _, teacher, labels = make_models()
    ids = labels.roll(1)

    def model():
        return Projected(embedding[ids].tanh(), Head(embedding))

    total = distill_loss(model(), teacher, labels, KL, chunk_size=5, **OPTIONS).total
    (got,) = torch.autograd.grad(total, embedding)
    (expected,) = torch.autograd.grad(naive(model(), teacher, labels, KL, **OPTIONS)[0], embedding)
    assert_close(got, expected, error=1e-12)


def test_the_teacher_gets_no_gradient():
    student, teacher, labels = make_models()
    teacher.hidden_TH.requires_grad_()
    teacher.head.weight_VH.requires_grad_()
    total = distill_loss(student, teacher, labels, KL, **OPTIONS).total
    total.backward()
    assert teacher.hidden_TH.grad is None
    assert teacher.head.weight_VH.grad is None
    assert student.head.weight_VH.grad is not None


def test_dropout_of_the_adapter_does_not_depend_on_the_chunk_and_has_its_gradient():
    student, teacher, labels = make_models()
    labels[::3] = -100
    lora = replace(student.head.lora, dropout=0.4)
    student = replace(student, head=replace(student.head, lora=lora))
    found = []
    for chunk in (1, 7, 100):
        torch.manual_seed(3)
        total = distill_loss(student, teacher, labels, KL, chunk_size=chunk, **OPTIONS).total
        found.append((total.detach(), gradients(total, student)))
    # The same mask, applied by hand.
    valid = labels != -100
    torch.manual_seed(3)
    kept = torch.empty((int(valid.sum()), 12), dtype=torch.bool).bernoulli_(0.6).double() / 0.6
    assert 0.4 < float(kept.count_nonzero()) / kept.numel() < 0.8
    hidden, head = student.hidden_TH, student.head
    z = hidden[valid] @ head.weight_VH.t() + head.bias_V
    z = z + 0.5 * ((hidden[valid] * kept) @ lora.a_RH.t() @ lora.b_VR.t())
    compact = replace(teacher, hidden_TH=teacher.hidden_TH[valid])
    total = naive(Logits(z), compact, labels[valid], KL, **OPTIONS)[0]
    expected = gradients(total, student)
    for value, got in found:
        assert_close(value, total.detach(), error=1e-12)
        for name, gradient in expected.items():
            assert_close(got[name], gradient, error=1e-11, name=name)


def test_an_adapters_dropout_draws_alike_with_and_without_gradients():
    student, teacher, labels = make_models()
    lora = replace(student.head.lora, dropout=0.4)
    student = replace(student, head=replace(student.head, lora=lora))
    torch.manual_seed(0)
    a = distill_loss(student, teacher, labels, KL, **OPTIONS).total
    torch.manual_seed(0)
    with torch.no_grad():
        b = distill_loss(student, teacher, labels, KL, **OPTIONS).total
    assert torch.equal(a, b)


def test_autocast_does_not_round():
    student, teacher, labels = make_models(dtype=torch.float32)
    want = distill_loss(student, teacher, labels, KL, **OPTIONS).total
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = distill_loss(student, teacher, labels, KL, **OPTIONS).total
    assert torch.equal(got, want)


def test_without_a_teacher_there_is_cross_entropy_alone():
    student, teacher, labels = make_models()
    objective = Objective("forward_kl", 2.0, 1.0)
    want = distill_loss(student, teacher, labels, objective, **OPTIONS)
    got = distill_loss(student, None, labels, objective, **OPTIONS)
    assert float(got.kd) == 0 < float(want.kd)
    assert_close(got.total.detach(), want.total.detach(), error=1e-14)
    expected = gradients(want.total, student)
    for name, gradient in gradients(got.total, student).items():
        assert_close(gradient, expected[name], error=1e-13, name=name)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"num_tokens": 30}, ValueError, "num_tokens: got 30.*37 supervised tokens"),
        ({"precision": "half"}, ValueError, "precision: got 'half', expected exact or fast"),
        ({"chunk_size": 0}, ValueError, "chunk_size: got 0"),
        ({"vocab_size": None}, ModelError, "student 56 and teacher 59; say .* vocab_size"),
        ({"vocab_size": 57}, ModelError, "vocab_size: got 57, expected 1 to the rows of"),
        ({"vocab_size": 3}, DataError, r"label \d+ of token \d+: expected 0 to 2"),
        ({"labels_T": torch.zeros(36, dtype=torch.int64)}, ModelError, r"labels: got shape \[36\]"),
        ({"teacher": None}, ValueError, "ce_weight is 0.3, but there is no teacher"),
        (
            {"teacher": TopK(torch.full((37, 2), 50), torch.zeros(37, 2))},
            DataError,
            "run from 50 to 50, expected 0 to 49",
        ),
        (
            {"teacher": Logits(torch.zeros(36, 50))},
            ModelError,
            "teacher: got 36 tokens, expected 37, or the 37 supervised",
        ),
    ],
)
def test_refusals(change, error, says):
    student, teacher, labels = make_models()
    arguments = {
        "student": student, "teacher": teacher, "labels_T": labels, "objective": KL, **OPTIONS,
    }  # fmt: skip
    with pytest.raises(error, match=says):
        distill_loss(**(arguments | change))


def test_negative_labels_are_named():
    student, teacher, labels = make_models()
    labels[:4] = -100
    labels[9] = -1
    with pytest.raises(DataError, match="label -1 of token 9: expected 0 to 49"):
        distill_loss(student, teacher, labels, KL, **OPTIONS)


def test_fp16_is_refused():
    student, teacher, labels = make_models(dtype=torch.float16)
    with pytest.raises(ValueError, match="underflow; use bf16 or fp32"):
        distill_loss(student, teacher, labels, KL, **OPTIONS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "kl"}, "kind: got 'kl', expected one of forward_kl, reverse_kl"),
        ({"temperature": 0.0}, "temperature: got 0.0"),
        ({"temperature": math.nan}, "temperature: got nan"),
        ({"ce_weight": 1.1}, "ce_weight: got 1.1, expected 0 to 1"),
        ({"beta": 1.0}, "beta: got 1.0, expected between 0 and 1; use forward_kl or reverse_kl"),
        ({"skew": 1.0}, "skew: got 1.0"),
        ({"top_k": 0}, "top_k: got 0"),
        ({"tail": "drop"}, "tail: got 'drop', expected one of bucket, renormalise"),
    ],
)
def test_objectives_are_checked(change, says):
    with pytest.raises(ValueError, match=says):
        Objective(**change)


def test_shapes_are_checked():
    weight = torch.zeros(8, 4)
    with pytest.raises(ModelError, match=r"got shape \[0\].*gathered"):
        Head(torch.zeros(0))
    sharded = torch.zeros(8, 4)
    sharded.full_tensor = lambda: weight
    with pytest.raises(ModelError, match=r"a shard of shape \[8, 4\].*inside the wrapped forward"):
        Head(sharded)
    with pytest.raises(ModelError, match=r"bias: got shape \[7\], expected \[8\]"):
        Head(weight, torch.zeros(7))
    with pytest.raises(ModelError, match=r"A \[2, 5\] and B \[8, 2\], expected \[r, 4\]"):
        Head(weight, lora=Lora(torch.zeros(2, 5), torch.zeros(8, 2), 1.0))
    with pytest.raises(ModelError, match=r"A \[2, 4\] and B \[8, 3\]"):
        Head(weight, lora=Lora(torch.zeros(2, 4), torch.zeros(8, 3), 1.0))
    with pytest.raises(ModelError, match="soft_cap: got 0"):
        Head(weight, soft_cap=0.0)
    with pytest.raises(ModelError, match=r"got shape \[3, 5\], expected \[tokens, 4\]"):
        Projected(torch.zeros(3, 5), Head(weight))
    with pytest.raises(ModelError, match="top-k teacher: got ids"):
        TopK(torch.zeros(3, 5), torch.zeros(3, 4))
    assert logits_of(Projected(torch.zeros(3, 4), Head(weight)), 8).shape == (3, 8)
