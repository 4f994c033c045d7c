"""Every engine trains the same run: one process or two, fp32 or bf16, whole or by adapters."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.train import nursery
from tests.train.material import ENGINES, command, lines_of, merged, series

pytestmark = pytest.mark.distributed

# Measured over all cases below: losses differ by at most 2.5e-6, weights by 2.8e-5. AdamW divides
# by the gradient's own size, so that rounding of small gradients shows in the weights.
LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-4
# Measured: 5.1e-3 and 5.2e-4. bf16 has 8 bits; FSDP2 rounds weights where autocast rounds factors.
BF16_LOSS_TOLERANCE = 2e-2
BF16_WEIGHT_TOLERANCE = 2e-3

LORA = {"lora": {"enabled": True, "r": 4, "alpha": 8, "dropout": 0.0}}
BF16 = {"engine": {"precision": "bf16"}}


@pytest.fixture(scope="session")
def vision(shelf: Path) -> dict[str, Any]:
    """Rows with texts and pictures; a rank often has none, or no row at all in the last batch."""
    return {
        "model": {"name_or_path": str(shelf / "qwen3_vl"), "document_instruction": "Describe."},
        "data": {"train": str(shelf / "mixed.jsonl")},
        "batch": {"per_device_batch_size": 6, "chunk_size": 2},
        "optim": {
            **{"max_steps": 2, "learning_rate": 3e-4, "vision_learning_rate": 1e-3},
            **{"merger_learning_rate": 1e-4, "temperature_learning_rate": 3e-3},
        },
    }


@pytest.fixture(scope="session")
def trained(tmp_path_factory, base):
    """Runs a configuration once a session; returns its folder."""
    folder = tmp_path_factory.mktemp("engines")
    known: dict[str, Path] = {}

    def train(name: str, nproc: int, *overrides: dict[str, Any]) -> Path:
        key = f"{name}-{nproc}"
        if key not in known:
            config = merged(base, *overrides, {"output_dir": str(folder / key)})
            # The same global batches whatever the number of processes.
            config["batch"]["per_device_batch_size"] //= nproc
            nursery.run(command(folder, config), nproc=nproc).check()
            known[key] = folder / key
        return known[key]

    return train


def _compare(run: Path, reference: Path, *, loss: float, weights: float) -> None:
    got, expected = series(run, "train/loss"), series(reference, "train/loss")
    assert len(got) == len(expected) >= 2
    assert got == pytest.approx(expected, rel=loss)
    assert series(run, "train/grad_norm") == pytest.approx(
        series(reference, "train/grad_norm"), rel=10 * loss
    )
    file = "adapter_model.safetensors"
    file = file if (reference / "last" / file).exists() else "model.safetensors"
    mine, theirs = load_file(run / "last" / file), load_file(reference / "last" / file)
    assert mine.keys() == theirs.keys()
    difference = sum(float((mine[n].double() - theirs[n].double()).square().sum()) for n in mine)
    total = sum(float(theirs[n].double().square().sum()) for n in mine)
    assert (difference / total) ** 0.5 <= weights
    norm = sum(float(mine[n].double().square().sum()) for n in mine)
    assert (norm / total) ** 0.5 == pytest.approx(1.0, abs=weights)


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_trains_the_same_run(trained, engine, nproc):
    run = trained(f"text-{engine}", nproc, {"engine": {"name": engine}})
    _compare(run, trained("text-ddp", 1), loss=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE)


def test_adapters_on_text(trained):
    run = trained("lora-zero2", 2, LORA, {"engine": {"name": "zero2"}})
    _compare(run, trained("lora-ddp", 1, LORA), loss=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE)


@pytest.mark.parametrize("engine", ENGINES)
def test_bf16_with_fp32_masters(trained, engine):
    run = trained(f"bf16-{engine}", 2, BF16, {"engine": {"name": engine}})
    _compare(run, trained("text-ddp", 1), loss=BF16_LOSS_TOLERANCE, weights=BF16_WEIGHT_TOLERANCE)
    # It did compute in bf16: rounding shows.
    assert series(run, "train/loss") != pytest.approx(
        series(trained("text-ddp", 1), "train/loss"), rel=1e-5
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_adapters_on_pictures(trained, vision, engine):
    """DoRA in the language model, the vision tower's attention and the mergers, unlike ranks."""
    options = {"dora": True, "rslora": True, "vision": "attention", "vision_r": 3, "merger": True}
    lora = merged(LORA, {"lora": options})
    run = trained(f"vision-lora-{engine}", 2, vision, lora, {"engine": {"name": engine}})
    reference = trained("vision-lora-ddp", 1, vision, lora)
    _compare(run, reference, loss=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE)
    adapters = load_file(run / "last" / "adapter_model.safetensors")
    assert any("visual.blocks" in name for name in adapters)
    assert any("language_model" in name for name in adapters)
    assert any("merger" in name and name.endswith("lora_magnitude_vector") for name in adapters)


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_whole_model_on_pictures(trained, vision, engine):
    run = trained(f"vision-{engine}", 2, vision, {"engine": {"name": engine}})
    reference = trained("vision-ddp", 1, vision)
    _compare(run, reference, loss=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE)


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_bf16_adapters_on_pictures(trained, vision, engine):
    """The frozen base lies in bf16; adapters, vision tower and temperature in fp32."""
    unfrozen = merged(vision, LORA, {"model": {"unfrozen": ["vision", "merger"]}})
    run = trained(
        f"unfrozen-bf16-{engine}", 2, unfrozen, merged(BF16, {"engine": {"name": engine}})
    )
    reference = trained("unfrozen-ddp", 1, unfrozen)
    losses = series(run, "train/loss")
    assert losses == pytest.approx(series(reference, "train/loss"), rel=0.1)
    assert losses != pytest.approx(series(reference, "train/loss"), rel=1e-5)


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_modes_of_sharded_engines(trained, engine):
    modes = {"engine": {"name": engine, "grad_sync": "per_chunk", "params": "sharded"}}
    run = trained(f"modes-{engine}", 2, modes)
    _compare(run, trained("text-ddp", 1), loss=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE)


def test_the_loss_falls(trained):
    losses = series(trained("text-ddp", 1), "train/loss")
    assert losses[-1] < 0.7 * losses[0]
    assert all(record["train/grad_norm"] > 0 for record in lines_of(trained("text-ddp", 1)))
