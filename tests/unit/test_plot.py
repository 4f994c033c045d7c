"""`pixelrag plot`: records as they were written, resumed and torn; one page or picture of them."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pixelrag.cli import main
from pixelrag.errors import DataError
from pixelrag.plot.figures import _thinned, sections
from pixelrag.plot.run import read_runs


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Writes the record of a run; text stands for a line as it is."""
    monkeypatch.chdir(tmp_path)

    def _write(name: str, *lines: dict | str) -> Path:
        folder = Path(name)
        folder.mkdir(parents=True)
        texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
        (folder / "metrics.jsonl").write_text("".join(texts))
        return folder

    return _write


def steps(*numbers: int, loss: float = 1.0) -> list[dict]:
    return [{"step": n, "train/loss": loss + n, "perf/tokens_per_second": 10.0} for n in numbers]


def test_steps_that_were_done_again_count_the_last_time(record):
    """Killed behind step 10, gone on with from 5, and not yet as far as before."""
    lines = [*steps(2, 4, 6, 8, 10), {"step": 10, "eval/recall@1": 0.5}, *steps(6, 8, loss=5.0)]
    (run,) = read_runs([record("run", *lines)])
    assert run.points("train/loss") == ([2, 4, 6, 8], [3.0, 5.0, 11.0, 13.0])
    assert run.points("eval/recall@1") == ([], [])
    assert (run.resumed, run.last_step) == ([5], 8)


def test_what_is_not_finite_is_a_gap_and_a_torn_end_is_no_line(record):
    broken = {"step": 4, "train/loss": None, "nonfinite": {"train/loss": "nan"}, "note": "x"}
    (run,) = read_runs([record("run", *steps(2), broken, *steps(6), '{"step": 8, "train/lo')])
    at, values = run.points("train/loss")
    assert at == [2, 4, 6]
    assert math.isnan(values[1])
    assert run.finite("train/loss") == [3.0, 7.0]
    text = str([part for section in sections([run]) for part in section.parts])
    assert "run: not finite, and gaps in the charts: train/loss (1 times)." in text


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (['{"step": 1\n', '{"step": 2, "train/loss": 1.0}\n'], "run/metrics.jsonl:1: no line of"),
        (['[]\n', '{"step": 2, "train/loss": 1.0}\n'], "run/metrics.jsonl:1: no line of"),
        ([""], "run/metrics.jsonl holds no figures yet"),
    ],
)  # fmt: skip
def test_a_broken_record_is_named_by_line(lines, told, record):
    folder = record("run", *lines)
    with pytest.raises(DataError, match=told):
        read_runs([folder])


def test_runs_lie_over_each_other_on_a_page_that_stands_alone(record, capsys):
    index = {"step": 4, "index/age_steps": 3, "mem/peak_gib": 1.5, "eval/recall@1": 0.25}
    names = [
        str(record("a/run", *steps(2, 4), index)),
        str(record("b/run", *steps(2, 4, loss=3.0))),
    ]
    assert main(["plot", *names]) == 0
    assert capsys.readouterr().out == "wrote a/run/plot.html\n"
    text = Path("a/run/plot.html").read_text()
    for words in (
        ">a/run<", ">b/run<", "Loss (train/loss)", "Tokens (perf/tokens_per_second)",
        "Index lag: age of what is searched", "Peak memory (mem/peak_gib)",
        "Retrieval (eval/recall@1)",
    ):  # fmt: skip
        assert words in text, words
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text
    outside = [word for word in text.split('"') if word.startswith(("http:", "https:", "//"))]
    assert {word for word in outside if "www.w3.org" not in word} == set()
    assert "<script" not in text


def test_a_picture_holds_every_chart(record):
    run = str(record("run", *steps(2, 4)))
    assert main(["plot", run, "--output", "run.png"]) == 0
    picture = Image.open(io.BytesIO(Path("run.png").read_bytes()))
    # Two charts, of loss and of tokens, side by side, in a margin and below the run's name.
    assert picture.width == pytest.approx(2 * 5 * 160 + 2 * 40, rel=0.02)
    grey = np.asarray(picture.convert("L"))
    margins = (grey[:40], grey[-40:], grey[:, :40], grey[:, -40:])
    assert [part.min() for part in margins] == [255] * 4
    assert grey[40:76, 40:200].min() < 100
    assert picture.height < picture.width / 2


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["run", "--output", "x.pdf"], 2, "expected a name that ends in .html or .png"),
        (["gone"], 3, "gone is no run: it has no metrics.jsonl"),
        (["run", "./run"], 3, "a run is named twice: run, run"),
        (["run", "--output", "no/x.html"], 2, "--output no/x.html cannot be written"),
        ([], 2, "pixelrag plot: got too few arguments, expected also run"),
    ],
)
def test_what_cannot_be_drawn_is_said(words, code, told, record, capsys):
    record("run", *steps(2))
    assert main(["plot", *words]) == code
    assert told in capsys.readouterr().err


def test_many_points_are_thinned_and_what_stands_out_stays():
    values = [0.0] * 10_000
    values[4321], values[7000], values[8000] = 9.0, -9.0, math.nan
    at, kept = _thinned((list(range(10_000)), values))
    assert len(at) <= 900
    assert (at[0], at[-1]) == (0, 9_999)
    assert dict(zip(at, kept, strict=True))[4321] == 9.0
    assert dict(zip(at, kept, strict=True))[7000] == -9.0
    assert any(map(math.isnan, kept))
