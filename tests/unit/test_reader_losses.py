"""The retriever losses of EMDR2 and Atlas, against their formulas written out in float64."""

import math

import pytest
import torch

from pixelrag.losses.reader import adist, emdr2, emdr2_per_token, loop, pdist, pool_attention

INF = float("inf")
DISTILLED = {"pdist": (pdist, 1), "loop": (loop, -1), "adist": (adist, 1)}
ON_ANSWERS = {"emdr2": emdr2, "pdist": pdist, "loop": loop, "adist": adist}


def batch(rows=4, documents=5, seed=0, dtype=torch.float64):
    """Scores and what the reader says, [B, K] both."""
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(rows, documents, generator=generator, dtype=torch.float64)
    reader = -4 * torch.rand(rows, documents, generator=generator, dtype=torch.float64)
    return scores.to(dtype), reader.to(dtype)


def softmax(values):
    weights = [torch.exp(value) for value in values]
    return [weight / sum(weights) for weight in weights]


def emdr2_written_out(scores, reader):
    return torch.stack(
        [
            -torch.log(sum(p * torch.exp(a) for p, a in zip(softmax(s), r, strict=True)))
            for s, r in zip(scores, reader, strict=True)
        ]
    )


def divergence_written_out(scores, reader, sign, temperature):
    rows = []
    for s, r in zip(scores, reader, strict=True):
        p, q = softmax(sign * r / temperature), softmax(s)
        rows.append(sum(a * (torch.log(a) - torch.log(b)) for a, b in zip(p, q, strict=True)))
    return torch.stack(rows)


def gradient(loss_B, leaf):
    weights = torch.arange(1, len(loss_B) + 1, dtype=loss_B.dtype)
    return torch.autograd.grad((loss_B * weights).sum(), leaf, allow_unused=True)[0]


def assert_close(got, expected, error=1e-12):
    got, expected = got.detach().double(), expected.detach().double()
    assert float((got - expected).norm()) <= error * float(expected.norm())
    assert float(got.norm() / expected.norm()) == pytest.approx(1.0, abs=error)


def assert_equal_to(loss, written_out):
    scores, reader = batch()
    ours, theirs = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    got, expected = loss(ours, reader), written_out(theirs, reader)
    assert got.shape == (4,)
    assert_close(got, expected)
    assert_close(gradient(got, ours), gradient(expected, theirs))


def test_emdr2_follows_its_formula():
    assert_equal_to(emdr2, emdr2_written_out)
    # The gradient is prior less posterior.
    scores, reader = batch()
    scores.requires_grad_()
    (grad,) = torch.autograd.grad(emdr2(scores, reader).sum(), scores)
    assert_close(grad, scores.softmax(1) - (scores + reader).softmax(1))


@pytest.mark.parametrize("temperature", [1.0, 0.3, 4.0])
@pytest.mark.parametrize("name", DISTILLED)
def test_distillation_follows_its_formula(name, temperature):
    loss, sign = DISTILLED[name]
    assert_equal_to(
        lambda scores, reader: loss(scores, reader, temperature=temperature),
        lambda scores, reader: divergence_written_out(scores, reader, sign, temperature),
    )


@pytest.mark.parametrize("name", DISTILLED)
def test_the_gradient_is_the_difference_of_the_distributions(name):
    """No factor of 1/K, 1/B or the temperature in front of it."""
    loss, sign = DISTILLED[name]
    for documents in (2, 8):
        scores, reader = batch(documents=documents)
        scores.requires_grad_()
        (grad,) = torch.autograd.grad(loss(scores, reader, temperature=2.0).sum(), scores)
        assert_close(grad, scores.softmax(1) - (sign * reader / 2).softmax(1))


def test_a_document_that_helps_rises():
    scores = torch.zeros(1, 3, requires_grad=True)
    alone = torch.tensor([[-1.0, -5.0, -5.0]])  # the answer is likeliest given document 0
    without = torch.tensor([[-5.0, -1.0, -1.0]])  # and suffers most without it
    for loss, reader in ((emdr2, alone), (pdist, alone), (loop, without)):
        grad = gradient(loss(scores, reader), scores)
        assert grad[0, 0] < 0 < grad[0, 1]


@pytest.mark.parametrize("name", ON_ANSWERS)
def test_the_reader_gets_no_gradient(name):
    scores, reader = (x.requires_grad_() for x in batch())
    loss = ON_ANSWERS[name](scores, reader)
    assert gradient(loss, reader) is None
    assert gradient(ON_ANSWERS[name](scores, reader), scores).any()


def test_the_tokens_of_emdr2():
    generator = torch.Generator().manual_seed(0)
    log_probs = -2 * torch.rand(3, 4, 5, generator=generator, dtype=torch.float64)
    scores = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([5, 2, 1])[:, None]
    leaves = [x.requires_grad_() for x in (scores, log_probs)]
    got = emdr2_per_token(*leaves, mask)
    joint = scores.softmax(1)[:, :, None] * log_probs.detach().exp()
    expected = -(torch.log(joint.sum(1)) * mask).sum(1)
    assert_close(got, expected)
    assert_close(gradient(got, scores), gradient(expected, scores))
    assert gradient(emdr2_per_token(*leaves, mask), log_probs) is None
    # An answer of one token is a whole answer.
    assert_close(got[2:], emdr2(scores, log_probs[:, :, 0])[2:])


