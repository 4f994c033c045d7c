"""Graphs that are kept change no bit, and take no more memory than is said."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from pixelrag.distributed.env import World, process_group
from pixelrag.gradcache import gradcache_step, keep, split_batch
from pixelrag.gradcache.chunking import Chunking
from pixelrag.gradcache.keep import Keeper
from pixelrag.gradcache.replay import first_pass
from pixelrag.gradcache.schedule import agree_on_schedule
from tests.distributed.trials import DEFAULTS, build, global_batch, model_for

CASE = DEFAULTS | {"dropout": 0.3, "rows": [9], "images": "some"}


@pytest.fixture(scope="module")
def world():
    with process_group("cpu") as group:
        yield group


@pytest.fixture
def free(monkeypatch):
    """Sets what the machine seems to have free."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")

    def _free(num_bytes: int) -> None:
        monkeypatch.setattr(keep, "free_memory", lambda device: num_bytes)

    return _free


class Run:
    """Steps of one engine; tells each step's gradients and how many graphs it kept."""

    def __init__(self, world: World, keeper: Keeper, **case) -> None:
        self._case = CASE | case
        self.engine = build(self._case, model_for(self._case), world)
        self._keeper = keeper

    def step(self, number: int) -> tuple[int, dict[str, torch.Tensor]]:
        (part,) = global_batch(self._case, number, 1)
        torch.manual_seed(number)
        chunks = [split_batch(side, 2) for side in (part.queries, part.documents)]
        result = gradcache_step(self.engine, *chunks, part.positive_B, keeper=self._keeper)
        gradients = self.engine.gradients()
        self.engine.step(1.0)
        return result.num_kept_chunks, gradients


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_what_is_kept_changes_no_bit(world, free, engine) -> None:
    free(1 << 40)
    runs = {r: Run(world, Keeper(r), engine=engine) for r in ("all", "none", 3, "auto")}
    for number in range(3):
        found = {replay: run.step(number) for replay, run in runs.items()}
        total = found["none"][0]
        kept = {replay: count for replay, (count, _) in found.items()}
        assert kept == {"all": 0, "none": total, 3: 3, "auto": total if number else 0}
        assert total >= 10
        for _, gradients in found.values():
            for name, gradient in found["all"][1].items():
                assert torch.equal(gradients[name], gradient), name


def test_auto_keeps_no_more_than_fits(world, free, monkeypatch) -> None:
    free(1 << 40)
    keeper = Keeper("auto")
    run = Run(world, keeper)
    assert run.step(0)[0] == 0
    (part,) = global_batch(CASE, 1, 1)
    chunks = {
        "query": split_batch(part.queries, 2),
        "document": split_batch(part.documents, 2),
    }
    rows = [len(part.queries["input_ids"]), len(part.documents["input_ids"])]
    sides = agree_on_schedule(chunks, rows, rank=0, touches_every_chunk=False)
    rest = keeper._rest_of_step(run.engine, sides)
    sizes = [keeper.bound(side, chunk) for side in sides for chunk in side.chunks]
    with keep._LiveBytes() as live:
        passes, _ = first_pass(run.engine, sides)
    without = live.total()
    counts = []
    for share in (0.0, 0.2, 0.6, 1.0):
        budget = int(share * sum(sizes)) + 1
        free(rest + 2 * budget)
        count = keeper.num_kept(run.engine, sides)
        with keep._LiveBytes() as live:
            passes, _ = first_pass(run.engine, sides, num_kept=count)
        assert live.total() - without <= sum(sizes[:count]) <= budget
        assert count == len(sizes) or sum(sizes[: count + 1]) > budget
        counts.append(count)
        del passes
    assert 0 == counts[0] < counts[1] < counts[2] < counts[3] == len(sizes)
    # A rank with less memory decides for all.
    monkeypatch.setattr(keep, "agree_max", lambda values: [max(-1, *values)])
    assert keeper.num_kept(run.engine, sides) == 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_graph_is_larger_than_its_bound(world, free, checkpointing) -> None:
    """Bounds come from one step's chunks; a later step's are weighed one by one."""
    free(1 << 40)
    keeper = Keeper("auto")
    run = Run(world, keeper, checkpointing=checkpointing)
    run.step(0)
    for number in (1, 2, 3):
        (part,) = global_batch(CASE, number, 1)
        chunks = {"query": split_batch(part.queries, 3), "document": split_batch(part.documents, 1)}
        for side in agree_on_schedule(chunks, (9, 9), rank=0, touches_every_chunk=False):
            for chunk in side.chunks:
                with keep._LiveBytes() as live:
                    graph = run.engine(side.role, touch_vision=side.must_touch(chunk), **chunk)
                assert 0 < live.total() <= keeper.bound(side, chunk)
                with keep._LiveBytes() as live:
                    del graph
                    graph = run.engine(side.role, touch_vision=side.must_touch(chunk), **chunk)
                    del graph
                assert live.total() == 0


