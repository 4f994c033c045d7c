"""The planner's command: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch.distributed as dist
from transformers import BertConfig

from pixelrag.cli import main
from pixelrag.plan.mirror import mirrored


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("plan")
    BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        vocab_size=500,
    ).save_pretrained(folder / "bert")  # fmt: skip
    (folder / "rows.jsonl").write_text("{}\n")
    return [
        "plan", f"--model.name_or_path={folder}/bert", f"--data.train={folder}/rows.jsonl",
        f"--output_dir={folder}/run", "--optim.max_steps=2", "--batch.chunk_size=4",
        "--batch.per_device_batch_size=8", "--query_tokens=8", "--document_tokens=16",
    ]  # fmt: skip


def test_a_plan_in_words_and_numbers(flags, tmp_path: Path, capsys) -> None:
    """A thousand ranks in one process: each gathers all documents, and sums all gradients."""
    written = tmp_path / "plan.json"
    assert main([*flags, "--nodes=125", "--device=b200", f"--output={written}"]) == 0
    out = capsys.readouterr().out
    assert "125 nodes of 8 b200" in out
    assert "fits" in out
    assert "binds: at most" in out
    found = json.loads(written.read_text())
    assert found["world_size"] == 1000
    parameters = found["trained"]
    # The temperature trains, too; ranks agree on a handful of integers.
    assert found["bytes"]["all_reduce"] == pytest.approx(4 * parameters, rel=0.01)
    assert found["bytes"]["reduce_scatter"] == 1000 * 8 * 32 * 4
    assert not dist.is_initialized()


def test_what_does_not_fit_is_said(flags, tmp_path: Path, capsys) -> None:
    """Weights, moments and gradients of 3.6 billion parameters."""
    BertConfig(
        hidden_size=8192, num_hidden_layers=4, num_attention_heads=64, intermediate_size=32768,
        vocab_size=50_000,
    ).save_pretrained(tmp_path)  # fmt: skip
    assert main([*flags, f"--model.name_or_path={tmp_path}", "--device=l40s"]) == 0
    assert "does not fit" in capsys.readouterr().out


def test_engines_are_compared_and_the_largest_chunk_is_found(flags, capsys) -> None:
    """What is sharded over four ranks takes less; all eight rows of a rank fit at once."""
    assert main([*flags, "--devices_per_node=4", "--search=on"]) == 0
    out = capsys.readouterr().out
    compared = out.split("engines at these sizes")[1]
    taken = dict(re.findall(r"^  (\w+),.*? ([\d.]+) +[\d,]+$", compared, re.MULTILINE))
    assert set(taken) == {"ddp", "zero1", "zero2", "zero3", "fsdp2"}
    assert float(taken["fsdp2"]) <= float(taken["ddp"])
    assert "largest batch.chunk_size that fits: 8 (" in compared


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--device=abacus", "--device: got 'abacus', expected one of b200, h200"),
        ("--nodes=0", "--nodes: got '0', expected a number from 1 to"),
        ("--search=perhaps", "--search: got 'perhaps', expected on or off"),
        ("--mfu=much", "--mfu: got 'much', expected a number from 0.001 to 1"),
        ("--supervised=0.5", "--supervised: the contrastive job has no such thing"),
    ],
)
def test_flags_that_mean_nothing(flag: str, message: str, flags, capsys) -> None:
    assert main([*flags, flag]) == 2
    assert message in capsys.readouterr().err


def test_a_mirror_sums_equal_parts() -> None:
    import torch

    with mirrored(3) as traffic:
        numbers = torch.tensor([1.0, 2.0])
        dist.all_reduce(numbers)
        assert numbers.tolist() == [3.0, 6.0]
        rows = [torch.zeros(2) for _ in range(3)]
        dist.all_gather(rows, torch.tensor([4.0, 5.0]))
        assert torch.stack(rows).tolist() == [[4.0, 5.0]] * 3
        assert traffic.calls == {"all_reduce": 1, "all_gather": 1}
        assert traffic.bytes == {"all_reduce": 8, "all_gather": 24}
        assert traffic.sent(3) == pytest.approx(2 / 3 * (2 * 8 + 24))
