"""The student in its container: its loss, against dense float64 arithmetic on whole logits."""

import pytest
import torch
import torch.nn.functional as F

from pixelrag.config.distill_parts import KDLossConfig, StudentConfig, TeacherConfig
from pixelrag.models.causal_load import load_frozen, load_student
from pixelrag.models.distill import DistillModel, Supervision, objective_of
from pixelrag.models.isolation import sample_rows
from pixelrag.models.teacher import LiveTeacher, TeacherRequest
from pixelrag.models.tiny_causal import save_tiny_causal

KINDS = ("qwen3", "gemma2", "phi", "granite")
CPU = torch.device("cpu")
# Tokens that the models share; the padded rows behind them must count for nothing.
VOCAB, NUM_TOKENS = 400, 70


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("distill")
    made = {kind: save_tiny_causal(root / kind, kind, padded_rows=5) for kind in KINDS}
    teacher = save_tiny_causal(root / "teacher", "llama", hidden_size=48, seed=5)
    return made | {"teacher": teacher}


def make(folders, family: str, *, dtype=torch.double, half: bool = False, **loss) -> DistillModel:
    student = load_student(StudentConfig(name_or_path=str(folders[family])), dtype=dtype)
    config = KDLossConfig(chunk_size=7, **loss)
    return DistillModel(student, config, vocab_size=VOCAB, half_precision=half)


@pytest.fixture(scope="module")
def lesson(folders):
    """Rows, and what a teacher of another width has to say about half of their tokens."""
    rows = sample_rows(VOCAB)
    labels_T = rows.input_ids_BT.flatten()
    positions = torch.arange(0, len(labels_T) - 1, 2)
    model = load_frozen(TeacherConfig(name_or_path=str(folders["teacher"])), dtype=torch.double)
    teacher = LiveTeacher(model, device=CPU, student_device=CPU)
    answer = teacher.answer(TeacherRequest(rows, positions))
    supervision = Supervision(positions, labels_T[positions + 1], answer, NUM_TOKENS)
    with torch.no_grad():
        teacher_NV = model.logits(rows).flatten(0, 1)[positions, :VOCAB]
    return rows, supervision, teacher_NV


def dense(model: DistillModel, lesson, temperature: float = 2.0) -> dict[str, torch.Tensor]:
    rows, supervision, teacher_NV = lesson
    logits = model.student.logits(rows).flatten(0, 1)[supervision.supervised_N, :VOCAB]
    ce = F.cross_entropy(logits, supervision.labels_N, reduction="sum") / NUM_TOKENS
    log_q = F.log_softmax(logits / temperature, -1)
    log_p = F.log_softmax(teacher_NV / temperature, -1)
    kd = temperature**2 * (log_p.exp() * (log_p - log_q)).sum() / NUM_TOKENS
    equal = (logits.argmax(-1) == teacher_NV.argmax(-1)).sum()
    return {"total": 0.3 * ce + 0.7 * kd, "ce": ce, "kd": kd, "num_top1_equal": equal}


def gradients(model: DistillModel, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["fused", "logits"])
def test_the_loss_and_its_gradient(folders, lesson, kind, implementation):
    model = make(folders, kind, implementation=implementation)
    expected = dense(model, lesson)
    wanted = gradients(model, expected["total"])
    rows, supervision, _ = lesson
    got = model("student", rows=rows, supervision=supervision, count_top1=True)
    for name, value in expected.items():
        assert getattr(got, name).item() == pytest.approx(value.item(), rel=1e-9), name
    assert not any(term.requires_grad for term in got[1:])
    gradient = gradients(model, got.total)
    assert (gradient - wanted).norm() / wanted.norm() < 1e-9
    assert abs(gradient.norm() / wanted.norm() - 1) < 1e-9


def test_agreement_is_counted_where_it_is_asked_for(folders, lesson):
    model = make(folders, "qwen3")
    rows, supervision, _ = lesson
    assert int(model("student", rows=rows, supervision=supervision).num_top1_equal) == 0
    itself = LiveTeacher(
        load_frozen(TeacherConfig(name_or_path=str(folders["qwen3"])), dtype=torch.double),
        device=CPU, student_device=CPU,
    )  # fmt: skip
    answer = itself.answer(TeacherRequest(rows, supervision.supervised_N))
    own = Supervision(supervision.supervised_N, supervision.labels_N, answer, NUM_TOKENS)
    terms = model.eval()("student", rows=rows, supervision=own, count_top1=True)
    assert int(terms.num_top1_equal) == len(supervision.labels_N)
    assert terms.kd.item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["fused", "logits"])
def test_the_roles_of_the_self_test_give_the_models_own_logits(folders, kind, implementation):
    model = make(folders, kind, implementation=implementation).eval()
    rows = sample_rows(VOCAB)
    with torch.no_grad():
        whole = model("whole", rows=rows)
        torch.testing.assert_close(whole, model.student.logits(rows))
        torch.testing.assert_close(model("logits", rows=rows), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("role", ["student", "teacher", ""])
def test_other_roles_are_refused(folders, role):
    with pytest.raises(ValueError, match="expected student"):
        make(folders, "qwen3")(role, rows=sample_rows(VOCAB))


def test_half_precision_rounds_states_and_head(folders, lesson):
    rows, supervision, _ = lesson
    answer = supervision.teacher
    half = Supervision(
        supervision.supervised_N,
        supervision.labels_N,
        type(answer)(answer.hidden_TH.bfloat16(), answer.head),
        NUM_TOKENS,
    )
    exact = dense(make(folders, "phi"), lesson)
    model = make(folders, "phi", dtype=torch.float32, half=True)
    seen = []
    inner = model._loss
    model._loss = lambda student, *rest: seen.append(student) or inner(student, *rest)
    got = model("student", rows=rows, supervision=half)
    (projected,) = seen
    head = projected.head
    assert {projected.hidden_TH.dtype, head.weight_VH.dtype, head.bias_V.dtype} == {torch.bfloat16}
    assert got.total.item() == pytest.approx(exact["total"].item(), rel=0.02)
    gradient = gradients(model, got.total)
    assert gradient.dtype == torch.float32
    assert torch.isfinite(gradient).all()


def test_every_setting_of_the_loss_reaches_the_objective():
    config = KDLossConfig(
        kind="jsd", temperature=3.0, ce_weight=0.1, beta=0.2, skew=0.4, top_k=9, tail="renormalise"
    )
    objective = objective_of(config)
    for name in ("kind", "temperature", "ce_weight", "beta", "skew", "top_k", "tail"):
        assert getattr(objective, name) == getattr(config, name), name


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "reverse_kl"},
        {"temperature": 1.0},
        {"ce_weight": 0.6},
        {"top_k": 3},
        {"top_k": 3, "tail": "renormalise"},
        {"kind": "jsd", "beta": 0.2},
        {"kind": "skewed_kl", "skew": 0.4},
    ],
    ids=str,
)
def test_every_setting_of_the_loss_acts(folders, lesson, change):
    rows, supervision, _ = lesson
    # Compared with the same kind and its other settings at their defaults.
    plain = {k: v for k, v in change.items() if k == "kind" and len(change) > 1}
    if "tail" in change:
        plain = {"top_k": 3}
    losses = [
        make(folders, "qwen3", **options)("student", rows=rows, supervision=supervision).total
        for options in (plain, change)
    ]
    assert abs(losses[0] - losses[1]) > 1e-4 * abs(losses[0])
