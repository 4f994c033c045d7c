"""The targets on their seeds, on what was found once, and on mutations, the same every time."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, clean_up, regressions

QUICK = settings(
    max_examples=80,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    clean_up()


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_what_was_found_once(name):
    for content in [*TARGETS[name].seeds(), *regressions(name), b"", b"\n", b"\0" * 600]:
        TARGETS[name].run(content)


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_of_the_seeds(name):
    target, seeds = TARGETS[name], TARGETS[name].seeds()
    pieces = [word.encode("latin-1") for word in target.words] + seeds

    @QUICK
    @given(st.integers(0, 2**32 - 1))
    def mutated(seed: int) -> None:
        draw = random.Random(seed)
        content = bytearray(draw.choice(seeds))
        for _ in range(draw.randint(1, 6)):
            at, stop = sorted(draw.randint(0, len(content)) for _ in range(2))
            stop = min(stop, at + draw.choice((0, 1, 4, 64)))
            piece = draw.choice(pieces)
            begin = draw.randint(0, len(piece))
            new = (
                piece[begin : begin + 32],
                draw.randbytes(draw.randint(0, 4)),
                b"",
                content[at:] * 2,
            )
            content[at:stop] = draw.choice(new)
        target.run(bytes(content[:20_000]))

    mutated()
