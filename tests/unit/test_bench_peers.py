"""Peers do the same work, and what is not installed is skipped."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from pixelrag.bench import peers, peers_gradcache, peers_kd, texts
from pixelrag.bench.suite import load_plan
from pixelrag.distributed.env import process_group
from pixelrag.errors import EngineError

CPU = torch.device("cpu")
FLAGS = [
    "--run.rounds=1", "--run.memory=false", "--gradcache.batch=6", "--gradcache.chunk=4",
    "--gradcache.max_length=16", "--kd.tokens=24", "--kd.student_width=8", "--kd.teacher_width=16",
    "--kd.vocab=40", "--kd.chunk=8", "--kd.supervised=0.5", "--kd.error_tokens=16",
    "--packing.samples=30", "--packing.row_length=64",
]  # fmt: skip
# Compiling takes longer than all the rest.
NOT_COMPILED = {"liger-compiled"}


def _pairs(n: int) -> texts.Texts:
    """Texts without reading the standard library, of unlike lengths."""
    return (
        [f"what is {i}" + " and so on" * (i % 3) for i in range(n)],
        [f"it is {i}" + ", or so" * (5 * i % 7) for i in range(n)],
    )


def test_every_task_measures_ours_and_those_that_are_here(tiny_models, monkeypatch):
    monkeypatch.setitem(texts.PAIRS, "code-search", _pairs)
    flags = [*FLAGS, f"--gradcache.model={tiny_models['bert']}"]
    plan = load_plan("peers", "cpu-smoke", flags)
    for group in plan.groups():
        group = [case for case in group if case["candidate"] not in NOT_COMPILED]
        rows = list(peers.measure(plan.config, group))
        assert [row.case for row in rows] == group
        assert rows[0].case["candidate"] == "pixelrag"
        assert rows[0].figures["ours_over_this"] == 1
        needs = peers.TASKS[rows[0].case["task"]].NEEDS
        for row in rows:
            package = needs.get(row.case["candidate"])
            absent = package is not None and importlib.util.find_spec(package) is None
            assert row.skipped == (f"{package} is not installed" if absent else "")
            if not absent:
                assert row.figures["ours_over_this"] > 0
                assert row.figures.get("gradient_error", 0) < peers_gradcache.SAME_WORK
        if rows[0].case["task"] == "packing":
            assert len({row.figures["rows"] for row in rows if not row.skipped}) <= 2


def test_a_package_that_is_missing_is_skipped_by_name(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    plan = load_plan("peers", "cpu-smoke", [*FLAGS, "--work.tasks=kd-loss"])
    group = [case for case in plan.groups()[0] if case["candidate"] in ("naive", "liger")]
    naive, liger = peers.prepare(plan.config, group, CPU)
    assert str(liger) == "liger_kernel is not installed"
    naive.step()


def test_other_work_is_noticed(tiny_models):
    queries, documents = _pairs(6)
    sizes = 4, 16, str(tiny_models["bert"]), CPU
    with process_group("cpu"):
        candidates = {
            "a": peers_gradcache.pixelrag(peers_gradcache.Workload(queries, documents, *sizes)),
            "b": peers_gradcache.pixelrag(
                peers_gradcache.Workload(queries, documents[::-1], *sizes)
            ),
        }
        with pytest.raises(EngineError, match="not the same work"):
            peers_gradcache.compare_gradients(candidates)


def test_errors_of_gradients_are_measured_against_float64():
    config = load_plan("peers", "cpu-smoke", FLAGS).config
    assert config.kd.vocab == 40
    work = peers_kd.KDChunkWork(tokens=24, student_width=8, teacher_width=16)
    x = peers_kd.make_inputs(work, 40, torch.float32, CPU)

    def off(x: dict, weight: float, chunk: int) -> torch.Tensor:
        return 1.5 * peers_kd.ours(x, weight, chunk)

    assert peers_kd.gradient_error(off, x, 0.3, 8) == pytest.approx(0.5, rel=1e-3)
    assert peers_kd.gradient_error(peers_kd.ours, x, 0.3, 8) < 1e-5


def test_long_tailed_texts_are_the_same_each_time_and_mostly_short(monkeypatch):
    functions = [
        SimpleNamespace(file="a.py", name=str(i), source=f"{i:04d}" + "x" * i, docstring=f"{i}")
        for i in range(3000)
    ]
    monkeypatch.setattr(texts, "read_library", lambda: SimpleNamespace(functions=functions))
    queries, documents = texts.long_tail_pairs(300)
    assert (queries, documents) == texts.long_tail_pairs(300)
    assert [int(query) for query in queries] == [int(text[:4]) for text in documents]
    assert len(set(documents)) == 300
    lengths = sorted(map(len, documents))
    assert 180 < lengths[150] < 270
    assert lengths[270] > 3 * lengths[150]
