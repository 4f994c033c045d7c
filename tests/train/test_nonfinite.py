"""A loss or gradient that is no number stops all ranks at that step, and nothing of it is kept."""

import re
from pathlib import Path

import pytest

from pixelrag.data.sampler import GlobalBatchSampler
from pixelrag.train.checkpoint import verify_dir
from tests.train import nursery
from tests.train.material import ENGINES, command, lines_of, merged

pytestmark = pytest.mark.distributed

STEP = 3


@pytest.fixture
def faulty(tmp_path, base):
    """Runs two ranks with a fault put in, a checkpoint at each step; returns folder and end."""
    config = merged(
        base,
        {"batch": {"per_device_batch_size": 4}, "checkpoint": {"every_steps": 1}},
        {"output_dir": str(tmp_path / "run")},
    )

    def _run(fault: str | None, payload: dict, *overrides: dict) -> tuple[Path, nursery.Ended]:
        setup = f"tests.train.faults:{fault}" if fault else None
        arguments = command(tmp_path, merged(config, *overrides))
        return tmp_path / "run", nursery.run(arguments, nproc=2, setup=setup, payload=payload)

    return _run


def _row_of_the_step() -> str:
    """Sample id of a row of the step; which rank has it depends on what the rows cost."""
    rows = GlobalBatchSampler(26, 8).global_batch(STEP - 1)
    return f"train.jsonl:{rows[-1] + 1}"


def _assert_stopped(folder: Path, ended: nursery.Ended) -> str:
    assert ended.codes == [7, 7], ended.text
    message = ended.outputs[0][ended.outputs[0].index("pixelrag: [rank 0] error:") :]
    assert message.startswith(f"pixelrag: [rank 0] error: step {STEP}: the ")
    assert f"checkpoint-{STEP - 1} is the last" in message
    assert ended.outputs[0].count("error:") == 1
    assert ended.outputs[1] == ""
    assert "Traceback" not in ended.text
    assert [record["step"] for record in lines_of(folder)] == list(range(1, STEP))
    kept = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name != "logs")
    assert kept == [f"checkpoint-{step}" for step in range(1, STEP)]
    verify_dir(folder / f"checkpoint-{STEP - 1}")
    return message


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_whose_embedding_is_nan(faulty, engine):
    row = _row_of_the_step()
    payload = {"sample_id": row, "value": float("nan")}
    folder, ended = faulty("poisoned_row", payload, {"engine": {"name": engine}})
    message = _assert_stopped(folder, ended)
    assert "loss is nan" in message
    assert re.search(rf"Rows that it comes from: rank [01]: {re.escape(row)}\.", message)
    rows = GlobalBatchSampler(26, 8).global_batch(STEP - 1)
    for index in rows:
        assert f"train.jsonl:{index + 1}" in message


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gradient_that_is_nan(faulty, engine):
    settings = {"engine": {"name": engine}}
    folder, ended = faulty("nan_gradient", {"rank": 1, "batch": STEP}, settings)
    message = _assert_stopped(folder, ended)
    assert "gradient norm is nan (the loss is finite)" in message
    for index in GlobalBatchSampler(26, 8).global_batch(STEP - 1):
        assert f"train.jsonl:{index + 1}" in message


@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_a_gradient_that_is_nan_in_bf16(faulty, engine):
    settings = {"engine": {"name": engine, "precision": "bf16"}}
    folder, ended = faulty("nan_gradient", {"rank": 1, "batch": STEP}, settings)
    assert "gradient norm is nan" in _assert_stopped(folder, ended)


def test_an_infinite_embedding(faulty):
    payload = {"sample_id": _row_of_the_step(), "value": float("inf")}
    folder, ended = faulty("poisoned_row", payload)
    row = re.escape(_row_of_the_step())
    assert re.search(rf"it comes from: rank [01]: {row}\.", _assert_stopped(folder, ended))


def test_an_infinite_weight_on_one_rank(faulty):
    folder, ended = faulty("infinite_weight", {"rank": 1, "batch": STEP})
    message = _assert_stopped(folder, ended)
    assert "rank 1: train.jsonl:" in message.split("Rows of the step")[0]
    assert "rank 0: train.jsonl:" not in message.split("Rows of the step")[0]


def test_in_the_second_batch_of_a_step(faulty):
    """The rows of both batches are named, and the step that stops is the optimizer's."""
    settings = {"batch": {"gradient_accumulation_steps": 2}}
    folder, ended = faulty("infinite_weight", {"rank": 0, "batch": 2 * STEP}, settings)
    message = _assert_stopped(folder, ended)
    sampler = GlobalBatchSampler(26, 8)
    for position in (2 * STEP - 2, 2 * STEP - 1):
        for index in sampler.global_batch(position):
            assert f"train.jsonl:{index + 1}" in message


def test_the_run_goes_on_once_the_cause_is_gone(faulty):
    folder, ended = faulty("infinite_weight", {"rank": 1, "batch": STEP})
    _assert_stopped(folder, ended)
    faulty(None, {})[1].check()
    assert [record["step"] for record in lines_of(folder)] == [1, 2, 3, 4]


def test_figures_of_broken_weights_are_refused(faulty, shelf):
    """Weights that overflow in the last step are noticed by the evaluation behind it."""
    settings = {
        "optim": {"learning_rate": 1e30, "max_steps": 1, "warmup_steps": 0, "weight_decay": 0},
        "data": {"eval": str(shelf / "eval.jsonl")},
    }
    folder, ended = faulty(None, {}, settings)
    assert ended.codes == [7, 7], ended.text
    assert ended.outputs[0].count("error:") == 1
    assert ended.outputs[1] == ""
    assert not (folder / "checkpoint-1").exists()
    assert not (folder / "best").exists()
