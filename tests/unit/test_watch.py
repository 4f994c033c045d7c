"""Warnings about a run: each comes when it should, once, and not a step before."""

import logging

import pytest
import torch

from pixelrag.config.distill_parts import WatchConfig
from pixelrag.train import watch
from pixelrag.train.watch import WINDOW, Watch, used_memory

CPU = torch.device("cpu")


@pytest.fixture
def told(monkeypatch, caplog):
    """Takes steps and returns the numbers of those that warned, and the warnings."""
    monkeypatch.setattr(watch, "used_memory", lambda device: None)
    pixelrag = logging.getLogger("pixelrag")
    monkeypatch.setattr(pixelrag, "propagate", True)
    caplog.set_level(logging.WARNING, "pixelrag")

    def _told(watched: Watch, steps: list[dict]) -> tuple[list[int], list[str]]:
        numbers, texts = [], []
        for number, step in enumerate(steps, 1):
            caplog.clear()
            watched.step(number, **{"kd": 1.0, "tokens": 100, "seconds": 1.0} | step)
            texts += [record.getMessage() for record in caplog.records]
            numbers += [number] * len(caplog.records)
        return numbers, texts

    return _told


def steps(name: str, *runs: tuple[float, int]) -> list[dict]:
    return [{name: value} for value, count in runs for _ in range(count)]


def test_a_steady_run_is_left_alone(told):
    assert told(Watch(WatchConfig(), CPU), steps("kd", (1.0, 50))) == ([], [])


def test_throughput_that_falls_below_its_share_of_the_best(told):
    # 60 of 100 tokens a second: the mean of ten is below 70 from the eighth slow step on.
    slow = steps("tokens", (100, 20), (60, 30))
    numbers, texts = told(Watch(WatchConfig(), CPU), slow)
    assert numbers == [28]
    assert "step 28: throughput has fallen to 68 tokens/s from 100" in texts[0]
    assert told(Watch(WatchConfig(), CPU), steps("tokens", (100, 20), (71, 50)))[0] == []
    assert told(Watch(WatchConfig(throughput_drop=0.5), CPU), slow)[0] == []
    # Seconds count as tokens do.
    assert told(Watch(WatchConfig(), CPU), steps("seconds", (1.0, 20), (2.0, 20)))[0] == [27]


def test_it_is_said_again_only_after_it_has_ended(told):
    runs = steps("tokens", (100, 20), (60, 20), (100, 20), (60, 20))
    assert told(Watch(WatchConfig(), CPU), runs)[0] == [28, 68]


def test_slow_first_steps_are_no_fall(told):
    assert told(Watch(WatchConfig(), CPU), steps("tokens", (1, 8), (100, 30)))[0] == []


def test_a_divergence_that_rises_above_its_lowest_mean(told):
    # The mean of ten passes 3 with the sixth step at 5: (4 * 1 + 6 * 5) / 10.
    numbers, texts = told(Watch(WatchConfig(), CPU), steps("kd", (1.0, 20), (5.0, 20)))
    assert numbers == [26]
    assert "step 26: the divergence from the teacher has risen to 3.4" in texts[0]
    assert "its lowest mean was 1;" in texts[0]
    assert told(Watch(WatchConfig(), CPU), steps("kd", (1.0, 20), (2.9, 30)))[0] == []
    assert told(Watch(WatchConfig(kd_rise=6), CPU), steps("kd", (1.0, 20), (5.0, 30)))[0] == []
    # A start from high is what training is for.
    assert told(Watch(WatchConfig(), CPU), steps("kd", (9.0, 15), (1.0, 30)))[0] == []


def test_nothing_is_compared_before_there_is_a_scale(told):
    rising = [{"kd": 10.0**n, "tokens": 100 / 2**n} for n in range(WINDOW)]
    assert told(Watch(WatchConfig(), CPU), rising)[0] == []


def test_memory_near_its_limit(told, monkeypatch):
    shares = iter([0.5, 0.9499, 0.95, 0.99, 0.5, 0.96])
    monkeypatch.setattr(watch, "used_memory", lambda device: next(shares))
    numbers, texts = told(Watch(WatchConfig(), CPU), [{}] * 6)
    assert numbers == [3, 6]
    assert "step 3: 95 % of the memory of cpu has been in use" in texts[0]
    assert "student.gradient_checkpointing" in texts[0]
    monkeypatch.setattr(watch, "used_memory", lambda device: 0.7)
    assert told(Watch(WatchConfig(memory=0.6), CPU), [{}])[0] == [1]


def test_memory_in_use_is_what_the_system_says(monkeypatch, tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    250 kB\n")
    monkeypatch.setattr(watch, "Path", lambda name: path)
    assert used_memory(CPU) == pytest.approx(0.75)
    path.unlink()
    assert used_memory(CPU) is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 200))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 50)
    assert used_memory(torch.device("cuda", 0)) == 0.25
