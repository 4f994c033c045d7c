"""Means, rates and peaks against values worked out by hand."""

import math
import subprocess
import sys

import pytest
import torch

from pixelrag.train import metrics
from pixelrag.train.metrics import RunningMeans, Throughput, peak_memory


def test_means_are_weighted_and_pop_starts_afresh():
    means = RunningMeans()
    means.add({"train/loss": 2.0, "train/lr": 1e-5}, weight=30)
    means.add({"train/loss": torch.tensor(5.0)}, weight=10)
    assert means.pop() == {"train/loss": 2.75, "train/lr": pytest.approx(1e-5)}
    assert means.pop() == {}


def test_means_do_not_lose_small_terms_and_keep_nan():
    means = RunningMeans()
    for value in (1e16, 1.0, -1e16):
        means.add({"a": value})
    means.add({"b": math.nan, "c": math.inf})
    means.add({"b": 1.0, "c": -math.inf})
    got = means.pop()
    assert got["a"] == pytest.approx(1 / 3)
    assert math.isnan(got["b"])
    assert math.isnan(got["c"])


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_rates_leave_out_warmup_and_excluded_time():
    clock = Clock()
    meter = Throughput(skip=1, window=2, clock=clock)
    clock.now += 50  # compilation
    meter.step(8, 100)
    assert meter.rates() == {}
    clock.now += 100  # falls out of the window below
    meter.step(8, 100)
    clock.now += 2
    meter.step(8, 100)
    with meter.excluded():
        clock.now += 1000
    clock.now += 3
    meter.step(12, 300)
    assert meter.rates() == {
        "perf/rows_per_second": 20 / 5,
        "perf/tokens_per_second": 400 / 5,
        "perf/step_seconds": 2.5,
    }


def test_excluded_time_counts_for_nothing_even_when_the_body_fails():
    clock = Clock()
    meter = Throughput(skip=0, clock=clock)

    def fail():
        with meter.excluded():
            clock.now += 10
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    clock.now += 1
    meter.step(4, 4)
    assert meter.rates()["perf/rows_per_second"] == 4.0


def test_peak_memory_sees_an_allocation():
    code = """
import sys, numpy as np
from pixelrag.train.metrics import peak_memory
start = peak_memory()["mem/peak_gib"]
block = np.ones(2**25)  # 0.25 GiB, touched
after = peak_memory()["mem/peak_gib"]
del block
kept = peak_memory()["mem/peak_gib"]
print(start, after, kept)
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    start, after, kept = (float(word) for word in out.split())
    assert 0.2 < after - start < 0.3
    assert kept == pytest.approx(after, abs=0.01)


def test_peak_memory_without_proc(monkeypatch, tmp_path):
    shown = peak_memory()["mem/peak_gib"]
    monkeypatch.setattr(metrics, "_STATUS", tmp_path / "none")
    assert peak_memory()["mem/peak_gib"] >= 0.5 * shown


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_peak_memory_on_cuda():
    device = torch.device("cuda", 0)
    torch.cuda.reset_peak_memory_stats(device)
    before = peak_memory(device)["mem/peak_gib"]
    block = torch.ones(2**26, device=device)
    del block
    got = peak_memory(device)
    assert got["mem/peak_gib"] - before == pytest.approx(0.25, abs=0.05)
    assert got["mem/host_peak_gib"] > 0
