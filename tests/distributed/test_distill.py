"""Distillation on every engine, full and with adapters: the figures of one plain process."""

from pathlib import Path

import pytest

from tests.distributed.distill_trials import make_material
from tests.distributed.harness import Results, run_alone, run_cases

pytestmark = pytest.mark.distributed

ENGINES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")
LORA = ["--lora.enabled=true", "--lora.dropout=0", "--lora.target_modules=[q_proj, lm_head]"]
UNPACKED = ["--packing.enabled=false"]
# Everything in one step: 40 samples, whatever their rows.
WHOLE = ["--batch.per_device_batch_size=64", "--batch.gradient_accumulation_steps=1"]

# What a single process computes; the names before a colon say which of these a case must equal.
REFERENCES = {
    "tied": {},
    "untied": {"student": "untied"},
    "lora": {"flags": LORA},
    "lora_untied": {"student": "untied", "flags": LORA},
    "unpacked": {"flags": UNPACKED},
    "concatenated": {"flags": ["--packing.attention=concatenated"]},
    "whole": {"flags": WHOLE},
}
ALONE = {
    "whole:unpacked": {"flags": [*WHOLE, *UNPACKED]},
    "whole:short_rows": {"flags": [*WHOLE, "--packing.length=80"]},
    "whole:micro_batches": {
        "flags": ["--batch.per_device_batch_size=3", "--batch.gradient_accumulation_steps=22"]
    },
    "whole:logits": {"flags": [*WHOLE, "--loss.implementation=logits"]},
    "whole:sdpa": {"flags": [*WHOLE, "--student.attention=sdpa", "--teacher.attention=eager"]},
    "whole:one_chunk": {"flags": [*WHOLE, "--loss.chunk_size=4096"]},
    "tied:zero3": {"flags": ["--engine.name=zero3"]},
    "tied:fsdp2": {"flags": ["--engine.name=fsdp2"]},
    "tied:checkpointing": {"flags": ["--student.gradient_checkpointing=true"]},
    "tied:adamw": {"flags": ["--optim.fused=false"]},
}
# Two ranks; half of the accumulation makes the same global batch.
HALF = ["--batch.gradient_accumulation_steps=1"]
SHARDED = ["--engine.params=sharded", "--engine.grad_sync=per_chunk"]
PAIR = {
    **{
        f"{kind}:{engine}": {
            **REFERENCES[kind],
            "flags": [*REFERENCES[kind].get("flags", []), *HALF, f"--engine.name={engine}"],
        }
        for kind in ("tied", "untied", "lora")
        for engine in ENGINES
    },
    **{
        f"{kind}:{engine}_sharded": {
            **REFERENCES[kind],
            "flags": [
                *REFERENCES[kind].get("flags", []),
                *HALF,
                *SHARDED,
                f"--engine.name={engine}",
                "--student.gradient_checkpointing=true",
            ],
        }
        for kind in ("tied", "lora_untied")
        for engine in ("zero3", "fsdp2")
    },
    # One row a micro-batch: at the end of an epoch a rank has none.
    "tied:accumulated": {
        "flags": ["--batch.per_device_batch_size=1", "--engine.name=zero2"],
    },
    "tied:sharded_teacher": {"flags": [*HALF, "--teacher.placement=sharded"]},
    "unpacked:fsdp2": {"flags": [*UNPACKED, *HALF, "--engine.name=fsdp2"]},
    "concatenated:zero3": {
        "flags": ["--packing.attention=concatenated", *HALF, "--engine.name=zero3"]
    },
    "whole:ddp": {"flags": WHOLE},
    "tied:logits_zero3": {"flags": [*HALF, "--loss.implementation=logits", "--engine.name=zero3"]},
}


def _named(cases: dict[str, dict], folder: Path, start: str) -> dict[str, dict]:
    return {
        name: {**case, "folder": str(folder), "name": f"{start}-{name.replace(':', '-')}"}
        for name, case in cases.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("distill")
    make_material(root)
    return root


@pytest.fixture(scope="module")
def alone(folder: Path) -> Results:
    cases = _named({**REFERENCES, **ALONE}, folder, "alone")
    return run_alone("tests.distributed.distill_trials:run", cases)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Results:
    cases = _named(PAIR, folder, "pair")
    return run_cases(
        "tests.distributed.distill_trials:run",
        cases,
        nproc=2,
        timeout_seconds=280,
        collective_timeout_seconds=60,
    )


def assert_equal(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        # The first step shows the gradient; later ones what AdamW makes of its rounding.
        limits = [2e-6, 2e-4, 1e-3] if len(values) == 3 else [1e-3]
        if name == "eval/agreement":
            limits = [0.02 / max(values[0], 0.02)]
        for value, wanted, limit in zip(got[name], values, limits, strict=True):
            assert abs(value - wanted) <= limit * abs(wanted), (name, got[name], values)


@pytest.mark.parametrize("name", ALONE)
def test_one_process(alone: Results, name: str):
    assert_equal(alone[name][0], alone[name.partition(":")[0]][0])


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", PAIR)
def test_two_ranks(alone: Results, pair: Results, name: str):
    expected = alone[name.partition(":")[0]][0]
    for got in pair[name]:
        assert_equal(got, expected)


def test_the_references_differ_from_one_another(alone: Results):
    """Otherwise nothing above would mean anything."""
    losses = [alone[name][0]["train/loss"][1] for name in REFERENCES]
    assert len({round(loss, 4) for loss in losses}) == len(losses)