def test_a_checkpoint_is_weighed_with_what_it_keeps() -> None:
    layer = torch.nn.Linear(100, 100)
    x = torch.ones(50, 100, requires_grad=True)

    def made(y: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(
            lambda z: layer(z).tanh().exp(), y * 2, use_reentrant=False
        )

    with keep._LiveBytes() as live:
        output = made(x)
    # The input that the layer runs again from, and the output.
    assert live.total() == pytest.approx(2 * 50 * 100 * 4, abs=200)
    del output


def test_an_engine_that_cannot_runs_every_chunk_twice_and_says_so(world, free, caplog) -> None:
    free(1 << 40)
    run = Run(world, Keeper("none"))
    run.engine.keeps_graphs = False
    run.engine.name = "zero3"
    with caplog.at_level(logging.INFO, "pixelrag"):
        assert [run.step(number)[0] for number in range(2)] == [0, 0]
    assert [r.message for r in caplog.records if "replay" in r.message] == [
        "batch.replay none: zero3 cannot go forward again before a graph has gone backward: every "
        "chunk is run a second time (replay: all)"
    ]


def test_auto_chunks_take_a_quarter_of_what_is_free(world, free, monkeypatch, caplog) -> None:
    free(1 << 40)
    keeper = Keeper(weighs=True)
    run = Run(world, keeper)
    assert [run.step(number)[0] for number in range(2)] == [0, 0]
    rest = keeper._rest_of_step(run.engine, ())
    chunking = Chunking("auto")
    assert not chunking.is_settled
    assert Chunking(4).is_settled
    assert Chunking("auto", 9).is_settled
    for budget in (100_000, 1_000_000):
        free(rest + 4 * budget)
        chunking.settle(run.engine, keeper)
        assert budget / 2 < chunking.tokens * keeper.bytes_per_token() <= budget
        assert chunking.tokens.bit_count() == 1
        (part,) = global_batch(CASE | {"rows": [40]}, 5, 1)
        for chunk in chunking(part.documents):
            with keep._LiveBytes() as live:
                graph = run.engine("document", **chunk)
            assert live.total() <= budget
            del graph
    free(1 << 40)
    chunking.settle(run.engine, keeper)
    assert chunking.tokens == 8192  # more is no faster
    free(0)
    chunking.settle(run.engine, keeper)
    assert chunking.tokens == 64
    free(1 << 40)
    monkeypatch.setattr("pixelrag.gradcache.chunking.agree_max", lambda values: [-128])
    with caplog.at_level(logging.INFO, "pixelrag"):
        chunking.settle(run.engine, keeper)
    assert chunking.tokens == 128  # the rank with the least decides
    assert "chunks of up to 128 tokens and patches" in caplog.text


def test_what_is_to_be_weighed_runs_again_once(world, free) -> None:
    free(1 << 40)
    keeper = Keeper("none", weighs=True)
    run = Run(world, keeper)
    assert run.step(0)[0] == 0 < run.step(1)[0]
    assert keeper.bytes_per_token() > 0


def test_images_that_were_never_weighed_are_not_kept(world, free) -> None:
    free(1 << 40)
    keeper = Keeper("auto")
    run = Run(world, keeper, images="none")
    run.step(0)
    side = SimpleNamespace(role="document", must_touch=lambda chunk: False)
    (part,) = global_batch(CASE, 0, 1)
    with_images = next(c for c in split_batch(part.documents, 2) if "pixel_values" in c)
    assert keeper.bound(side, with_images) == float("inf")
