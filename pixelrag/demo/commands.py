"""Runs pixelrag's own commands as a user would, on several processes, and shows them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from pixelrag.console import say
from pixelrag.errors import EngineError


def run(arguments: Sequence[str], *, nproc: int) -> float:
    """Run ``pixelrag <arguments>`` under torchrun; return the seconds it took.

    The command is printed first, in a form that can be repeated by hand.

    Raises:
        EngineError: it ended with another code than 0; its output, shown as it came, says why.
    """
    launcher = ["torchrun", "--standalone", f"--nproc_per_node={nproc}", "-m", "pixelrag"]
    say(f"$ {shlex.join([*launcher, *arguments])}")
    threads = str(max(1, (os.cpu_count() or 1) // nproc))
    started = time.monotonic()
    process = subprocess.Popen(
        # torchrun of this very environment, wherever its scripts lie.
        [sys.executable, "-m", "torch.distributed.run", *launcher[1:], *arguments],
        env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    # SIGTERM would end this process and leave the ranks behind.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for line in process.stdout:
            say(f"  {line.rstrip()}")
        code = process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code != 0:
        raise EngineError(f"`pixelrag {arguments[0]}` ended with code {code}; see its output above")
    return time.monotonic() - started
