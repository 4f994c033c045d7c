"""What the planner predicts of a step: against the same step taken for real, and as recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import counts
from pixelrag.distributed.collectives import agree_max
from pixelrag.engine.ddp import DDPEngine
from pixelrag.plan.prediction import Prediction
from tests.distributed.harness import Results, run_cases

RECORDED = [f"{job} {engine}" for job in counts.JOBS for engine in counts.ENGINES]
ON_TWO = [*RECORDED, "contrastive zero0", "contrastive zero1"]
# Bucketed, sharded, and with gathers of unequal parts.
ON_FOUR = ["contrastive zero3", "distill zero2", "rag fsdp2"]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, counts.Case]:
    folder: Path = tmp_path_factory.mktemp("plan")
    return {name: counts.case_of(folder, *name.split()) for name in ON_TWO}


@pytest.fixture(scope="module")
def predicted(cases: dict[str, counts.Case]) -> dict[str, Prediction]:
    return {}


def _real(cases: dict[str, counts.Case], names: list[str], nproc: int) -> Results:
    chosen = {name: cases[name]._asdict() for name in names}
    return run_cases("tests.distributed.plan_cases:measure", chosen, nproc=nproc)


@pytest.fixture(scope="module")
def on_two(cases: dict[str, counts.Case]) -> Results:
    return _real(cases, ON_TWO, 2)


@pytest.fixture(scope="module")
def on_four(cases: dict[str, counts.Case]) -> Results:
    return _real(cases, ON_FOUR, 4)


@pytest.mark.parametrize("name", ON_TWO)
def test_a_step_of_two_ranks_costs_what_was_predicted(
    name: str,
    cases: dict[str, counts.Case],
    on_two: Results,
    predicted: dict[str, Prediction],
) -> None:
    real = on_two[name][0]
    peak = min(rank["peak"] for rank in on_two[name])
    found = predicted[name] = cases[name].predicted()
    off = found.peak / peak - 1
    print(f"| {name} | {found.peak:,} | {peak:,} | {off:+.1%} |")  # for docs/plan.md
    assert abs(off) < 0.05
    assert found.calls == real["calls"]
    assert found.bytes == real["bytes"]


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_send_what_was_predicted(
    name: str, cases: dict[str, counts.Case], on_four: Results
) -> None:
    real, found = on_four[name][0], cases[name].predicted(4)
    assert found.calls == real["calls"]
    assert found.bytes == real["bytes"]


@pytest.mark.parametrize("name", RECORDED)
def test_a_step_costs_what_is_recorded(
    name: str, cases: dict[str, counts.Case], predicted: dict[str, Prediction]
) -> None:
    """The gate: see `benchmarks/counts.py`."""
    found = predicted.get(name) or cases[name].predicted()
    assert not counts.check(name, found)


def test_one_collective_more_is_found_out(
    cases: dict[str, counts.Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = DDPEngine._step

    def chatty(self, max_norm: float | None) -> float:
        agree_max([1])
        return step(self, max_norm)

    monkeypatch.setattr(DDPEngine, "_step", chatty)
    found = cases["distill ddp"].predicted()
    wrong, calls = "\n".join(counts.check("distill ddp", found)), found.calls["all_reduce"]
    assert f"distill ddp: all_reduce calls: was {calls - 1}, is {calls}" in wrong
    assert "all_reduce bytes: was" in wrong
    assert "python -m benchmarks.counts --write" in wrong
