"""Signals set state, relays are not repeats, and a real repeat ends the process at once."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from pixelrag.distributed.env import process_group
from pixelrag.distributed.interrupt import Interrupted, interruptible, stop_point
from pixelrag.train.signals import STOP_SIGNALS, StopRequest


def raise_signal(signum):
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_a_signal_only_sets_state_and_the_old_handler_returns(signum):
    before = signal.getsignal(signum)
    with StopRequest() as stop:
        assert stop.requested() is None
        raise_signal(signum)
        assert stop.requested() == signum.name
        raise_signal(signum)  # a launcher's relay
        assert stop.requested() == signum.name
    assert signal.getsignal(signum) is before


def test_another_signal_later_does_not_cut_the_save_short():
    now = [0.0]
    with StopRequest(clock=lambda: now[0]) as stop:
        raise_signal(signal.SIGUSR1)
        now[0] = 60.0
        raise_signal(signal.SIGTERM)
        assert stop.requested() == "SIGUSR1"


def test_handlers_return_after_an_exception():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), StopRequest():
        raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_the_same_signal_again_ends_the_process_by_it(signum):
    script = f"""
        import os, signal
        from pixelrag.train.signals import StopRequest
        now = [0.0]
        try:
            with StopRequest(relay_seconds=2.0, clock=lambda: now[0]) as stop:
                os.kill(os.getpid(), {int(signum)})
                print(stop.requested(), flush=True)
                now[0] = 3.0
                os.kill(os.getpid(), {int(signum)})
        finally:
            print("unwound", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [signum.name], done.stderr
    assert done.returncode == -signum


def test_long_work_ends_at_its_stop_points_where_it_may():
    asked = [None]
    with process_group("cpu"):
        with interruptible(lambda: asked[0]):
            stop_point()
            asked[0] = "SIGTERM"
            with interruptible(None):
                stop_point()
            with pytest.raises(Interrupted, match=r"^SIGTERM$"):
                stop_point()
        stop_point()


def test_importing_needs_no_torch():
    code = "import sys, pixelrag.train.signals; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_stop_file(tmp_path):
    with StopRequest(tmp_path) as stop:
        assert stop.requested() is None
        (tmp_path / "STOP").touch()
        assert stop.requested() == f"STOP file {tmp_path / 'STOP'}"
        for checkpoint in (None, tmp_path / "checkpoint-1"):
            stop.obeyed("STOP", checkpoint)
            assert stop.requested() is None
            told = f"STOP\n{checkpoint or 'no checkpoint'}\n"
            assert (tmp_path / "PREEMPTED").read_text() == told


def test_outside_the_main_thread_the_stop_file_still_works(tmp_path, caplog):
    seen = []

    def body():
        with StopRequest(tmp_path) as stop:
            (tmp_path / "STOP").touch()
            seen.append(stop.requested())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [f"STOP file {tmp_path / 'STOP'}"]
    assert "not in the main thread" in caplog.text
