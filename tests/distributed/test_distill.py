"""Distillation on every engine, full and with adapters: the figures of one plain process."""

from pathlib import Path

import pytest

from tests.distributed.distill_trials import make_material
from tests.distributed.harness import Results, run_alone, run_cases

pytestmark = pytest.mark.distributed

ENGINES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")
SHARDING = ("zero2", "zero3", "fsdp2")
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
    "bf16": {"flags": ["--engine.precision=bf16"]},
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
    "tied:resumed": {"stop_at": 1},
    "lora:resumed": {"stop_at": 2, "flags": LORA},
    "tied:workers": {"flags": ["--data.num_workers=2"]},
    "tied:adamw": {"flags": ["--optim.fused=false"]},
    # The teacher elsewhere; all 600 tokens in a top-k cache are the whole vocabulary.
    "tied:states": {"cache": {"kind": "hidden_states", "codec": "exact"}},
    "unpacked:states": {
        "cache": {"kind": "hidden_states", "codec": "exact"},
        "flags": UNPACKED,
    },
    "near:top_k": {"cache": {"kind": "top_k", "k": 600}},
    "tied:remote": {"serve": "exact"},
    "concatenated:remote": {
        "serve": "exact",
        "flags": ["--packing.attention=concatenated"],
    },
    "rough:int8_states": {"cache": {"kind": "hidden_states", "codec": "int8"}},
    "rough:int8_remote": {"serve": "int8"},
    "rough:bf16_teacher": {"flags": ["--teacher.precision=bf16"]},
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
        for kind, engines in (("tied", ENGINES), ("untied", SHARDING), ("lora", SHARDING))
        for engine in engines
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
}
MORE = {
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
    "tied:states": {"cache": {"kind": "hidden_states", "codec": "exact"}, "flags": HALF},
    "tied:remote": {"serve": "exact", "flags": [*HALF, "--engine.name=fsdp2"]},
    "tied:resumed": {"stop_at": 2, "flags": [*HALF, "--engine.name=zero2"]},
    **{
        f"bf16:{engine}": {"flags": [*HALF, "--engine.precision=bf16", f"--engine.name={engine}"]}
        for engine in ("zero2", "zero3", "fsdp2")
    },
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


def _on_two_ranks(cases: dict[str, dict]) -> Results:
    return run_cases(
        "tests.distributed.distill_trials:run",
        cases,
        nproc=2,
        timeout_seconds=450,
        collective_timeout_seconds=90,
    )


@pytest.fixture(scope="module")
def pair(folder: Path) -> Results:
    return _on_two_ranks(_named(PAIR, folder, "pair"))


@pytest.fixture(scope="module")
def more(folder: Path) -> Results:
    return _on_two_ranks(_named(MORE, folder, "more"))


def assert_equal(name: str, got: dict, results: Results) -> None:
    """Compare with the reference that the name starts with; `near` and `rough` mean `tied`."""
    kind = name.partition(":")[0]
    expected = results["tied" if kind in ("near", "rough") else kind][0]
    rounding = {"near": 20, "rough": 1000, "bf16": 3000}.get(kind, 1)
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        # The first step shows the gradient; later ones what AdamW makes of its rounding.
        limits = [2e-6, 2e-4, 1e-3] if len(values) == 3 else [1e-3]
        limits = [min(limit * rounding, 0.03) for limit in limits]
        if name == "eval/agreement":
            limits = [0.02 / max(values[0], 0.02)]
        for value, wanted, limit in zip(got[name], values, limits, strict=True):
            assert abs(value - wanted) <= limit * abs(wanted), (name, got[name], values)


@pytest.mark.parametrize("name", ALONE)
def test_one_process(alone: Results, name: str):
    assert_equal(name, alone[name][0], alone)


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", PAIR)
def test_every_engine_on_two_ranks(alone: Results, pair: Results, name: str):
    for got in pair[name]:
        assert_equal(name, got, alone)


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", MORE)
def test_two_ranks(alone: Results, more: Results, name: str):
    for got in more[name]:
        assert_equal(name, got, alone)


def test_the_references_differ_from_one_another(alone: Results):
    """Otherwise nothing above would mean anything."""
    losses = [alone[name][0]["train/loss"][1] for name in REFERENCES]
    assert len({round(loss, 4) for loss in losses}) == len(losses)
