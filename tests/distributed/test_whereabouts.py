"""A lost, late or frozen rank is named, with the step and phase in which each rank stands."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from pixelrag.distributed.spawn import run_workers
from pixelrag.distributed.whereabouts import is_communication_error
from pixelrag.errors import EngineError
from tests.train import nursery

pytestmark = pytest.mark.distributed

HERE = "tests.distributed.where_cases:misbehave"
WAYS = ("well", "raise", "die", "linger", "freeze")


def _run(how: str) -> str:
    """What rank 0 says, or the results where all goes well."""
    try:
        options = {"timeout_seconds": 90, "collective_timeout_seconds": 5.0}
        return str(run_workers(HERE, how, nproc=2, **options))
    except EngineError as error:
        return str(error).split("--- rank 1 ---")[0]


@pytest.fixture(scope="module")
def told():
    """All ways at once: they wait for timeouts most of their time."""
    with nursery.warm_workers(), ThreadPoolExecutor(len(WAYS)) as pool:
        return dict(zip(WAYS, pool.map(_run, WAYS), strict=True))


def test_all_is_well(told):
    assert told["well"] == "['well', 'well']"


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise", r"rank 0 \(step 3, update\) stops because rank 1 failed: ValueError: tile 17 is"),
        ("die", r"No sign of life from rank 1 on \S+ \(step 3, forward and backward\)"),
        ("linger", r"Elsewhere: rank 1 in step 3, evaluation on \S+ Waiting: rank 0 in step 3, up"),
        ("freeze", r"No sign of life from rank 1 on \S+ \(step 3, forward and backward\)"),
    ],
)
def test_what_went_wrong_is_named(told, how, expected):
    error = told[how][told[how].index("pixelrag.errors.EngineError") :]
    assert re.search(expected, error), told[how]
    assert "resumes from its last checkpoint" in error


def test_a_hang_is_told_before_the_timeout(told):
    assert "pixelrag: error: nothing has moved for" in told["linger"]


def test_only_lost_peers_are_explained():
    assert is_communication_error(RuntimeError("[gloo/pair.cc:1] Connection closed by peer"))
    assert not is_communication_error(RuntimeError("shape mismatch"))
    assert not is_communication_error(ValueError("connection closed"))
