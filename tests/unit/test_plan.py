"""The planner's command: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from transformers import BertConfig, Qwen3Config, T5Config

from pixelrag.cli import main
from pixelrag.config.base import load
from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.distill import DistillConfig
from pixelrag.errors import ConfigError
from pixelrag.plan import search
from pixelrag.plan.hardware import DEVICES, Cluster
from pixelrag.plan.mirror import mirrored
from pixelrag.plan.prediction import predict
from pixelrag.plan.workload import Lengths

VOCABULARY = 151_669


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("plan")
    BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        vocab_size=500,
    ).save_pretrained(folder / "bert")  # fmt: skip
    (folder / "rows.jsonl").write_text("{}\n")
    return [
        "plan", f"--model.name_or_path={folder}/bert", f"--data.train={folder}/rows.jsonl",
        f"--output_dir={folder}/run", "--optim.max_steps=2", "--batch.chunk_size=4",
        "--batch.per_device_batch_size=8", "--query_tokens=8", "--document_tokens=16",
    ]  # fmt: skip


def test_a_plan_in_words_and_numbers(flags, tmp_path: Path, capsys) -> None:
    """4,096 ranks in one process: each gathers all documents, and sums all gradients."""
    written = tmp_path / "plan.json"
    assert main([*flags, "--nodes=512", "--device=b200", f"--output={written}"]) == 0
    out = capsys.readouterr().out
    assert "512 nodes of 8 b200" in out
    assert "fits" in out
    assert "binds: at most" in out
    found = json.loads(written.read_text())
    assert found["world_size"] == 4096
    parameters = found["trained"]
    # The temperature trains, too; ranks agree on a handful of integers.
    assert found["bytes"]["all_reduce"] == pytest.approx(4 * parameters, rel=0.01)
    assert found["bytes"]["reduce_scatter"] == 4096 * 8 * 32 * 4
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
    assert "largest batch.chunk_size that fits: 8 (the whole batch of a rank; " in compared
    suggestion = out.split("suggested: ")[1].split()
    assert {"--batch.per_device_batch_size=8", "--batch.chunk_size=8"} <= set(suggestion)
    load(ContrastiveConfig, [*flags[1:5], *suggestion])  # all are known


@pytest.mark.parametrize(("fitting", "chunk"), [(100, 16), (5, 4), (1, 1), (0, None)])
def test_the_largest_chunk_that_fits(
    fitting: int, chunk: int | None, flags, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the configured 4 upwards to all that a rank has, or downwards to a single row."""

    def predict(config: ContrastiveConfig, *_: object) -> SimpleNamespace:
        return SimpleNamespace(fits=lambda _: config.batch.chunk_size <= fitting)

    monkeypatch.setattr(search, "predict", predict)
    config = load(ContrastiveConfig, [*flags[1:6], "--batch.per_device_batch_size=16"])[0]
    assert config.batch.chunk_size == 4
    found = search.largest(config, Cluster(DEVICES["h200"], 1, 2, 1e9), Lengths())
    assert (None if found is None else found.config.batch.chunk_size) == chunk
    assert found is None or search.is_whole(found.config, 2) == (chunk == 16)


def test_micro_batches_are_divisors_of_a_ranks_rows(tmp_path: Path, monkeypatch) -> None:
    def predict(config: DistillConfig, *_: object) -> SimpleNamespace:
        return SimpleNamespace(fits=lambda _: config.batch.per_device_batch_size < 6)

    monkeypatch.setattr(search, "predict", predict)
    sizes = ("--batch.per_device_batch_size=2", "--batch.gradient_accumulation_steps=6")
    found = search.largest(
        _distill(tmp_path, *sizes), Cluster(DEVICES["h200"], 1, 2, 1e9), Lengths()
    )
    batch = found.config.batch
    assert (batch.per_device_batch_size, batch.gradient_accumulation_steps) == (4, 3)


def _distill(folder: Path, *more: str) -> DistillConfig:
    """The playbook's loss and batch between two narrow models of the real vocabulary."""
    for name in ("student", "teacher"):
        Qwen3Config(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            head_dim=16, intermediate_size=64, vocab_size=VOCABULARY, tie_word_embeddings=True,
        ).save_pretrained(folder / name)  # fmt: skip
    (folder / "rows.jsonl").write_text("{}\n")
    flags = [
        f"--student.name_or_path={folder}/student", f"--teacher.name_or_path={folder}/teacher",
        f"--data.train={folder}/rows.jsonl", f"--output_dir={folder}/run", "--optim.max_steps=2",
        "--engine.device=cpu", *more,
    ]  # fmt: skip
    return load(DistillConfig, flags)[0]


