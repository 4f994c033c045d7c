"""The marginal likelihoods of RAG against enumeration, and against transformers' own numbers."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pixelrag.losses.rag_marginal import (
    Smoothing,
    answer_log_probs,
    document_log_prior,
    rag_sequence_nll,
    rag_token_nll,
    rag_token_vocab_nll,
)

MARGINALS = [rag_sequence_nll, rag_token_nll]
INF = float("inf")


def batch(rows=3, documents=4, tokens=5, seed=0, dtype=torch.float64):
    """Log-probabilities [B, K, T], scores [B, K] and a mask whose rows end at unlike places."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -3 * torch.rand(rows, documents, tokens, generator=generator, dtype=torch.float64)
    scores = 2 * torch.randn(rows, documents, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([max(1, tokens - row % tokens) for row in range(rows)])
    mask = torch.arange(tokens) < lengths[:, None]
    return log_probs.to(dtype), scores.to(dtype), mask


def priors(scores):
    weights = [torch.exp(score) for score in scores]
    return [weight / sum(weights) for weight in weights]


def sequence_written_out(log_probs, scores, mask):
    """RAG-Sequence with plain probabilities, one document after the other."""
    losses = []
    for row in range(len(scores)):
        prior, total = priors(scores[row]), 0.0
        for document in range(scores.shape[1]):
            product = prior[document]
            for token in range(log_probs.shape[2]):
                if mask[row, token]:
                    product = product * torch.exp(log_probs[row, document, token])
            total = total + product
        losses.append(-torch.log(total))
    return torch.stack(losses)


def token_written_out(log_probs, scores, mask):
    """RAG-Token as the sum over every way to give each token a document."""
    losses = []
    num_documents = scores.shape[1]
    for row in range(len(scores)):
        prior, total = priors(scores[row]), 0.0
        tokens = [token for token in range(log_probs.shape[2]) if mask[row, token]]
        for way in itertools.product(range(num_documents), repeat=len(tokens)):
            product = torch.ones((), dtype=torch.float64)
            for token, document in zip(tokens, way, strict=True):
                product = product * prior[document] * torch.exp(log_probs[row, document, token])
            total = total + product
        losses.append(-torch.log(total))
    return torch.stack(losses)


WRITTEN_OUT = {rag_sequence_nll: sequence_written_out, rag_token_nll: token_written_out}


def gradients(loss_B, *leaves):
    weights = torch.arange(1, len(loss_B) + 1, dtype=loss_B.dtype)
    return torch.autograd.grad((loss_B * weights).sum(), leaves)


def assert_close(got, expected, error=1e-12):
    got, expected = got.detach().double(), expected.detach().double()
    assert float((got - expected).norm()) <= error * float(expected.norm())
    assert float(got.norm() / expected.norm()) == pytest.approx(1.0, abs=error)


@pytest.mark.parametrize("marginal", MARGINALS)
def test_value_and_gradients_follow_the_enumeration(marginal):
    log_probs, scores, mask = batch()
    ours = [x.clone().requires_grad_() for x in (log_probs, scores)]
    theirs = [x.clone().requires_grad_() for x in (log_probs, scores)]
    got = marginal(*ours, mask)
    expected = WRITTEN_OUT[marginal](*theirs, mask)
    assert got.shape == (3,)
    assert got.dtype == torch.float64
    assert_close(got, expected)
    for mine, other in zip(gradients(got, *ours), gradients(expected, *theirs), strict=True):
        assert_close(mine, other)


@pytest.mark.parametrize("marginal", MARGINALS)
def test_gradcheck(marginal):
    log_probs, scores, mask = batch(rows=2, documents=3, tokens=3)
    scores[1, 2] = -INF
    free = scores[scores > -INF].requires_grad_()

    def loss(log_probs, free):
        whole = torch.full_like(scores, -INF).masked_scatter(scores > -INF, free)
        return marginal(log_probs, whole, mask)

    assert torch.autograd.gradcheck(loss, (log_probs.requires_grad_(), free))


def test_one_document_leaves_the_plain_likelihood():
    log_probs, scores, mask = batch(documents=1)
    expected = -(log_probs[:, 0] * mask).sum(1)
    for marginal in MARGINALS:
        leaf = scores.clone().requires_grad_()
        loss = marginal(log_probs, leaf, mask)
        assert_close(loss, expected)
        assert torch.equal(gradients(loss, leaf)[0], torch.zeros_like(scores))


def test_one_token_makes_the_two_equal_and_keeps_the_prior():
    log_probs, scores, mask = batch(tokens=1)
    sequence, token = (marginal(log_probs, scores, mask) for marginal in MARGINALS)
    assert_close(sequence, token)
    expected = -torch.log((scores.softmax(1) * log_probs[:, :, 0].exp()).sum(1))
    assert_close(sequence, expected)
    assert (sequence > 0).all()


@pytest.mark.parametrize("marginal", MARGINALS)
def test_padding_is_not_looked_at(marginal):
    log_probs, scores, mask = batch()
    expected = marginal(log_probs, scores, mask)
    for rubbish in (math.nan, -INF, INF, 7.0):
        dirty = torch.where(mask[:, None], log_probs, rubbish).requires_grad_()
        leaf = scores.clone().requires_grad_()
        got = marginal(dirty, leaf, mask)
        assert torch.equal(got, expected)
        for grad in gradients(got, dirty, leaf):
            assert grad.isfinite().all()
        assert not gradients(marginal(dirty, leaf, mask), dirty)[0][
            ~mask[:, None].expand_as(dirty)
        ].any()


@pytest.mark.parametrize("marginal", MARGINALS)
def test_missing_documents_have_no_part(marginal):
    log_probs, scores, mask = batch(documents=3)
    expected = marginal(log_probs, scores, mask)
    wide = torch.full((3, 6, 5), math.nan, dtype=torch.float64)
    place = torch.tensor([0, 3, 4])
    wide[:, place] = log_probs
    wide_scores = torch.full((3, 6), -INF, dtype=torch.float64)
    wide_scores[:, place] = scores
    wide.requires_grad_()
    wide_scores.requires_grad_()
    got = marginal(wide, wide_scores, mask)
    assert_close(got, expected)
    missing = torch.tensor([1, 2, 5])
    for grad in gradients(got, wide, wide_scores):
        assert grad.isfinite().all()
        assert not grad[:, missing].any()
        assert grad[:, place].any()


@pytest.mark.parametrize("marginal", MARGINALS)
def test_a_question_without_documents_costs_nothing(marginal):
    log_probs, scores, mask = batch()
    scores[1] = -INF
    log_probs[1] = math.nan
    leaves = [x.clone().requires_grad_() for x in (log_probs, scores)]
    got = marginal(*leaves, mask)
    assert got[1] == 0
    assert_close(got[[0, 2]], marginal(log_probs[[0, 2]], scores[[0, 2]], mask[[0, 2]]))
    for grad in gradients(got, *leaves):
        assert grad.isfinite().all()
        assert not grad[1].any()
        assert grad[0].any()


@pytest.mark.parametrize("marginal", MARGINALS)
def test_an_answer_without_tokens_costs_nothing(marginal):
    log_probs, scores, mask = batch()
    mask[1] = False
    leaf = scores.clone().requires_grad_()
    got = marginal(log_probs, leaf, mask)
    assert got[1].item() == pytest.approx(0.0, abs=1e-15)
    assert gradients(got, leaf)[0][1].abs().max() < 1e-15
    assert marginal(log_probs[:0], scores[:0], mask[:0]).shape == (0,)


def test_padding_adds_nothing_to_rag_token_not_even_rounding():
    log_probs, scores, mask = batch(dtype=torch.float32)
    scores.requires_grad_()
    loss = rag_token_nll(log_probs, scores, torch.zeros_like(mask))
    assert not loss.any()
    assert not gradients(loss, scores)[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("marginal", MARGINALS)
def test_extreme_scores(marginal, dtype):
    log_probs, _, mask = batch(dtype=dtype)
    scores = torch.tensor(
        [[1e4, -1e4, 0, 0], [-1e4, -1e4, -1e4, -1e4], [1e4, 1e4, -1e4, -INF]], dtype=dtype
    )
    leaves = [log_probs.requires_grad_(), scores.requires_grad_()]
    got = marginal(*leaves, mask)
    exact = [x.detach().double() for x in leaves]
    # In float64 numbers by hand: the first document alone, all alike, the first two alike.
    for row, weights in enumerate(([1, 0, 0, 0], [0.25] * 4, [0.5, 0.5, 0, 0])):
        prior = torch.tensor(weights, dtype=torch.float64)
        tokens = exact[0][row][:, mask[row]].exp()
        if marginal is rag_sequence_nll:
            expected = -torch.log(prior @ tokens.prod(1))
        else:
            expected = -torch.log(prior @ tokens).sum()
        assert got[row].item() == pytest.approx(expected.item(), rel=1e-5)
    for grad in gradients(got, *leaves):
        assert grad.isfinite().all()


@pytest.mark.parametrize("marginal", MARGINALS)
def test_improbable_answers_do_not_underflow(marginal):
    log_probs, scores, mask = batch(dtype=torch.float32)
    low = (log_probs - 1e4).requires_grad_()
    got = marginal(low, scores, mask)
    exact = marginal(low.detach().double(), scores.double(), mask)
    assert_close(got, exact, error=1e-6)
    (grad,) = gradients(got, low)
    # Each scored token's gradient over the documents is minus the row's weight.
    expected = -torch.arange(1.0, 4.0)[:, None] * mask
    assert torch.allclose(grad.sum(1), expected, rtol=1e-6)


@pytest.mark.parametrize("marginal", MARGINALS)
def test_low_precision_inputs_are_computed_in_fp32(marginal):
    # DPR's scores are about 74: in bf16 the difference of two documents is lost in their soft-max.
    log_probs, scores, mask = batch(rows=16, documents=8, tokens=12)
    low = [log_probs.bfloat16(), (74 + scores).bfloat16()]
    with torch.autocast("cpu", torch.bfloat16):
        leaves = [x.clone().requires_grad_() for x in low]
        got = marginal(*leaves, mask)
    exact = [x.double().requires_grad_() for x in low]
    expected = marginal(*exact, mask)
    assert got.dtype == torch.float32
    assert_close(got, expected, error=1e-6)
    for mine, other in zip(gradients(got, *leaves), gradients(expected, *exact), strict=True):
        assert_close(mine, other, error=4e-3)  # the gradient itself is rounded to bf16


def test_what_is_not_a_number_stays_visible():
    for marginal in MARGINALS:
        log_probs, scores, mask = batch()
        scores[0, 1] = math.nan
        log_probs[2, 0, 0] = math.nan
        got = marginal(log_probs, scores, mask)
        assert got.isnan().tolist() == [True, False, True]


def test_the_prior_is_a_distribution_over_what_is_there():
    scores = torch.tensor([[1.0, 3.0, -INF], [-INF, -INF, -INF]], requires_grad=True)
    prior = document_log_prior(scores)
    assert prior[0, :2].exp().tolist() == pytest.approx(
        [1 / (1 + math.exp(2)), 1 / (1 + math.exp(-2))]
    )
    assert prior[0, 2] == prior[1, 0] == -INF
    prior[0, 0].backward()
    assert scores.grad[0, 2] == 0
    assert not scores.grad[1].any()


def test_the_bos_is_left_out():
    log_probs, scores, mask = batch()
    for marginal in MARGINALS:
        later = mask.clone()
        later[:, 0] = False
        got = marginal(log_probs, scores, mask, exclude_bos=True)
        assert torch.equal(got, marginal(log_probs, scores, later))
        assert not torch.equal(got, marginal(log_probs, scores, mask))


def test_answers_add_up():
    log_probs, _, mask = batch()
    dirty = torch.where(mask[:, None], log_probs, math.nan)
    expected = torch.stack([log_probs[row][:, mask[row]].sum(1) for row in range(3)])
    assert_close(answer_log_probs(dirty, mask), expected)
    assert answer_log_probs(dirty.bfloat16(), mask).dtype == torch.float32


def test_shapes_that_do_not_fit_are_refused():
    log_probs, scores, mask = batch()
    for wrong in (
        (log_probs, scores[:, :2], mask),
        (log_probs, scores, mask[:, :2]),
        (log_probs, scores, mask.long()),
        (log_probs[:, 0], scores, mask),
        (log_probs[:, :0], scores[:, :0], mask),
    ):
        for marginal in MARGINALS:
            with pytest.raises(ValueError, match=r"\[B, K, T\]"):
                marginal(*wrong)
    with pytest.raises(ValueError, match=r"epsilon 1\.5"):
        Smoothing(1.5, 10, log_probs)
    with pytest.raises(ValueError, match="same shape"):
        rag_sequence_nll(log_probs, scores, mask, smoothing=Smoothing(0.1, 9, log_probs[:1]))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 3),
    documents=st.integers(1, 4),
    tokens=st.integers(1, 4),
    missing=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_any_shape(rows, documents, tokens, missing, seed):
    log_probs, scores, _ = batch(rows, documents, tokens, seed)
    mask = torch.rand(rows, tokens, generator=torch.Generator().manual_seed(seed)) < 0.7
    scores[:, documents - min(missing, documents - 1) :] = -INF
    for marginal, written_out in WRITTEN_OUT.items():
        expected = written_out(log_probs, scores, mask)
        assert torch.allclose(marginal(log_probs, scores, mask), expected, rtol=1e-12, atol=1e-14)
    # One document for all is one of the ways to give each token its own.
    if min(missing, documents - 1) == documents - 1:
        sequence, token = (marginal(log_probs, scores, mask) for marginal in MARGINALS)
        assert torch.allclose(sequence, token)


# --- transformers' own RAG, with random weights ---

PAD, BOS, EOS, VOCAB, DOCUMENTS = 1, 0, 2, 40, 3


@pytest.fixture(scope="module")
def rag_models():
    """A tiny DPR and BART in transformers' two RAG models, over the same weights."""
    from transformers import (
        BartConfig,
        BartForConditionalGeneration,
        DPRConfig,
        DPRQuestionEncoder,
        RagConfig,
        RagSequenceForGeneration,
        RagTokenForGeneration,
    )

    torch.manual_seed(0)
    size = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    encoder = DPRConfig(vocab_size=VOCAB, intermediate_size=16, projection_dim=0, **size)
    generator = BartConfig(
        vocab_size=VOCAB,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=32,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=EOS,
        init_std=0.5,
    )
    config = RagConfig.from_question_encoder_generator_configs(encoder, generator)
    config.n_docs = DOCUMENTS
    parts = {
        "question_encoder": DPRQuestionEncoder(encoder),
        "generator": BartForConditionalGeneration(generator),
    }
    kinds = {rag_sequence_nll: RagSequenceForGeneration, rag_token_nll: RagTokenForGeneration}
    return {loss: kind(config=config, **parts).double().eval() for loss, kind in kinds.items()}


def rag_inputs(targets):
    """Decoder inputs of unlike lengths, random contexts and scores."""
    generator = torch.Generator().manual_seed(1)
    width = max(map(len, targets))
    labels = torch.tensor([row + [PAD] * (width - len(row)) for row in targets])
    contexts = torch.randint(3, VOCAB, (len(targets) * DOCUMENTS, 6), generator=generator)
    scores = 2 * torch.randn(len(targets), DOCUMENTS, generator=generator, dtype=torch.float64)
    return labels, {
        "context_input_ids": contexts,
        "context_attention_mask": torch.ones_like(contexts),
        "doc_scores": scores,
        "decoder_input_ids": labels,
    }


def ours_of(logits, labels):
    """What the losses take, from the logits of all documents: decoder inputs predict the next."""
    log_probs = logits.log_softmax(-1).unflatten(0, (-1, DOCUMENTS))[:, :, :-1]
    target = labels[:, 1:]
    index = target[:, None, :, None].expand(-1, DOCUMENTS, -1, 1)
    return log_probs.gather(3, index).squeeze(3), target != PAD, log_probs.sum(3)


ANSWERS = [[EOS, BOS, 7, 8, 9, EOS], [EOS, BOS, 11, EOS], [EOS, BOS, 5, 6, EOS]]


@pytest.mark.parametrize(
    ("marginal", "exclude_bos"),
    [(rag_sequence_nll, False), (rag_sequence_nll, True), (rag_token_nll, False)],
)
def test_transformers_gets_the_same(rag_models, marginal, exclude_bos):
    model = rag_models[marginal]
    labels, inputs = rag_inputs(ANSWERS)
    with torch.no_grad():
        logits = model.rag(**inputs, use_cache=False).logits
    scores = inputs["doc_scores"]
    leaves = [logits.clone().requires_grad_(), scores.clone().requires_grad_()]
    options = {"exclude_bos_score": exclude_bos} if marginal is rag_sequence_nll else {}
    expected = model.get_nll(*leaves, labels, **options)
    ours = [logits.clone().requires_grad_(), scores.clone().requires_grad_()]
    log_probs, mask, _ = ours_of(ours[0], labels)
    got = marginal(log_probs, ours[1], mask, exclude_bos=exclude_bos)
    assert_close(got, expected.flatten())
    for mine, other in zip(
        gradients(got, *ours), gradients(expected.flatten(), *leaves), strict=True
    ):
        assert_close(mine, other)


def test_transformers_smooths_the_same(rag_models):
    model = rag_models[rag_sequence_nll]
    labels, inputs = rag_inputs(ANSWERS)
    with torch.no_grad():
        logits = model.rag(**inputs, use_cache=False).logits
    scores = inputs["doc_scores"]
    for epsilon, exclude_bos in ((0.1, False), (0.3, True)):
        expected = model.get_nll(
            logits, scores, labels, epsilon=epsilon, exclude_bos_score=exclude_bos
        )
        log_probs, mask, sums = ours_of(logits, labels)
        smoothing = Smoothing(epsilon, VOCAB, sums)
        got = rag_sequence_nll(
            log_probs, scores, mask, exclude_bos=exclude_bos, smoothing=smoothing
        )
        assert_close(got, expected.flatten())
        assert not torch.allclose(got, rag_sequence_nll(log_probs, scores, mask))


def test_transformers_smooths_tokens_the_same(rag_models):
    model = rag_models[rag_token_nll]
    labels, inputs = rag_inputs(ANSWERS)
    with torch.no_grad():
        logits = model.rag(**inputs, use_cache=False).logits
    leaves = [logits.clone().requires_grad_(), inputs["doc_scores"].clone().requires_grad_()]
    expected = model.get_nll(*leaves, labels, epsilon=0.2).flatten()
    ours = [logits.clone().requires_grad_(), inputs["doc_scores"].clone().requires_grad_()]
    log_probs, mask, _ = ours_of(ours[0], labels)
    every = ours[0].log_softmax(-1)[:, :-1]
    pair = torch.arange(len(every)).view(-1, DOCUMENTS)
    spread = rag_token_vocab_nll(every, pair, ours[1], mask)
    got = 0.8 * rag_token_nll(log_probs, ours[1], mask) + 0.2 / VOCAB * spread
    assert_close(got, expected)
    for mine, other in zip(gradients(got, *ours), gradients(expected, *leaves), strict=True):
        assert_close(mine, other)


def test_missing_documents_are_not_smoothed():
    scores = torch.tensor([[0.3, -INF, 0.7], [-INF, -INF, -INF]], dtype=torch.float64)
    every = torch.randn(2, 2, 5, dtype=torch.float64).log_softmax(-1)
    pair = torch.tensor([[0, -1, 1], [-1, -1, -1]])
    mask = torch.tensor([[True, False], [True, True]])
    scores.requires_grad_()
    got = rag_token_vocab_nll(every, pair, scores, mask)
    prior = torch.tensor([0.3, 0.7], dtype=torch.float64).softmax(0)
    expected = -(prior[:, None] * every[:, 0].exp()).sum(0).log().sum()
    assert got.tolist() == pytest.approx([expected.item(), 0.0])
    got.sum().backward()
    assert scores.grad.isfinite().all()
    assert not scores.grad[1].any()
    assert rag_token_vocab_nll(every, pair[:0], scores[:0], mask[:0]).shape == (0,)


def test_transformers_loses_the_prior_of_an_answer_of_one_token(rag_models):
    """Why the two differ there, and that ours is the formula."""
    labels, inputs = rag_inputs([[BOS, 7], [BOS, 9]])
    scores = inputs["doc_scores"]
    for marginal, model in rag_models.items():
        with torch.no_grad():
            logits = model.rag(**inputs, use_cache=False).logits
        log_probs, mask, _ = ours_of(logits, labels)
        got = marginal(log_probs, scores, mask)
        expected = -torch.log((scores.softmax(1) * log_probs[:, :, 0].exp()).sum(1))
        assert_close(got, expected)
        theirs = model.get_nll(logits, scores, labels).flatten()
        if marginal is rag_token_nll:
            assert_close(theirs, expected)
        else:
            assert_close(theirs, -torch.log(log_probs[:, :, 0].exp().sum(1)))
            # A single id, without anything before it, is shifted away altogether.
            first = logits[:, :1]
            none = model.get_nll(first, scores, labels[:, 1:])
            assert none.tolist() == pytest.approx([-math.log(DOCUMENTS)] * 2)
