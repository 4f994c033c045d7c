"""The demo's way of running commands: nothing is left behind when it is told to stop."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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
