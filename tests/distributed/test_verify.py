"""The gradient matrix of `pixelrag verify`: a third of it at two ranks, a part at three.

The third is a Latin square: of chunk size, hard negatives and modality every pair of values meets,
on every engine, in full and LoRA training, with dropout and without. The whole matrix, which the
command runs, takes three times as long and was last run by hand.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator

import pytest

from pixelrag.errors import ConfigError
from pixelrag.verify.cases import (
    ENGINES,
    FLOAT64_ENGINES,
    MODALITIES,
    WHOLE,
    Case,
    build_matrix,
)
from pixelrag.verify.command import main
from tests.train import nursery

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    with nursery.warm_workers():
        yield


def run(*options: str) -> tuple[int, list[dict]]:
    """Run the command in this process (its ranks are processes of their own)."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = main([*options, "--json"])
    return code, [json.loads(line) for line in text.getvalue().splitlines()]


def a_third(engines: list[str], *, quick: bool = False) -> list[Case]:
    """Cases whose levels add up to the engine's number, modulo three; all of those in float64."""
    levels = ((1, 2, WHOLE), ("0", "2", "ragged"), MODALITIES)

    def chosen(case: Case) -> bool:
        values = (case.chunk_size, case.negatives, case.modality)
        sums = sum(known.index(value) for known, value in zip(levels, values, strict=True))
        return case.precision == "fp64" or sums % 3 == ENGINES.index(case.engine) % 3

    return [case for case in build_matrix(engines, quick=quick) if chosen(case)]


@pytest.fixture(scope="module")
def matrix() -> tuple[int, list[dict]]:
    """One run over all engines, which compute each float64 reference once between them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pixelrag.verify.command.build_matrix", a_third)
        return run()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_third_of_the_matrix_at_two_ranks(engine: str, matrix) -> None:
    code, outcomes = matrix[0], [o for o in matrix[1] if o["engine"] == engine]
    assert [o for o in outcomes if not o["passed"]] == []
    assert code == 0
    assert len(outcomes) == 41 + (12 if engine in FLOAT64_ENGINES else 0)
    for outcome in outcomes:
        bar = 1e-10 if outcome["precision"] == "fp64" else 1e-5
        assert outcome["relative_error"] <= bar
        assert abs(outcome["norm_ratio"] - 1) <= bar
        assert outcome["temperature_error"] <= bar
        if engine != "fsdp2":  # fsdp2 reduces once for each of its units
            assert outcome["num_reductions"] == 1
    by_chunks: dict[tuple, set[int]] = {}
    for outcome in outcomes:
        key = tuple(outcome[k] for k in ("precision", "training", "dropout", "modality"))
        by_chunks.setdefault(key, set()).add(outcome["num_reductions"])
    assert all(len(counts) == 1 for counts in by_chunks.values()), "reductions grow with chunks"


@pytest.mark.parametrize("sharding", ["resident", "sharded"])
def test_a_part_at_three_ranks(sharding: str) -> None:
    engines = ("zero2",) if sharding == "resident" else ("fsdp2",)
    code, outcomes = run("--nproc", "3", "--quick", "--params", sharding, "--engine", *engines)
    assert [o for o in outcomes if not o["passed"]] == []
    assert code == 0
    assert len(outcomes) == 27 * len(engines)


def test_a_wrong_gradient_is_a_miss_and_exit_code_1(capsys, monkeypatch) -> None:
    # Each rank's share of the batch is weighed as if it were alone: DDP's usual factor of W.
    patch = "tests.distributed.broken_verify"
    monkeypatch.setattr("pixelrag.verify.command.WORKER", f"{patch}:run_cases")
    code = main(["--engine", "ddp", "--quick"])
    text = capsys.readouterr().out
    assert code == 1
    assert "MISS" in text
    assert "27 cases miss the full-batch gradient, on ddp" in text
    assert "norm ratio off by" in text


def test_under_a_launcher_it_uses_the_ranks_that_are_there() -> None:
    ended = nursery.run(["verify", "--engine", "ddp", "zero3", "--quick"], nproc=2).check()
    assert ended.text.count("ok   ") == 54
    assert ended.text.count("Every case gives the full-batch gradient") == 1


def test_the_matrix_is_the_whole_product() -> None:
    cases = build_matrix()
    assert len(cases) == len(set(cases)) == 123 * len(ENGINES) + 12 * len(FLOAT64_ENGINES)
    assert {c.chunk_size for c in cases} == {1, 2, WHOLE}
    assert {c.negatives for c in cases} == {"0", "2", "ragged"}
    assert {c.modality for c in cases} == {"text", "images", "images on one rank"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "zero4"], "--engine: got 'zero4', expected one of ddp"),
        (["--nproc", "0"], "expected at least 1"),
        (["--engine", "ddp", "--params", "sharded"], "ddp replicates parameters"),
    ],
)
def test_wrong_options_end_with_code_2(options, message) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        main(options)
