"""metrics.jsonl is exact and whole; the other sinks can fail without being able to hurt."""

import importlib.util
import json
import logging
import math
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from pixelrag.errors import CheckpointError, ConfigError
from pixelrag.train.metrics_writer import MetricsWriter, encode_line, truncate_after
from pixelrag.train.sinks import SINKS, check_sinks, redact


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def installed(name):
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def fake_package(monkeypatch, tmp_path, name, body):
    folder = tmp_path / "site"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(textwrap.dedent(body))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(sys.modules, name, None)  # so that the undo removes the fake
    del sys.modules[name]
    importlib.invalidate_caches()


def test_a_line_a_write_visible_at_once(tmp_path):
    writer = MetricsWriter(tmp_path / "new" / "run")
    writer.write(1, {"train/loss": torch.tensor(0.5), "n": np.int64(3), "ok": True, "why": "x"})
    assert lines(writer.path) == [{"step": 1, "train/loss": 0.5, "n": 3, "ok": True, "why": "x"}]
    writer.write(2, {"train/loss": 0.1 + 0.2})
    assert lines(writer.path)[1]["train/loss"] == 0.1 + 0.2
    writer.close()
    writer.close()


def test_other_ranks_write_nothing(tmp_path):
    with MetricsWriter(tmp_path / "run", rank=1) as writer:
        writer.write(1, {"a": 1.0})
        writer.sync()
    assert list(tmp_path.iterdir()) == []


def test_non_finite_is_valid_json_and_still_told():
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    line = encode_line(7, {"a": math.nan, "b": -math.inf, "c": 1.0})
    assert json.loads(line, parse_constant=refuse) == {
        "step": 7,
        "a": None,
        "b": None,
        "c": 1.0,
        "nonfinite": {"a": "nan", "b": "-inf"},
    }
    with pytest.raises(ValueError, match="reserved metric names: step"):
        encode_line(7, {"step": 8})


def train(folder, first, last, resumed=None):
    with MetricsWriter(folder, resumed_step=resumed) as writer:
        for step in range(first, last + 1):
            writer.write(step, {"train/loss": 1 / step})
            if step % 4 == 0:
                writer.write(step, {"eval/mrr": step / 100})
    return writer.path


