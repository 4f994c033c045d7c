"""What the RAG step is made of: chunks of generator inputs, the container, the objective."""

import math

import pytest
import torch
from torch import nn

from pixelrag.gradcache.rag_batch import split_targets
from pixelrag.losses.rag_objective import RagObjective
from pixelrag.models.rag import RagModel

NEG = float("-inf")


def padded(lengths: list[int], *, left: bool) -> dict[str, torch.Tensor]:
    width = max(lengths) + 2
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, slice(width - length, None) if left else slice(length)] = 1
    ids = torch.arange(mask.numel()).reshape(mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask}


def targets(lengths: list[int]) -> dict[str, torch.Tensor]:
    inputs = padded(lengths, left=False)
    return {"target_ids": inputs["input_ids"], "target_mask": inputs["attention_mask"]}


@pytest.mark.parametrize("left", [False, True])
def test_chunks_are_padded_as_far_as_their_own_rows_need(left: bool):
    # Prompts and targets of equal width: neither may be cut by the other's mask.
    inputs = padded([2, 5, 9, 3, 7], left=left) | targets([4, 1, 2, 9, 3])
    chunks = split_targets(inputs, 2)
    assert [tuple(chunk["input_ids"].shape) for chunk in chunks] == [(2, 5), (2, 9), (1, 7)]
    assert [tuple(chunk["target_ids"].shape) for chunk in chunks] == [(2, 4), (2, 9), (1, 3)]
    for key in inputs:
        real = [chunk[key][chunk[_mask_of(key)].bool()] for chunk in chunks]
        assert torch.cat(real).equal(inputs[key][inputs[_mask_of(key)].bool()])


def _mask_of(key: str) -> str:
    return "target_mask" if key.startswith("target") else "attention_mask"


def test_fused_prompts_keep_their_documents():
    flat = padded([2, 5, 0, 3, 7, 1], left=False)
    inputs = {key: value.unflatten(0, (2, 3)) for key, value in flat.items()} | targets([2, 1])
    chunks = split_targets(inputs, 1)
    assert [tuple(chunk["input_ids"].shape) for chunk in chunks] == [(1, 3, 5), (1, 3, 7)]
    real = [chunk["input_ids"][chunk["attention_mask"].bool()] for chunk in chunks]
    assert torch.cat(real).equal(flat["input_ids"][flat["attention_mask"].bool()])


def test_a_chunk_has_at_least_one_row():
    with pytest.raises(ValueError, match="at least 1"):
        split_targets(padded([2], left=True) | targets([1]), 0)


class Part(nn.Module):
    """Doubles its input; with dropout, so that its mode shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, *, touch_vision: bool = False, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x))

    def blocks(self) -> list[nn.Module]:
        return [self.linear]


def test_frozen_parts_stay_as_they_are():
    model = RagModel(Part(), Part(), Part(), train=["question"], learnable_temperature=True)
    assert model.trained == ("query",)
    assert model.question_encoder.training
    assert not model.document_encoder.training
    assert not model.generator.training
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert {name.partition(".")[0] for name in trained} == {"question_encoder", "logit_scale"}
    model.eval().train()
    assert not model.document_encoder.training
    assert len(model.blocks()) == 3


def test_readings_have_no_dropout_and_leave_the_mode():
    model = RagModel(Part(), None, Part())
    x = torch.ones(4, 3)
    assert model.generator.training
    torch.testing.assert_close(model("reading", x=x)[0], model.generator.linear(x))
    assert model.generator.training
    # What is only read is not run again for a gradient.
    assert model.trained == ("query", "document", "generator")
    assert model.document_prefix == "question_encoder."


def test_a_shared_encoder_is_trained_for_both_or_neither():
    with pytest.raises(ValueError, match="name both or neither"):
        RagModel(Part(), None, Part(), train=["document"])
    with pytest.raises(ValueError, match="role: got 'x'"):
        RagModel(Part(), None, Part())("x")


def test_leave_one_out_of_the_marginal_model():
    scores = torch.tensor([[1.0, 0.5, NEG], [2.0, NEG, NEG]], dtype=torch.float64)
    scores.requires_grad_()
    pair = torch.tensor([[0, 1, -1], [2, -1, -1]])
    log_probs = torch.tensor([[-1.0], [-3.0], [-2.0]], dtype=torch.float64)
    mask = torch.ones(2, 1, dtype=torch.bool)
    terms = RagObjective(retriever="loop")(scores, log_probs, pair, mask)
    # Without the first document the answer has log p = -3, without the second -1.
    p = torch.tensor([3.0, 1.0], dtype=torch.float64).softmax(0)
    q = torch.tensor([1.0, 0.5], dtype=torch.float64).log_softmax(0)
    expected = float((p * (p.log() - q)).sum())
    assert terms.retriever_B.tolist() == pytest.approx([expected, 0.0], abs=1e-12)
    terms.loss_B.sum().backward()
    assert torch.isfinite(scores.grad).all()
    assert (scores.grad[:, 2] == 0).all()


def test_the_posterior_is_that_of_bayes():
    scores = torch.tensor([[0.0, math.log(3.0), NEG]])
    log_probs = torch.tensor([[math.log(0.9)], [math.log(0.1)]])
    pair = torch.tensor([[0, 1, -1]])
    terms = RagObjective()(scores, log_probs, pair, torch.ones(1, 1, dtype=torch.bool))
    joint = torch.tensor([0.25 * 0.9, 0.75 * 0.1])
    torch.testing.assert_close(terms.answer_B, -joint.sum().log()[None])
    posterior = joint / joint.sum()
    torch.testing.assert_close(
        terms.posterior_entropy_B, -(posterior * posterior.log()).sum()[None]
    )


def test_the_retrievers_loss_leaves_the_generator_alone_and_the_other_way_round():
    scores = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    log_probs = (-torch.rand(6, 4, dtype=torch.float64)).requires_grad_()
    pair, mask = torch.arange(6).view(2, 3), torch.ones(2, 4, dtype=torch.bool)
    terms = RagObjective(retriever="pdist", retriever_weight=2.0)(scores, log_probs, pair, mask)
    terms.loss_B.sum().backward()
    apart = scores.grad.clone(), log_probs.grad.clone()
    scores.grad = log_probs.grad = None
    marginal = RagObjective()(scores.detach(), log_probs, pair, mask)
    marginal.loss_B.sum().backward()
    torch.testing.assert_close(apart[1], log_probs.grad)
    assert apart[0].abs().sum() > 0


def test_smoothing_needs_the_vocabulary():
    for wrong in ({"label_smoothing": 1.0, "vocab_size": 3}, {"label_smoothing": 0.1}):
        with pytest.raises(ValueError, match="label_smoothing"):
            RagObjective(**wrong)
    kinds = [RagObjective(answer=answer, label_smoothing=0.1, vocab_size=3, retriever="emdr2")
             for answer in ("rag_sequence", "rag_token", "fid")]  # fmt: skip
    assert [kind.vocabulary for kind in kinds] == ["sum", "all", "sum"]
    assert RagObjective(vocab_size=3).vocabulary == "none"


def test_reading_everything_at_once_marginalises_nothing():
    with pytest.raises(ValueError, match="nothing is marginalised"):
        RagObjective(answer="fid")
    assert RagObjective(answer="fid", retriever="emdr2").reads_apart
    assert RagObjective(answer="fid", retriever="loop").leaves_out
