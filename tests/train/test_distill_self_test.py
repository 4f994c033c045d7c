"""What a run tries before its first step, and what a machine is told it will need."""

import json
from pathlib import Path

import pytest

from pixelrag.config.distill import DistillConfig
from pixelrag.distributed.env import process_group
from pixelrag.models.teacher import LiveTeacher
from pixelrag.train import distill
from pixelrag.train.distill_budget import budget_of
from tests.train.material import merged


class Stop(Exception):
    """The models have been tried."""


@pytest.fixture
def tried(lesson, monkeypatch):
    """Runs up to the first step; returns which models' isolation was tried."""
    found: list[str] = []
    monkeypatch.setattr(distill, "check_isolation", lambda *_, name, **__: found.append(name))

    def of_teacher(teacher, vocab_size, *, isolated):
        found.extend(["teacher"] * isolated)
        raise Stop

    monkeypatch.setattr(LiveTeacher, "self_test", of_teacher)

    def _tried(function, *overrides: dict) -> list[str]:
        found.clear()
        config = DistillConfig(**merged(lesson, *overrides))
        with process_group("cpu", 60) as world, pytest.raises(Stop):
            function(config, world)
        return list(found)

    return _tried


CONCATENATED = {"packing": {"attention": "concatenated"}}
NOTHING_HELD_OUT = {"data": {"eval_samples": None}}


def test_isolation_is_tried_wherever_samples_share_a_row_unseen(tried):
    both = ["student", "teacher"]
    assert tried(distill.train) == both
    assert tried(distill.train, NOTHING_HELD_OUT) == both
    # Trained on as they stand behind each other, but measured each by itself.
    assert tried(distill.train, CONCATENATED) == both
    assert tried(distill.train, CONCATENATED, NOTHING_HELD_OUT) == []
    assert tried(distill.train, {"packing": {"enabled": False}}) == []
    # `pixelrag eval` reports figures of the same rows.
    assert tried(distill.evaluate) == both


@pytest.mark.parametrize(
    ("change", "per_token"),
    [
        # Both models' logits in fp32.
        ({}, 8),
        # And their gradient in bf16, as the products take it.
        ({"engine": {"precision": "bf16"}}, 10),
        # Logits in bf16, whose gradient takes their place.
        ({"engine": {"precision": "bf16"}, "loss": {"precision": "fast"}}, 4),
        ({"loss": {"precision": "fast"}}, 8),
        # The teacher's few tokens come from the disk.
        ({"teacher": {"source": "cache", "path": "p", "name_or_path": None}}, 4),
    ],
    ids=["fp32", "bf16", "bf16_fast", "fp32_fast", "cache"],
)
def test_what_the_loss_takes(lesson, change, per_token):
    head = 4 * 32 * budget_rows(lesson)
    small = budget_of(DistillConfig(**merged(lesson, change)), vocab_size=500)
    assert small.loss_bytes == 7 * 500 * per_token + head
    loss = {"loss": {**change.get("loss", {}), "chunk_size": 10_000}}
    # There are no more than 2 rows of 96 tokens.
    large = budget_of(DistillConfig(**merged(lesson, change, loss)), vocab_size=500)
    assert large.loss_bytes == 192 * 500 * per_token + head


def budget_rows(lesson) -> int:
    path = Path(lesson["student"]["name_or_path"]) / "config.json"
    return json.loads(path.read_text())["vocab_size"]


def test_an_adapter_and_whole_logits_need_less_or_other_memory(lesson):
    plain = budget_of(DistillConfig(**lesson), vocab_size=500)
    adapted = budget_of(DistillConfig(**merged(lesson, {"lora": {"enabled": True}})), 500)
    # Rank 32 on queries and values' projections (32 to 32 and to 16), keys and outputs, 3 layers.
    trained = 3 * 32 * (2 * (32 + 32) + 2 * (32 + 16))
    assert adapted.state_bytes == 16 * trained + 4 * plain.state_bytes // 16
    assert adapted.loss_bytes == 7 * 500 * 8
    assert (plain.passes, adapted.passes) == (3, 2)
    whole = budget_of(DistillConfig(**merged(lesson, {"loss": {"implementation": "logits"}})), 500)
    assert whole.loss_bytes is None
    assert whole.logits_bytes == 8 * 192 * 500
