"""The demo's way of running commands: nothing is left behind when it is told to stop."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pixelrag.demo.commands import run_alone
from pixelrag.errors import EngineError

DEMO = """\
import sys
from pixelrag.demo.commands import run
sys.executable = sys.argv[1]
run(["eval"], nproc=1)
"""
RANKS = """\
#!/bin/sh
echo $$ > "{pid}"
echo started
exec sleep 60
"""


def test_sigterm_ends_the_ranks_too(tmp_path: Path) -> None:
    pid, stand_in = tmp_path / "pid", tmp_path / "torchrun"
    stand_in.write_text(RANKS.format(pid=pid))
    stand_in.chmod(0o755)
    demo = subprocess.Popen(
        [sys.executable, "-c", DEMO, str(stand_in)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert "torchrun" in demo.stdout.readline()
        assert demo.stdout.readline().strip() == "started"
        ranks = int(pid.read_text())
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(10) == 143
    finally:
        demo.kill()
    for _ in range(100):
        if not Path(f"/proc/{ranks}").exists():
            return
        time.sleep(0.05)
    os.kill(ranks, signal.SIGKILL)
    raise AssertionError("the ranks were left behind")


def _stand_in(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)


def test_jobs_run_side_by_side_and_bear_their_names(tmp_path: Path, monkeypatch, capsys) -> None:
    """Each waits for the other's file, so that neither ends alone."""
    wait = 'touch "$4"; until [ -e "$5" ]; do sleep 0.05; done; echo "$4 done $OMP_NUM_THREADS"'
    _stand_in(tmp_path / "python", wait)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    jobs = {"one": ["rag", "a", "b"], "two": ["rag", "b", "a"]}
    took = run_alone(jobs, threads=3, at_once=2)
    assert took.keys() == jobs.keys()
    shown = capsys.readouterr().out.splitlines()
    assert {"one: $ pixelrag rag a b", "  one: a done 3", "  two: b done 3"} <= set(shown)


def test_a_job_that_fails_ends_the_others(tmp_path: Path, monkeypatch) -> None:
    _stand_in(tmp_path / "python", 'if [ "$3" = eval ]; then exit 3; else exec sleep 60; fi\n')
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    started = time.monotonic()
    with pytest.raises(EngineError, match="`pixelrag eval` ended with code 3"):
        run_alone({"a": ["rag"], "b": ["eval"], "c": ["rag"]}, threads=1, at_once=2)
    assert time.monotonic() - started < 30
