"""A run's folder is held by one run that lives, wherever it runs, and by no dead one."""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from pixelrag.errors import CheckpointError
from pixelrag.train import owner

BEAT = 0.1


@contextmanager
def hold(folder):
    with owner.held(folder, beat_seconds=BEAT):
        yield


def leave(folder, **changes):
    """The signature that another process has left."""
    folder.mkdir(exist_ok=True)
    owner.sign(folder)
    record = json.loads((folder / owner.FILE).read_text())
    (folder / owner.FILE).write_text(json.dumps(record | changes))


@contextmanager
def another_process():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_folder_is_let_go_again(tmp_path):
    run = tmp_path / "a" / "run"
    with hold(run):
        assert [path.name for path in run.iterdir()] == [owner.FILE]
    assert not run.exists()
    with hold(run):
        (run / "config.yaml").touch()
    with hold(run):
        pass
    assert [path.name for path in run.iterdir()] == ["config.yaml"]


def test_a_live_process_of_this_machine_is_not_disturbed(tmp_path):
    with another_process() as other:
        leave(tmp_path, pid=other.pid, started=owner._start_time(other.pid))
        before = (tmp_path / owner.FILE).read_text()
        with (
            pytest.raises(CheckpointError, match=rf"process {other.pid} of .* lives"),
            hold(tmp_path),
        ):
            pass
        assert (tmp_path / owner.FILE).read_text() == before
        other.kill()
        while owner._live_local_pid(owner._read(tmp_path)):  # a zombie, that nobody has waited for
            time.sleep(0.01)
        with hold(tmp_path):
            pass


def test_what_a_dead_process_left_does_not_wait(tmp_path):
    leave(tmp_path, pid=os.getpid(), started=1)  # its id is another's now
    begun = time.monotonic()
    with owner.held(tmp_path, beat_seconds=100):
        assert json.loads((tmp_path / owner.FILE).read_text())["started"] != 1
    assert time.monotonic() - begun < 100


@pytest.mark.parametrize("place", [{"host": "elsewhere"}, {"namespace": "pid:[1]"}])
def test_a_process_out_of_sight_is_watched(tmp_path, place):
    leave(tmp_path, **place)
    over = threading.Event()

    def live():
        while not over.wait(BEAT / 2):
            os.utime(tmp_path / owner.FILE)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="writes there and lives"), hold(tmp_path):
            pass
    finally:
        over.set()
        thread.join()
    with hold(tmp_path):  # now it is silent
        assert set(place.items()).isdisjoint(owner._read(tmp_path).items())


def test_what_was_left_long_ago_out_of_sight_does_not_wait(tmp_path):
    leave(tmp_path, host="elsewhere")
    os.utime(tmp_path / owner.FILE, (1.0, 1.0))
    with owner.held(tmp_path, beat_seconds=100):
        pass


def test_the_signature_is_renewed(tmp_path):
    with hold(tmp_path):
        os.utime(tmp_path / owner.FILE, (1.0, 1.0))
        deadline = time.monotonic() + 60
        while (tmp_path / owner.FILE).stat().st_mtime < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_of_many_that_start_at_once_over_a_dead_one_one_goes_on(tmp_path):
    leave(tmp_path, pid=os.getpid(), started=1)
    script = f"""
from pathlib import Path
from pixelrag.train import owner
print("ready", flush=True)
input()
try:
    with owner.held(Path({str(tmp_path)!r})):
        print("mine", flush=True)
        input()
except owner.CheckpointError:
    print("refused", flush=True)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen([sys.executable, "-c", script], **pipes) for _ in range(4)]
    try:
        assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 4
        for racer in racers:
            print(file=racer.stdin, flush=True)
        told = sorted(racer.stdout.readline() for racer in racers)
        assert told == ["mine\n", *["refused\n"] * 3]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
