"""Several hosts: network namespaces on this machine, started by the launchers that we ship."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.netns import Host, hosts, missing_requirement
from tests.distributed import rag_runs
from tests.train import nursery
from tests.train.conftest import base, classroom, lesson, shelf  # noqa: F401 - fixtures
from tests.train.material import command, lines_of, merged, series

LAUNCHERS = Path(__file__).resolve().parents[2] / "launchers"
_MISSING = missing_requirement()
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.root,
    pytest.mark.skipif(_MISSING is not None, reason=f"no hosts can be made here: {_MISSING}"),
]


@pytest.fixture
def pair():
    with hosts(2) as made:
        yield made


class Cluster:
    """One command on every host."""

    def __init__(
        self, pair: Sequence[Host], launcher: str, arguments: Sequence[str], **more: str
    ) -> None:
        self.hosts = list(pair)
        self._files = []
        self.processes = []
        for rank, host in enumerate(self.hosts):
            variables = {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "HEAD": pair[0].name,
                "NODES": str(len(self.hosts)),
                "PROCESSES": "1",
                "NODE_RANK": str(rank),
            }
            kept = {k: v for k, v in os.environ.items() if "RANK" not in k}
            process = subprocess.Popen(
                host.command(str(LAUNCHERS / launcher), *arguments),
                env=kept | nursery.ENVIRONMENT | variables | more,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            self.processes.append(process)

    def wait(self, timeout: float = 150.0) -> list[tuple[int, str]]:
        """Exit code and output of each host."""
        deadline = time.monotonic() + timeout
        ended = []
        try:
            for process in self.processes:
                output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
                ended.append((process.returncode, output))
        finally:
            for rank in range(len(self.hosts)):
                self.kill(rank)
        return ended

    def kill(self, rank: int) -> None:
        """Everything that a host runs is gone, as if its power were."""
        pids = subprocess.run(
            ["ip", "netns", "pids", self.hosts[rank].name], capture_output=True, text=True
        )
        for pid in pids.stdout.split():
            os.kill(int(pid), signal.SIGKILL)


def _check(ended: list[tuple[int, str]]) -> None:
    for rank, (code, output) in enumerate(ended):
        assert code == 0, f"host {rank} ended with {code}\n{output[-4000:]}"


def _alone(arguments: list[str], folder: Path, name: str, *flags: str) -> list[float]:
    """Losses of the same global batches in one process."""
    output = folder / "alone"
    nursery.run([*arguments, f"--output_dir={output}", *flags]).check()
    return series(output, name)


def test_contrastive_by_torchrun(pair, base, tmp_path):  # noqa: F811
    config = merged(base, {"output_dir": str(tmp_path / "run"), "engine": {"name": "fsdp2"}})
    arguments = command(tmp_path, config)
    expected = _alone(arguments, tmp_path, "train/loss")
    half = ["--batch.per_device_batch_size=4"]
    _check(Cluster(pair, "torchrun_many_nodes.sh", arguments + half).wait())
    assert series(tmp_path / "run", "train/loss") == pytest.approx(expected, rel=1e-5)
    assert (tmp_path / "run" / "logs" / "rank-00001.log").exists()


def test_distill_by_deepspeed_without_ssh(pair, lesson, tmp_path, monkeypatch):  # noqa: F811
    arguments = command(tmp_path, lesson, "distill")
    expected = _alone(arguments, tmp_path, "train/loss")
    (tmp_path / "hosts").write_text("".join(f"{host.name} slots=1\n" for host in pair))
    monkeypatch.setenv("HOSTFILE", str(tmp_path / "hosts"))
    half = ["--batch.per_device_batch_size=1", "--engine.name=zero2"]
    _check(Cluster(pair, "deepspeed.sh", arguments + half).wait())
    assert series(tmp_path / "run", "train/loss") == pytest.approx(expected, rel=1e-5)


def test_rag_by_torchrun(pair, tmp_path):
    rag_runs.make_material(tmp_path)
    arguments = ["rag", *rag_runs.flags(tmp_path, tmp_path / "run"), "--engine.name=zero3"]
    whole, half = ([f"--batch.per_device_batch_size={rows}"] for rows in (8, 4))
    expected = _alone(arguments, tmp_path, "train/loss", *whole)
    _check(Cluster(pair, "torchrun_many_nodes.sh", arguments + half).wait())
    assert series(tmp_path / "run", "train/loss") == pytest.approx(expected, rel=1e-4)


def test_the_gradient_matrix_holds(pair):
    arguments = ["verify", "--quick", "--engine", "ddp", "zero3", "fsdp2", "--device", "cpu"]
    ended = Cluster(pair, "torchrun_many_nodes.sh", arguments).wait()
    _check(ended)
    assert "Every case gives the full-batch gradient" in ended[0][1]


def test_launch_check_compares_hosts(pair, tmp_path):
    """The disk is shared here, so a path in /proc stands for one that differs."""
    arguments = ["launch-check", "--path=/etc/hosts", "--path=/proc/sys/kernel/hostname"]
    ended = Cluster(pair, "torchrun_many_nodes.sh", [*arguments, "--message-mib=1"]).wait()
    assert all(code != 0 for code, _ in ended)
    output = ended[0][1]
    assert "2 ranks on 2 hosts" in output
    assert re.search(r"/proc/sys/kernel/hostname: \w+ on rank 0; \w+ on rank 1; expected", output)
    assert "/etc/hosts: no rank" not in output
    assert "error: the ranks are not alike" not in ended[1][1]  # told once


@pytest.fixture
def long_run(base, tmp_path):  # noqa: F811
    """Steps without end, saved every third."""
    changes = {
        "output_dir": str(tmp_path / "run"),
        "optim": {"max_steps": 100_000, "warmup_steps": 1},
        "checkpoint": {"every_steps": 3},
        "engine": {"timeout_seconds": 6},
        "batch": {"per_device_batch_size": 4},
    }
    return command(tmp_path, merged(base, changes))


def _wait_for(happened: Callable[[], Any], cluster: Cluster, *hosts: int) -> None:
    """Wait until something has happened, while the hosts live."""
    deadline = time.monotonic() + 100
    while not happened():
        assert time.monotonic() < deadline
        assert all(cluster.processes[h].poll() is None for h in hosts), cluster.wait()
        time.sleep(0.1)


def _newest(output: Path) -> int:
    """Step of the last checkpoint; 0 while there is none."""
    return max(
        [0, *(int(p.parent.name.split("-")[1]) for p in output.glob("checkpoint-*/COMPLETE"))]
    )


def test_a_link_is_cut(pair, long_run, tmp_path):
    """The others say who is missing, in time, and the run goes on without it."""
    output = tmp_path / "run"
    cluster = Cluster(pair, "torchrun_many_nodes.sh", long_run)
    _wait_for(lambda: _newest(output), cluster, 0, 1)
    lost = time.monotonic()
    pair[1].cut()
    told, _ = cluster.processes[0].communicate(timeout=90)
    assert time.monotonic() - lost < 60
    cluster.kill(1)  # alone, its launcher looks for the others for minutes
    cluster.processes[1].communicate()
    assert cluster.processes[0].returncode != 0
    # Where it stood is as old as its last beat, up to a second: many of these steps.
    assert f"No sign of life from rank 1 on {pair[1].name} (" in told
    newest = _newest(output)
    alone = ["--batch.per_device_batch_size=8", f"--optim.max_steps={newest + 2}"]
    ended = nursery.run([*long_run, *alone]).check()
    assert f"resuming from {output}/checkpoint-{newest}" in ended.text


def test_a_range_of_hosts_goes_on_with_those_that_are_left(pair, long_run, tmp_path):
    """A host is gone at once; torchrun itself starts the rank that is left again."""
    output = tmp_path / "run"
    # Waits of a loaded machine's size: a host is lost after 8 s, the rest begin 4 s later.
    waits = "join_timeout=100,last_call_timeout=4,keep_alive_interval=2,keep_alive_max_attempt=4"
    options = {"MAX_RESTARTS": "1", "TORCHRUN_OPTIONS": f"--rdzv_conf {waits}"}
    arguments = [*long_run, "--batch.global_batch_size=8"]
    cluster = Cluster(pair, "torchrun_many_nodes.sh", arguments, NODES="1:2", **options)
    both = output / "logs" / "rank-00001.log"
    _wait_for(lambda: both.exists() and _newest(output), cluster, 0, 1)
    cluster.kill(1)
    last = _newest(output)
    _wait_for(lambda: _newest(output) > last + 20, cluster, 0)
    (output / "STOP").touch()
    told, _ = cluster.processes[0].communicate(timeout=60)
    assert cluster.processes[0].returncode == 0, told[-3000:]
    assert f"No sign of life from rank 1 on {pair[1].name} (" in told
    assert "8 over 2 ranks" in told
    behind = told[told.index(f"resuming from {output}/checkpoint-") :]
    assert "8 over 1 ranks" in behind
    steps = [record["step"] for record in lines_of(output) if "train/loss" in record]
    assert steps == list(range(1, len(steps) + 1))
