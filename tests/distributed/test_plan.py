"""What the planner predicts of a step, against the same step taken for real on two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, Qwen3Config, T5Config

from pixelrag.plan.prediction import predict
from pixelrag.plan.workload import Lengths
from tests.distributed.harness import Results, run_cases
from tests.distributed.plan_cases import config_of

CASES = (
    "contrastive ddp", "contrastive zero0", "contrastive zero1", "contrastive zero2",
    "contrastive zero3", "contrastive fsdp2", "distill zero1", "distill fsdp2", "rag ddp",
)  # fmt: skip
BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}


def _cases(folder: Path) -> dict[str, dict[str, Any]]:
    bert, qwen, teacher, reader = (folder / n for n in ("bert", "qwen", "teacher", "reader"))
    T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=1000,
        decoder_start_token_id=0,
    ).save_pretrained(reader)  # fmt: skip
    BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        vocab_size=1000,
    ).save_pretrained(bert)  # fmt: skip
    for place, width in ((qwen, 64), (teacher, 96)):
        Qwen3Config(
            hidden_size=width, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, intermediate_size=128, vocab_size=2000,
        ).save_pretrained(place)  # fmt: skip
    (folder / "rows.jsonl").write_text("{}\n")
    contrastive = [
        f"--output_dir={folder}/run", f"--model.name_or_path={bert}",
        f"--data.train={folder}/rows.jsonl", "--optim.max_steps=2",
        "--batch.per_device_batch_size=32", "--batch.chunk_size=16",
    ]  # fmt: skip
    distill = [
        f"--output_dir={folder}/run", f"--student.name_or_path={qwen}",
        f"--teacher.name_or_path={teacher}", f"--data.train={folder}/rows.jsonl",
        "--optim.max_steps=2", "--batch.per_device_batch_size=2", "--packing.length=256",
        "--loss.chunk_size=64", "--batch.gradient_accumulation_steps=2",
    ]  # fmt: skip
    rag = [
        f"--output_dir={folder}/run", f"--question_encoder.name_or_path={bert}",
        f"--generator.name_or_path={reader}", f"--data.train={folder}/rows.jsonl",
        f"--knowledge_base.source={folder}/rows.jsonl", "--optim.max_steps=2",
        "--batch.per_device_batch_size=4", "--retrieval.k=2", "--generator.prompt_max_length=64",
        "--generator.target_max_length=8", "--batch.generator_chunk_size=4",
    ]  # fmt: skip
    jobs = {
        "contrastive": (contrastive, {"query": 16, "document": 64}),
        "distill": (distill, {"document": 32, "supervised": 0.5}),
        "rag": (rag, {"query": 16, "document": 64}),
    }
    cases = {}
    for name in CASES:
        job, engine = name.split()
        arguments, lengths = jobs[job]
        more = [f"--engine.name={engine}", "--engine.device=cpu"]
        if engine in ("zero1", "zero2", "zero3"):
            # DeepSpeed's own buckets hold 2 GB each, whatever the model.
            file = folder / f"{engine}.json"
            section = {"stage": int(engine[-1]), **BUCKETS}
            file.write_text(json.dumps({"zero_optimization": section}))
            more.append(f"--engine.deepspeed={file}")
        cases[name] = {"job": job, "arguments": arguments + more, "lengths": lengths}
    return cases


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return _cases(tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def measured(cases: dict[str, dict[str, Any]]) -> Results:
    return run_cases("tests.distributed.plan_cases:measure", cases, nproc=2)


@pytest.mark.parametrize("name", CASES)
def test_a_step_costs_what_was_predicted(
    name: str, cases: dict[str, Any], measured: Results
) -> None:
    real = measured[name][0]
    found = predict(config_of(cases[name]), 2, Lengths(**cases[name]["lengths"]))
    print(
        f"{name}: predicted {found.peak:,}, measured {real['peak']:,} bytes: "
        f"{found.peak / real['peak'] - 1:+.1%}"
    )
    assert found.peak == pytest.approx(real["peak"], rel=0.05)
    assert found.calls == real["calls"]
    assert found.bytes == real["bytes"]
