"""The command under each launcher, started from nothing as a person starts it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.train.material import command, lines_of, merged, series
from tests.train.nursery import ENVIRONMENT

pytestmark = pytest.mark.distributed

TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc_per_node",
    "2",
    "-m",
    "pixelrag",
]
DEEPSPEED = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2"]


@pytest.fixture
def environment() -> dict[str, str]:
    """What a shell has, and the code under test; nothing of a launcher."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
    kept = {k: v for k, v in os.environ.items() if k not in names}
    ours = {k: v for k, v in ENVIRONMENT.items() if k != "DS_ACCELERATOR"}
    path = f"{Path(sys.executable).parent}:{kept['PATH']}"
    return kept | ours | {"PATH": path}


@pytest.fixture
def settings(base, tmp_path, shelf):
    """Two held-out evaluations; four rows a rank."""
    return merged(
        base,
        {
            "output_dir": str(tmp_path / "run"),
            "data": {"eval": str(shelf / "eval.jsonl")},
            "batch": {"per_device_batch_size": 4},
        },
    )


@pytest.fixture(scope="session")
def expected(base, shelf, tmp_path_factory):
    """The losses of the same global batches in one process."""
    from tests.train import nursery

    folder = tmp_path_factory.mktemp("alone")
    config = merged(base, {"output_dir": str(folder / "run")})
    nursery.run(command(folder, config)).check()
    return series(folder / "run", "train/loss")


def _run(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, env=environment, capture_output=True, text=True, timeout=150, check=False
    )


def test_no_launcher(settings, expected, environment, tmp_path):
    settings = merged(settings, {"batch": {"per_device_batch_size": 8}})
    arguments = [sys.executable, "-m", "pixelrag", *command(tmp_path, settings)]
    ended = _run([*arguments, "--engine.name", "zero3"], environment)
    assert ended.returncode == 0, ended.stderr
    assert series(tmp_path / "run", "train/loss") == pytest.approx(expected, rel=1e-5)


def test_torchrun(settings, expected, environment, tmp_path):
    arguments = [sys.executable, *TORCHRUN, *command(tmp_path, settings), "--engine.name", "fsdp2"]
    ended = _run(arguments, environment)
    assert ended.returncode == 0, ended.stderr
    assert series(tmp_path / "run", "train/loss") == pytest.approx(expected, rel=1e-5)
    assert ended.stderr.count("step 4/4  loss") == 1
    assert ended.stderr.count("saved ") == 1


def test_deepspeed_launcher(settings, expected, environment, tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    arguments = [*DEEPSPEED, "--module", "pixelrag", *command(tmp_path, settings)]
    ended = _run([*arguments, "--deepspeed", str(tmp_path / "ds.json")], environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert series(tmp_path / "run", "train/loss") == pytest.approx(expected, rel=1e-5)
    output = ended.stdout + ended.stderr
    assert "engine zero1" in output
    assert output.count("step 4/4  loss") == 1


def test_torchrun_passes_sigterm_on(settings, environment, tmp_path):
    """A preempted job saves, leaves in peace, and goes on when it is started again."""
    long = merged(
        settings, {"optim": {"max_steps": 100_000, "warmup_steps": 5}, "data": {"eval": []}}
    )
    arguments = [sys.executable, *TORCHRUN, *command(tmp_path, long)]
    with subprocess.Popen(
        arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 100
        while not (metrics.exists() and metrics.stat().st_size > 0):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert re.search(r"SIGTERM( \(rank 1\))?; the same command goes on", output)
    assert (tmp_path / "run" / "PREEMPTED").exists()
    step = lines_of(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / f"checkpoint-{step}" / "COMPLETE").exists()


def test_an_error_under_torchrun_is_told_once(settings, environment, tmp_path):
    missing = merged(settings, {"data": {"train": str(tmp_path / "no.jsonl")}})
    ended = _run([sys.executable, *TORCHRUN, *command(tmp_path, missing)], environment)
    assert ended.returncode != 0
    assert ended.stderr.count("error: Data files cannot be used") == 1
    assert "exitcode  : 3" in ended.stderr


def test_torchrun_starts_again_and_the_job_goes_on(settings, environment, tmp_path):
    """A worker is killed; torchrun starts both anew, and they resume by themselves."""
    steps = {"optim": {"max_steps": 300, "warmup_steps": 5}, "checkpoint": {"every_steps": 20}}
    long = merged(settings, steps, {"data": {"eval": []}, "logging": {"every_steps": 50}})
    again = [*TORCHRUN[:2], "--max_restarts", "1", *TORCHRUN[2:]]
    with subprocess.Popen(
        [sys.executable, *again, *command(tmp_path, long)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 100
        while not list((tmp_path / "run").glob("checkpoint-*")):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.02)
        workers = psutil.Process(process.pid).children(recursive=True)
        victim = next(w for w in workers if w.environ().get("RANK") == "1")
        victim.kill()
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output[-3000:]
    assert "resuming from" in output
    assert "step 300/300" in output
