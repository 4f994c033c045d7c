"""Options of the jobs act in a plan as they do in a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import counts
from pixelrag.config import jobs
from pixelrag.config.base import load
from pixelrag.errors import ConfigError
from pixelrag.models.tiny import tiny_qwen3_vl_config
from pixelrag.plan.hardware import DEVICES
from pixelrag.plan.prediction import Prediction, predict
from pixelrag.plan.workload import Lengths

Predict = Callable[..., Prediction]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Predict:
    """Plans a job of two ranks on H200 with further flags, in which {} is a folder of models."""
    folder: Path = tmp_path_factory.mktemp("plan")

    def predicted(job: str, *more: str, **lengths: int) -> Prediction:
        case = counts.case_of(folder, job, "ddp")
        flags = [*case.arguments, *(flag.format(folder) for flag in more)]
        config = load(jobs.config_class(job), flags)[0]
        return predict(config, 2, Lengths(**(case.lengths | lengths)), DEVICES["h200"])

    return predicted


@pytest.fixture(scope="module")
def contrastive(plan: Predict) -> Prediction:
    return plan("contrastive")


@pytest.fixture(scope="module")
def distill(plan: Predict) -> Prediction:
    return plan("distill")


def test_graphs_that_are_kept_save_a_forward_and_cost_memory(plan, contrastive) -> None:
    for replay in ("none", "auto"):
        found = plan("contrastive", f"--batch.replay={replay}")
        assert found.flops == pytest.approx(0.75 * contrastive.flops, rel=0.01)
        assert found.memory["activations"] > 2 * contrastive.memory["activations"]


def test_chunks_of_a_size_that_memory_allows(plan, contrastive) -> None:
    """32 documents go through at once, not 16."""
    found = plan("contrastive", "--batch.chunk_size=auto")
    assert found.launches < 0.7 * contrastive.launches
    assert found.memory["activations"] > 1.9 * contrastive.memory["activations"]


def test_frozen_encoders(plan, contrastive) -> None:
    guide = plan("contrastive", "--loss.mask_guide={}/bert")
    assert guide.frozen == guide.trained - 1 == contrastive.trained - 1  # the temperature
    assert guide.memory["frozen models"] == pytest.approx(4 * guide.frozen, rel=0.02)  # buffers
    # A forward pass of both sides, where training takes four.
    assert guide.flops == pytest.approx(1.25 * contrastive.flops, rel=0.05)
    queries = plan("contrastive", "--train=[query]")
    assert queries.memory["frozen models"] == guide.memory["frozen models"]
    assert queries.flops < 0.3 * contrastive.flops
    assert queries.tokens == 32 * 16


def test_averages_lie_beside_the_moments(plan, contrastive) -> None:
    found = plan("contrastive", "--ema.decay=0.99")
    assert found.memory["optimizer"] == pytest.approx(contrastive.memory["optimizer"] * 1.5, 0.01)


def test_documents_with_images(plan, tmp_path: Path) -> None:
    """9 tokens of an image are 36 patches, which go through a tower of their own."""

    class Tokenizer(dict):
        eos_token_id = pad_token_id = bos_token_id = 0

        def get_vocab(self) -> Tokenizer:
            return self

        def __missing__(self, token: str) -> int:
            return 1 + sum(map(ord, token)) % 90

        def __len__(self) -> int:
            return 100

    tiny_qwen3_vl_config(Tokenizer(), num_layers=1).save_pretrained(tmp_path)
    flags = (f"--model.name_or_path={tmp_path}", "--engine.name=fsdp2")
    text = plan("contrastive", *flags)
    found = plan("contrastive", *flags, "--lora.enabled=true", "--lora.vision=all", image=9)
    assert found.tokens == text.tokens + 32 * 9
    assert found.flops > 2 * text.flops
    assert found.trained < text.trained
    with pytest.raises(ConfigError, match="--image_tokens: BertModel reads no images"):
        plan("contrastive", image=9)


def test_where_the_teacher_is(plan, distill) -> None:
    whole = distill.memory["frozen models"]
    cached = plan("distill", "--teacher.source=cache", "--teacher.path={}")
    assert "frozen models" not in cached.memory
    assert cached.flops < 0.7 * distill.flops
    states = plan("distill", "--teacher.source=hidden_states", "--teacher.path={}")
    assert states.memory["frozen models"] == 4 * 2000 * 96  # its head
    shared_out = plan("distill", "--teacher.placement=sharded")
    assert whole / 2 < shared_out.memory["frozen models"] < 0.75 * whole
    assert shared_out.calls["all_gather"] > distill.calls.get("all_gather", 0) + 4


def test_attention_costs_the_square_of_what_attends(plan, distill) -> None:
    """Rows of 256 tokens that see each other, or documents of 32, eight to a row.

    Student and teacher have 2 layers with 4 heads of 16 each; a causal square is half computed,
    of 4 operations a pair and number forward and 10 backward, on 2 micro-batches of 2 rows.
    """
    found = plan("distill", "--packing.attention=concatenated")
    pairs = 4 * (256**2 - 8 * 32**2) / 2
    assert found.flops - distill.flops == pairs * 2 * 4 * 16 * (4 + 10 + 4)


def test_passages_are_scored_anew(plan) -> None:
    """4 candidates for each question: 2 ranks x 4 questions, dealt out to the ranks."""
    found, plain = plan("rag", "--retrieval.over_retrieve=4"), plan("rag")
    forward = found.flops - plain.flops
    assert 0.2 * plain.flops < forward < plain.flops
    assert found.calls["all_gather"] > plain.calls["all_gather"]