def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path):
    whole = train(tmp_path / "a", 1, 12)
    train(tmp_path / "b", 1, 10)  # died after step 10, checkpoint at 8
    with open(tmp_path / "b" / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "train/lo')  # killed in the middle of a write
    resumed = train(tmp_path / "b", 9, 12, resumed=8)
    assert resumed.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["metrics.jsonl", "run_id"]


def test_resuming_keeps_the_run_id_and_a_fresh_start_does_not(tmp_path):
    train(tmp_path, 1, 2)
    first = (tmp_path / "run_id").read_text()
    train(tmp_path, 3, 3, resumed=2)
    assert (tmp_path / "run_id").read_text() == first
    train(tmp_path, 1, 1)
    assert (tmp_path / "run_id").read_text() != first
    assert [r["step"] for r in lines(tmp_path / "metrics.1.jsonl")] == [1, 2, 3]
    assert [r["step"] for r in lines(tmp_path / "metrics.jsonl")] == [1]
    train(tmp_path, 1, 1)
    assert (tmp_path / "metrics.2.jsonl").exists()


def test_torn_lines_in_the_middle_are_named(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n[3]\n{"step": 2}\n')
    truncate_after(path, 5)
    assert lines(path) == [{"step": 1}, {"step": 2}]
    assert f"{path}:2: not a metrics line" in caplog.text
    assert f"{path}:3: not a metrics line" in caplog.text
    truncate_after(tmp_path / "none.jsonl", 5)
    assert not (tmp_path / "none.jsonl").exists()


def test_an_evaluation_that_is_due_again_loses_its_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = [{"step": s, f"{kind}/loss": 0} for s in (1, 2, 3) for kind in ("train", "eval")]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    truncate_after(path, 2, evaluation_due=True)
    assert lines(path) == records[:3]


def test_a_full_disk_stops_the_run_and_leaves_whole_lines(tmp_path):
    script = f"""
        import resource
        from pathlib import Path
        from pixelrag.errors import CheckpointError
        from pixelrag.train.metrics_writer import MetricsWriter
        writer = MetricsWriter(Path({str(tmp_path)!r}))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            for step in range(100):
                writer.write(step, {{"train/loss": 0.25}})
        except CheckpointError as error:
            print(step, error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    step, message = done.stdout.split(" ", 1)
    assert "metrics.jsonl: cannot be written (File too large)" in message
    content = (tmp_path / "metrics.jsonl").read_bytes()
    assert content.endswith(b"\n")
    assert len(lines(tmp_path / "metrics.jsonl")) == int(step) > 10


def test_a_folder_that_cannot_be_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: cannot be written"):
        MetricsWriter(tmp_path / "file" / "run")


def test_a_missing_package_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    for package, _ in SINKS.values():
        monkeypatch.delitem(sys.modules, package, raising=False)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n in ("wandb", "trackio") else find(n)
    )
    with pytest.raises(ConfigError) as caught:
        MetricsWriter(tmp_path / "run", rank=1, sinks=["wandb", "trackio", "mlflow"])
    text = str(caught.value)
    assert "logging.wandb: the package 'wandb' is not installed" in text
    assert "pip install 'pixelrag-trainer[trackio]'" in text
    assert "unknown sink 'mlflow', expected one of tensorboard, wandb, trackio" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(installed("wandb"), reason="wandb is installed")
def test_a_folder_of_the_same_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=r"logging\.wandb"):
        check_sinks(["wandb"])


FAKE_WANDB = """
    calls = []
    class Run:
        def log(self, values, step):
            calls.append((step, values))
        def finish(self):
            calls.append("finish")
    def init(**settings):
        calls.append(settings)
        return Run()
"""


def test_wandb_gets_numbers_config_and_a_stable_id(tmp_path, monkeypatch):
    fake_package(monkeypatch, tmp_path, "wandb", FAKE_WANDB)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    config = {"model": {"hf_token": "s3cret"}, "seed": 1}
    run = tmp_path / "run"
    with MetricsWriter(run, sinks=["wandb"], config=config) as writer:
        writer.write(3, {"train/loss": 0.5, "note": "text", "none": None, "nan": math.nan})
    settings, (step, values), finish = sys.modules["wandb"].calls
    run_id = (run / "run_id").read_text().strip()
    assert settings["id"] == run_id
    assert (settings["project"], settings["name"]) == ("pixelrag", f"run-{run_id}")
    assert settings["config"] == {"model": {"hf_token": "***"}, "seed": 1}
    assert step == 3
    assert values["train/loss"] == 0.5
    assert math.isnan(values["nan"])
    assert "note" not in values
    assert "none" not in values
    assert finish == "finish"


def test_trackio_is_told_the_same(tmp_path, monkeypatch):
    fake_package(
        monkeypatch,
        tmp_path,
        "trackio",
        """
        calls = []
        def init(**settings): calls.append(settings)
        def log(values, step): calls.append((step, values))
        def finish(): calls.append("finish")
        """,
    )
    with MetricsWriter(tmp_path / "run", sinks=["trackio"]) as writer:
        writer.write(3, {"train/loss": 0.5})
    settings, logged, finish = sys.modules["trackio"].calls
    assert settings["resume"] == "allow"
    assert logged == (3, {"train/loss": 0.5})
    assert finish == "finish"


@pytest.mark.parametrize(
    ("body", "warning"),
    [
        ("def init(**_): raise OSError('no network')", "could not start"),
        (
            """
            class Run:
                def log(self, values, step): raise OSError('no network')
                def finish(self): raise OSError('no network')
            def init(**_): return Run()
            """,
            "failed at step 1",
        ),
    ],
)
def test_a_failing_sink_warns_once_and_training_goes_on(
    tmp_path, monkeypatch, caplog, body, warning
):
    fake_package(monkeypatch, tmp_path, "wandb", body)
    with caplog.at_level(logging.WARNING), MetricsWriter(tmp_path / "run", sinks=["wandb"]) as w:
        for step in range(1, 6):
            w.write(step, {"train/loss": 0.5})
        during = [record.getMessage() for record in caplog.records]
    assert len(during) == 1
    assert warning in during[0]
    assert "OSError: no network" in during[0]
    assert len(lines(w.path)) == 5
    if "failed" in warning:
        assert caplog.records[-1].getMessage() == "logging.wandb: 6 calls failed in all"


def test_ctrl_c_in_a_sink_is_not_swallowed(tmp_path, monkeypatch):
    fake_package(
        monkeypatch,
        tmp_path,
        "wandb",
        """
        class Run:
            def log(self, values, step): raise KeyboardInterrupt
            def finish(self): pass
        def init(**_): return Run()
        """,
    )
    writer = MetricsWriter(tmp_path / "run", sinks=["wandb"])
    with pytest.raises(KeyboardInterrupt):
        writer.write(1, {"a": 1.0})
    writer.close()


def test_redact_masks_secrets_and_nothing_else():
    config = {
        "model": {"max_visual_tokens": 1280, "path": "https://me:pw@host/x"},
        "api_key": "k",
        "HF_TOKEN": "t",
        "token": None,
        "paths": ("a", 1.5, None, True),
        "ds": {"wandb_apikey": 3},
    }
    assert redact(config) == {
        "model": {"max_visual_tokens": 1280, "path": "https://***@host/x"},
        "api_key": "***",
        "HF_TOKEN": "***",
        "token": None,
        "paths": ["a", 1.5, None, True],
        "ds": {"wandb_apikey": "***"},
    }


@pytest.mark.skipif(not installed("tensorboard"), reason="needs tensorboard")
def test_tensorboard_drops_later_steps_on_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, sinks=["tensorboard"]) as writer:
        for step in range(1, 6):
            writer.write(step, {"train/loss": float(step)})
    with MetricsWriter(tmp_path, sinks=["tensorboard"], resumed_step=3) as writer:
        writer.write(4, {"train/loss": 40.0})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    got = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert got == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


@pytest.mark.skipif(not installed("wandb"), reason="needs wandb")
def test_real_wandb_offline(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with MetricsWriter(tmp_path, sinks=["wandb"], config={"seed": 1}) as writer:
        writer.write(1, {"train/loss": 0.5})
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert "logging.wandb" not in caplog.text


@pytest.mark.skipif(not installed("trackio"), reason="needs trackio")
def test_real_trackio(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    with MetricsWriter(tmp_path / "run", sinks=["trackio"], config={"seed": 1}) as writer:
        writer.write(1, {"train/loss": 0.5})
    assert "logging.trackio" not in caplog.text
