"""Checkpoint folders under kills, full disks, tampering and rival runs: whole or not there."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from pixelrag.errors import CheckpointError
from pixelrag.train import owner
from pixelrag.train.atomic import MANIFEST, atomic_dir, free_bytes, inspect, read_manifest
from pixelrag.train.checkpoint import (
    checkpoint_dir,
    clean_leftovers,
    find_latest,
    list_checkpoints,
    resolve_resume,
    rotate,
    verify_dir,
)

FILES = {"model.safetensors": b"m" * 3000, "rank-0.json": b"{}", "sub/rank-1.bin": b"\0\1\2"}


def save(output_dir, step, files=FILES, **options):
    with atomic_dir(checkpoint_dir(output_dir, step), info={"step": step}, **options) as folder:
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
    return checkpoint_dir(output_dir, step)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def run(script, *, check=True):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=check,
    )


def test_a_saved_checkpoint_is_whole_and_described(tmp_path):
    path = save(tmp_path / "run", 10)
    assert names(tmp_path / "run") == ["checkpoint-10"]
    assert names(path) == sorted([MANIFEST, "model.safetensors", "rank-0.json", "sub"])
    manifest = verify_dir(path)
    assert manifest["info"] == {"step": 10}
    assert manifest["files"].keys() == FILES.keys()
    assert manifest["files"]["model.safetensors"]["size"] == 3000
    assert {"pixelrag", "torch"} <= manifest["versions"].keys()


def test_a_failing_body_leaves_what_was_there(tmp_path):
    save(tmp_path, 10)

    def fail():
        with atomic_dir(checkpoint_dir(tmp_path, 10)) as folder:
            (folder / "half").write_bytes(b"x")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert names(tmp_path) == ["checkpoint-10"]
    verify_dir(tmp_path / "checkpoint-10")


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 10, {"other": b"new"})
    assert names(tmp_path) == ["checkpoint-10"]
    assert verify_dir(tmp_path / "checkpoint-10")["files"].keys() == {"other"}


KILLED = """
    import os, signal, sys
    from pathlib import Path
    left = [{after}]
    def counted(function):
        def call(*args, **kwargs):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return function(*args, **kwargs)
        return call
    for name in ("mkdir", "fsync", "rename", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    from pixelrag.train.atomic import atomic_dir
    with atomic_dir(Path({final!r})) as folder:
        (folder / "model").write_bytes(b"new" * 1000)
        (folder / "sub").mkdir()
        (folder / "sub" / "more").write_bytes(b"new")
    print("done")
"""


@pytest.mark.parametrize("replacing", [False, True])
def test_killed_at_every_step_of_the_way(tmp_path, replacing):
    """SIGKILL before the n-th call that touches the disk, for every n until it gets through."""
    outcomes = set()
    for after in range(40):
        folder = tmp_path / str(after)
        save(folder, 5, {"model": b"five"})
        if replacing:
            save(folder, 10, {"model": b"old"})
        final = checkpoint_dir(folder, 10)
        done = run(KILLED.format(after=after, final=str(final)), check=False)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        latest = find_latest(folder)
        verify_dir(latest)
        content = (latest / "model").read_bytes()
        outcomes.add(content[:3])
        assert content in ((b"old" if replacing else b"five"), b"new" * 1000)
        assert all(not name.startswith(".") for name in names(folder))
        if done.returncode == 0:
            break
    else:
        pytest.fail("never got through")
    assert after >= 8
    assert outcomes == {b"new", b"old" if replacing else b"fiv"}


def test_the_disk_has_it_all_before_the_name_appears(tmp_path, monkeypatch):
    """What a power cut would show: data before manifest before folders before the rename."""
    calls = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(fd):
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def recorded_rename(source, target):
        calls.append(f"rename to {os.path.basename(target)}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    save(tmp_path, 10)
    assert set(calls[:3]) == {"model.safetensors", "rank-0.json", "rank-1.bin"}
    assert calls[3] == MANIFEST
    assert set(calls[4:6]) == {".checkpoint-10.tmp", "sub"}
    assert calls[6:] == ["rename to checkpoint-10", tmp_path.name]


def in_two_ranks(output_dir, body):
    """Run `body(rank, folder)` inside one atomic_dir shared by two threads; return their errors."""
    barrier, votes, errors = threading.Barrier(2, timeout=30), {}, {}

    def work(rank):
        def agree(ok):
            votes[rank] = ok
            barrier.wait()
            answer = all(votes.values())
            barrier.wait()
            return answer

        try:
            with atomic_dir(checkpoint_dir(output_dir, 1), rank=rank, agree=agree) as folder:
                body(rank, folder)
        except Exception as error:  # noqa: BLE001  handed to the test
            errors[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def test_ranks_write_together(tmp_path):
    errors = in_two_ranks(tmp_path, lambda rank, f: (f / f"rank-{rank}").write_bytes(b"x"))
    assert errors == {}
    assert verify_dir(tmp_path / "checkpoint-1")["files"].keys() == {"rank-0", "rank-1"}


@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_failing_fails_all_and_leaves_nothing(tmp_path, failing):
    def body(rank, folder):
        if rank == failing:
            raise RuntimeError("mine")

    errors = in_two_ranks(tmp_path, body)
    assert isinstance(errors[failing], RuntimeError)
    assert isinstance(errors[1 - failing], CheckpointError)
    assert "failed on another rank" in str(errors[1 - failing])
    assert names(tmp_path) == []


def test_too_little_space_is_said_before_anything_is_touched(tmp_path):
    with pytest.raises(CheckpointError, match=r"needs about 3\.00 GiB, .* has 1\.00 GiB free"):
        save(tmp_path / "run", 10, num_bytes=3 * 2**30, free=lambda folder: 2**30)
    assert names(tmp_path) == []
    save(tmp_path / "run", 10, num_bytes=2**30, free=lambda folder: 2**30)
    assert 0 < free_bytes(tmp_path / "not" / "there") <= shutil.disk_usage(tmp_path).free


def test_a_file_size_limit_in_the_middle(tmp_path):
    save(tmp_path, 5)
    out = run(f"""
        import resource
        from pathlib import Path
        from pixelrag.errors import CheckpointError
        from pixelrag.train.atomic import atomic_dir
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            with atomic_dir(Path({str(tmp_path)!r}) / "checkpoint-10") as folder:
                (folder / "a").write_bytes(b"x" * 40_000)
                (folder / "b").write_bytes(b"x" * 60_000)
        except CheckpointError as error:
            print(error)
    """).stdout
    assert "checkpoint-10: the disk is full (File too large)" in out
    assert names(tmp_path) == ["checkpoint-5"]
    assert find_latest(tmp_path) == tmp_path / "checkpoint-5"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
@pytest.mark.parametrize("kilobytes", [200, 1100, 1800])
def test_a_disk_that_fills_in_the_middle(tmp_path, kilobytes):
    """A disk of 2 MiB: the second checkpoint fits, or fails and leaves the first one alone."""
    from pixelrag.train.state import save_tensors

    torch = pytest.importorskip("torch")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this container may not mount")
    try:
        save(disk, 5, {"model": b"5" * 500_000})

        def write():
            with atomic_dir(checkpoint_dir(disk, 10)) as folder:
                save_tensors(folder / "state", {"w": torch.ones(kilobytes * 256)}, {"step": 10})
                (folder / "more").write_bytes(b"x" * 500_000)

        if kilobytes == 200:
            write()
            assert find_latest(disk) == disk / "checkpoint-10"
        else:
            with pytest.raises(CheckpointError, match=r"No space left on device"):
                write()
            assert names(disk) == ["checkpoint-5"]
            assert find_latest(disk) == disk / "checkpoint-5"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def truncate(path):
    os.truncate(path / "model.safetensors", 1000)


def alter(path):
    (path / "model.safetensors").write_bytes(b"m" * 2999 + b"n")


def lose(path):
    (path / "sub" / "rank-1.bin").unlink()


def unfinished(path):
    (path / MANIFEST).unlink()


def torn_manifest(path):
    os.truncate(path / MANIFEST, 40)


def altered_manifest(path):
    (path / MANIFEST).write_text(json.dumps({"format": 1, "files": {"a": 3}}))


DAMAGE = [
    (truncate, r"model\.safetensors: truncated \(1000 bytes, expected 3000\)"),
    (alter, r"model\.safetensors: altered \(SHA-256 \w{12}"),
    (lose, r"sub/rank-1\.bin: missing"),
    (unfinished, "no COMPLETE manifest"),
    (torn_manifest, "COMPLETE: cannot be read"),
    (altered_manifest, "its list of files is altered"),
]


@pytest.mark.parametrize(
    ("damage", "message"), DAMAGE, ids=lambda value: getattr(value, "__name__", "")
)
def test_damage_is_named_with_the_last_good_one(tmp_path, caplog, damage, message):
    for step in (5, 10, 20):
        save(tmp_path, step)
    truncate(tmp_path / "checkpoint-10")
    damage(tmp_path / "checkpoint-20")
    with pytest.raises(CheckpointError, match=message) as caught:
        verify_dir(tmp_path / "checkpoint-20")
    assert f"--checkpoint.resume {tmp_path / 'checkpoint-5'}" in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert find_latest(tmp_path) == tmp_path / "checkpoint-5"
    assert "checkpoint-20" in caplog.text
    assert "checkpoint-10/model.safetensors: truncated" in caplog.text


def test_every_broken_file_is_listed(tmp_path):
    path = save(tmp_path, 10)
    truncate(path)
    lose(path)
    assert len(inspect(path)) == len(inspect(path, hashes=False)) == 2
    with pytest.raises(CheckpointError, match="there is no good checkpoint before it"):
        verify_dir(path)


def test_only_hashes_see_a_changed_byte(tmp_path):
    path = save(tmp_path, 10)
    alter(path)
    assert inspect(path, hashes=False) == []
    assert len(inspect(path)) == 1


def test_latest_is_by_number_and_ignores_other_folders(tmp_path):
    assert find_latest(tmp_path / "none") is None
    assert find_latest(tmp_path) is None
    for step in (9, 100, 20):
        save(tmp_path, step)
    (tmp_path / "checkpoint-abc").mkdir()
    (tmp_path / "checkpoint-999").write_text("a file")
    assert find_latest(tmp_path) == tmp_path / "checkpoint-100"
    assert [step for step, _ in list_checkpoints(tmp_path)] == [100, 20, 9]


def test_nothing_good_left_is_an_error_not_a_fresh_start(tmp_path):
    truncate(save(tmp_path, 10))
    with pytest.raises(CheckpointError, match="none is whole"):
        find_latest(tmp_path)


def test_resume_settings(tmp_path):
    run_dir = tmp_path / "run"
    assert resolve_resume("auto", run_dir) is None
    assert resolve_resume("never", run_dir) is None
    first, second = save(run_dir, 10), save(run_dir, 20)
    assert resolve_resume("auto", run_dir) == second
    assert resolve_resume(str(first), run_dir) == first
    with pytest.raises(
        CheckpointError, match=r"newest checkpoint-20, and checkpoint\.resume is never"
    ):
        resolve_resume("never", run_dir)
    with pytest.raises(CheckpointError, match="no COMPLETE manifest"):
        resolve_resume(str(tmp_path / "elsewhere"), run_dir)


def test_rotation_keeps_the_last_good_ones(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    truncate(tmp_path / "checkpoint-4")
    assert rotate(tmp_path, 2) == [tmp_path / "checkpoint-2", tmp_path / "checkpoint-1"]
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4", "checkpoint-5"]


def test_the_only_good_one_survives_any_rotation(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    truncate(tmp_path / "checkpoint-2")
    unfinished(tmp_path / "checkpoint-3")
    assert rotate(tmp_path, 1) == []
    assert find_latest(tmp_path) == tmp_path / "checkpoint-1"
    with pytest.raises(ValueError, match="keep_last=0"):
        rotate(tmp_path, 0)


def leave_unfinished(output_dir, step, **changes):
    """What a killed run leaves: a hidden folder signed by a process."""
    folder = output_dir / f".checkpoint-{step}.tmp"
    folder.mkdir(parents=True)
    owner.sign(folder)
    record = json.loads((folder / owner.FILE).read_text())
    (folder / owner.FILE).write_text(json.dumps({**record, **changes}))
    return folder


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process.pid
    process.kill()
    process.wait()


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def started(pid):
    return owner._start_time(pid)


def test_leftovers_of_dead_runs_go_and_live_ones_stay(tmp_path, sleeper):
    dead = leave_unfinished(tmp_path, 1, pid=dead_pid())
    reused = leave_unfinished(tmp_path, 2, pid=sleeper, started=1)
    live = leave_unfinished(tmp_path, 3, pid=sleeper, started=started(sleeper))
    away = leave_unfinished(tmp_path, 4, host="elsewhere")
    away_old = leave_unfinished(tmp_path, 5, host="elsewhere")
    long_ago = time.time() - 48 * 3600
    os.utime(away_old, (long_ago, long_ago))
    unsigned = tmp_path / ".checkpoint-6.tmp"
    unsigned.mkdir()
    trash = tmp_path / ".checkpoint-7.trash"
    trash.mkdir()
    mine = tmp_path / ".notes.tmp"
    mine.mkdir()
    part = tmp_path / "last" / f".generator.part-{dead_pid()}"
    part.mkdir(parents=True)
    clean_leftovers(tmp_path)
    assert [p.exists() for p in (dead, reused, away_old, unsigned, trash, part)] == [False] * 6
    assert [p.exists() for p in (live, away, mine)] == [True] * 3


def test_two_runs_in_one_folder_are_refused(tmp_path, sleeper):
    leave_unfinished(tmp_path, 10, pid=sleeper, started=started(sleeper))
    with pytest.raises(
        CheckpointError, match=f"process {sleeper} of this machine is writing it too"
    ):
        save(tmp_path, 10)
    assert names(tmp_path) == [".checkpoint-10.tmp"]


@pytest.mark.parametrize("changes", [{"host": "elsewhere"}, {"started": 1}, {}])
def test_a_leftover_of_the_same_step_is_no_obstacle(tmp_path, changes):
    (leave_unfinished(tmp_path, 10, **changes) / "stale").write_bytes(b"x")
    path = save(tmp_path, 10)
    assert verify_dir(path)["files"].keys() == FILES.keys()


def test_a_folder_that_cannot_be_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint-1: cannot be started"):
        save(tmp_path / "file", 1)


def test_read_manifest_checks_the_format(tmp_path):
    path = save(tmp_path, 1)
    (path / MANIFEST).write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match="expected a manifest of format 1"):
        read_manifest(path)


def test_importing_needs_no_torch():
    run("import sys, pixelrag.train.checkpoint; assert 'torch' not in sys.modules")