@pytest.mark.parametrize("name", ON_ANSWERS)
def test_gradcheck(name):
    scores, reader = batch(rows=2, documents=3)
    loss = ON_ANSWERS[name]
    assert torch.autograd.gradcheck(lambda x: loss(x, reader), scores.requires_grad_())


@pytest.mark.parametrize("rubbish", [math.nan, INF, -INF, 3.0])
@pytest.mark.parametrize("name", ON_ANSWERS)
def test_missing_documents_have_no_part(name, rubbish):
    scores, reader = batch(documents=3)
    expected = ON_ANSWERS[name](scores, reader)
    place, missing = torch.tensor([1, 2, 4]), torch.tensor([0, 3])
    wide = torch.full((4, 5), -INF, dtype=torch.float64)
    wide[:, place] = scores
    said = torch.full((4, 5), rubbish, dtype=torch.float64)
    said[:, place] = reader
    wide.requires_grad_()
    got = ON_ANSWERS[name](wide, said)
    assert_close(got, expected)
    grad = gradient(got, wide)
    assert grad.isfinite().all()
    assert not grad[:, missing].any()
    assert grad[:, place].any()


@pytest.mark.parametrize("name", ON_ANSWERS)
def test_a_question_without_documents_costs_nothing(name):
    scores, reader = batch()
    scores[1], reader[1] = -INF, math.nan
    scores.requires_grad_()
    got = ON_ANSWERS[name](scores, reader)
    grad = gradient(got, scores)
    assert got[1] == 0
    assert got[[0, 2, 3]].isfinite().all()
    assert grad.isfinite().all()
    assert not grad[1].any()
    assert grad[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ON_ANSWERS)
def test_extreme_values(name, dtype):
    scores = torch.tensor([[1e4, -1e4], [-1e4, 1e4], [3.0, 3.0], [1e4, 1e4]], dtype=dtype)
    reader = torch.tensor([[0.0, -1e4], [0.0, -1e4], [-1e4, -1e4], [-INF, 0.0]], dtype=dtype)
    if name == "loop":
        reader = reader.masked_fill(reader == -INF, -1e4)
    scores.requires_grad_()
    got = ON_ANSWERS[name](scores, reader)
    grad = gradient(got, scores)
    assert got.isfinite().all()
    assert grad.isfinite().all()
    two = math.log(2)
    expected = {
        "emdr2": [0, 1e4, 1e4, two],  # the first document is not chosen, the answer is lost
        "pdist": [0, 2e4, 0, two],
        "loop": [2e4, 0, 0, two],
        "adist": [0, 2e4, 0, two],
    }
    assert got.tolist() == pytest.approx(expected[name], rel=1e-6, abs=1e-6)


def test_one_document_teaches_nothing():
    scores, reader = batch(documents=1)
    scores.requires_grad_()
    for name, loss in ON_ANSWERS.items():
        got = loss(scores, reader)
        assert not gradient(got, scores).any()
        assert_close(got, -reader.flatten()) if name == "emdr2" else torch.testing.assert_close(
            got, torch.zeros_like(got)
        )


@pytest.mark.parametrize("name", ON_ANSWERS)
def test_low_precision_inputs_are_computed_in_fp32(name):
    low = [(x + 74).bfloat16() for x in batch(rows=16, documents=8)]
    with torch.autocast("cpu", torch.bfloat16):
        got = ON_ANSWERS[name](*low)
    assert got.dtype == torch.float32
    assert_close(got, ON_ANSWERS[name](*(x.double() for x in low)), error=1e-5)


def test_what_is_wrong_is_refused():
    scores, reader = batch()
    for name, loss in ON_ANSWERS.items():
        with pytest.raises(ValueError, match=name):
            loss(scores, reader[:, :2])
    for temperature in (0.0, -1.0, math.nan, INF):
        with pytest.raises(ValueError, match="temperature"):
            pdist(scores, reader, temperature=temperature)


def test_attention_is_pooled_over_heads_and_tokens():
    generator = torch.Generator().manual_seed(0)
    attention = torch.rand(2, 3, 4, 7, generator=generator, dtype=torch.float64)
    norms = torch.rand(2, 3, 7, generator=generator, dtype=torch.float64)
    owner = torch.tensor([[0, 0, 1, 1, 1, -1, 3], [2, -1, 0, 0, -1, -1, 1]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)
    expected = torch.zeros(2, 4, dtype=torch.float64)
    for row in range(2):
        for document in range(4):
            values = [
                attention[row, head, token, place] * norms[row, head, place]
                for head in range(3)
                for token in range(4)
                for place in range(7)
                if owner[row, place] == document and mask[row, token]
            ]
            expected[row, document] = sum(values) / (3 * int(mask[row].sum()))
    # Rubbish where nobody looks: padded source tokens, padded answer tokens.
    attention[~mask[:, None, :, None].expand_as(attention)] = math.nan
    norms[(owner == -1)[:, None].expand_as(norms)] = INF
    got = pool_attention(attention.requires_grad_(), norms, owner, mask, 4)
    assert_close(got, expected)
    assert not got.requires_grad
    assert got[0, 2] == 0  # a document without tokens
    low = pool_attention(attention.bfloat16(), norms.bfloat16(), owner, mask, 4)
    assert low.dtype == torch.float32
    assert_close(low, expected, error=1e-2)
