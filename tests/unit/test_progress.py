"""Lines off a terminal, a bar on one, silence on other ranks."""

import io

import pytest

from pixelrag.train.progress import ProgressView, describe, duration


class Terminal(io.StringIO):
    def isatty(self):
        return True


VALUES = {"train/loss": 1.23456, "train/lr": 2e-5, "train/custom": 7.0, "eval/loss": None}


@pytest.mark.parametrize(("stream", "mode"), [(io.StringIO(), "auto"), (Terminal(), "off")])
def test_plain_lines(stream, mode):
    now = [0.0]
    with ProgressView(40, done_steps=10, mode=mode, stream=stream, clock=lambda: now[0]) as view:
        for step in (11, 12, 20):
            view.step(step)
        now[0] = 100.0
        view.figures(20, VALUES)
        view.message("checkpoint-20 [saved]")
        now[0] = 300.0
        view.figures(40, {"train/loss": 1.0})
    assert stream.getvalue().splitlines() == [
        "step 20/40  loss 1.235  lr 2e-05  3m20s left",  # 100 s for 10 steps, 20 to go
        "checkpoint-20 [saved]",
        "step 40/40  loss 1",
    ]


@pytest.mark.parametrize(("stream", "mode"), [(Terminal(), "auto"), (io.StringIO(), "on")])
def test_a_bar(stream, mode, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    with ProgressView(40, done_steps=10, mode=mode, stream=stream) as view:
        view.figures(20, VALUES)
        view.message("checkpoint-20 [saved]")
    text = stream.getvalue()
    assert "\x1b[" in text
    assert "20/40" in text
    assert "loss 1.235" in text
    assert "checkpoint-20 [saved]" in text


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_other_ranks_are_silent(mode):
    stream = Terminal()
    with ProgressView(40, mode=mode, rank=1, stream=stream) as view:
        view.step(1)
        view.figures(1, VALUES)
        view.message("x")
    assert stream.getvalue() == ""


def test_text():
    assert describe(VALUES) == "loss 1.235  lr 2e-05"
    assert describe({"train/loss": float("nan")}) == "loss nan"
    rates = {"perf/tokens_per_second": 1234.5, "perf/step_seconds": 0.25, "train/kd_loss": 2.0}
    assert describe(rates) == "KD 2  s/step 0.25  tokens/s 1234"
    assert [duration(s) for s in (0.4, 59.6, 200, 7500)] == ["0s", "1m00s", "3m20s", "2h05m"]