def test_the_playbooks_logits(tmp_path: Path) -> None:
    """4 rows of 4,096 tokens and Qwen3's vocabulary: 9.94 GB a model in fp32, 1.24 GB a chunk.

    "Increasing micro-batch size by one can add many GiB" where logits are whole; in chunks of
    2,048 tokens there is never more than that.
    """
    gigabytes = 4096 * VOCABULARY * 4 / 1e9  # of a row, in fp32
    assert 4 * gigabytes == pytest.approx(9.94, abs=0.01)
    peaks = {}
    for implementation, rows in (("logits", 3), ("logits", 4), ("fused", 4)):
        config = _distill(
            tmp_path,
            f"--batch.per_device_batch_size={rows}",
            "--batch.gradient_accumulation_steps=1",
            f"--loss.implementation={implementation}",
        )
        found = predict(config, 1, Lengths(document=1024), DEVICES["b200"])
        peaks[implementation, rows] = found.memory["logits"] / 1e9
    chunk = 2048 * VOCABULARY * 4 / 1e9
    assert chunk == pytest.approx(1.24, abs=0.01)
    # Of both models, and two scratch blocks of an eighth.
    assert peaks["fused", 4] == pytest.approx(2.25 * chunk, rel=0.01)
    added = peaks["logits", 4] - peaks["logits", 3]
    assert added > 2 * gigabytes  # both models', and what the loss makes of them
    assert peaks["logits", 4] > 3.9 * added


def test_the_index_of_a_knowledge_base(tmp_path: Path, flags, capsys) -> None:
    T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=500,
        decoder_start_token_id=0,
    ).save_pretrained(tmp_path)  # fmt: skip
    bert, rows, output, *_ = (flag.partition("=")[2] for flag in flags[1:])
    rag = [
        "plan", f"--question_encoder.name_or_path={bert}", f"--generator.name_or_path={tmp_path}",
        f"--knowledge_base.source={rows}", f"--data.train={rows}", f"--output_dir={output}",
        "--optim.max_steps=2", "--batch.per_device_batch_size=2", "--retrieval.k=2",
        "--generator.prompt_max_length=32", "--query_tokens=8", "--document_tokens=16",
        "--index.factory=Flat", "--index.num_shards=2", "--passages=8000000", "--network=1",
    ]  # fmt: skip
    assert main([*rag, "--devices_per_node=2", "--link=2", f"--output={tmp_path}/plan.json"]) == 0
    out = capsys.readouterr().out
    # 8 million vectors of 32 numbers; each rank has one of two files.
    assert re.search(r"host memory, index +0\.477\n", out)
    assert re.search(r"host memory, vectors of passages, mapped +0\.954\n", out)
    sent = json.loads((tmp_path / "plan.json").read_text())["sent"]
    assert f"{'network':<40} {1e3 * sent / 2e9:>10,.2f}" in out  # one node: its links count


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--device=abacus", "--device: got 'abacus', expected one of b200, h200"),
        ("--nodes=0", "--nodes: got '0', expected a number from 1 to"),
        ("--search=perhaps", "--search: got 'perhaps', expected on or off"),
        ("--mfu=much", "--mfu: got 'much', expected a number from 0.001 to 1"),
        ("--passages=100", "--passages: the contrastive job has no such thing"),
        ("--supervised=0.5", "--supervised: the contrastive job has no such thing"),
    ],
)
def test_flags_that_mean_nothing(flag: str, message: str, flags, capsys) -> None:
    assert main([*flags, flag]) == 2
    assert message in capsys.readouterr().err


def test_what_is_not_planned(tmp_path: Path) -> None:
    for flags, message in (
        (("--engine.name=zero1", "--engine.offload_optimizer=true"), "engine.offload_optimizer"),
        (("--teacher.offload=true", "--engine.device=auto"), "teacher.offload: the plan knows"),
    ):
        with pytest.raises(ConfigError, match=message):
            predict(_distill(tmp_path, *flags), 1, Lengths(), DEVICES["h200"])


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
