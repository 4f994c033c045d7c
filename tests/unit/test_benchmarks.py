"""The benchmark scripts run, at sizes that measure nothing."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import (
    common,
    communication,
    index_cost,
    netns,
    packing,
    packing_job,
    save_stall,
    tiled_loss,
)
from pixelrag.bench import memory
from pixelrag.bench.report import report_sections, write_report
from pixelrag.bench.rows import read_rows
from pixelrag.bench.timing import Spread
from pixelrag.charts import markdown
from pixelrag.distributed.env import process_group

LACKING = netns.missing_requirement()


def test_a_failing_process_says_what_it_said():
    with pytest.raises(RuntimeError, match="unrecognized arguments: --nonsense"):
        common.fresh_process("json.tool", ["--nonsense"])


def test_the_tiled_loss_runs_and_compares_the_same_loss(tmp_path: Path):
    options = ["--batch=40", "--dim=8", "--rounds=1", "--memory-batch=0", f"--output={tmp_path}"]
    tiled_loss.main([*options, "--title=tiny"])
    rows = read_rows([tmp_path / "tiled_loss-tiny.jsonl"])
    assert [row.case["loss"] for row in rows] == ["infonce", "infonce", "siglip", "siglip"]
    for row in rows:
        assert row.run.hardware
        assert row.seconds.p50 > 0
        if row.case["way"] == "tiled":
            assert max(row.figures["loss_error"], row.figures["gradient_error"]) < 1e-6
        else:
            assert row.figures["tiled_over_this"] > 0


@pytest.mark.parametrize(("kind", "least"), [("flat", 1.0), ("hnsw", 0.9), ("ivf flat", 0.8)])
def test_indexes_find_what_exact_search_finds(kind, least):
    found = index_cost.measure_index(kind, 1500, 16)
    assert least <= found["recall"] <= 1.0
    assert found["build_cpu_seconds"] >= 0


def test_two_open_indexes_are_mapped_and_not_copied():
    found = index_cost.measure_memory("hnsw", 3000, 64)
    assert found["file_mib"] > 1
    assert found["two_private_mib"] < found["file_mib"]


def test_a_save_beside_the_training_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    from pixelrag.train.saver import Saver

    write_own = Saver._write_own
    monkeypatch.setattr(Saver, "_write_own", lambda *a: (time.sleep(0.3), write_own(*a))[1])
    sizes = {"hidden_size": 32, "num_layers": 1, "rounds": 1, "folder": str(tmp_path)}
    with process_group("cpu") as world:
        rows = save_stall.measure(world, {"engine": "ddp", **sizes})
    sync, beside = (
        {name: Spread.of(seconds).p50 for name, seconds in row["taken"].items()} for row in rows
    )
    assert [row["case"]["save"] for row in rows] == ["sync", "async"]
    assert beside["stall_seconds"] < 0.3 <= sync["stall_seconds"]
    assert min(sync["write_seconds"], beside["write_seconds"]) >= 0.3


def test_the_tiled_loss_holds_no_matrix(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "let_go", lambda: None)  # it would slow down what comes after
    batch = 6144
    found = tiled_loss.measure_memory(batch, 16)
    assert found["matrix_mib"] == 144
    # Tiles of 4 MiB and the gradients; half of the matrix would be too much.
    assert found["added_mib"] < 60


def test_speed_ups_compare_deferred_resident_with_what_defers_nothing():
    times = {
        communication.Case("fsdp2", "deferred", "resident"): 0.5,
        communication.Case("fsdp2", "per_chunk", "sharded"): 6.0,
        communication.Case("fsdp2", "deferred", "sharded"): 3.0,
        communication.Case("zero3", "stock", "stock"): 7.0,
    }
    (quick,) = (found := communication.speed_ups(times))
    assert quick.name == "fsdp2 deferred resident"
    assert found[quick] == {
        "times_faster_than fsdp2 per_chunk sharded": 12.0,
        "times_faster_than zero3 stock stock": 14.0,
    }


def test_the_committed_report_is_that_of_the_committed_results(tmp_path: Path):
    folders = sorted(path.parent for path in common.RESULTS.rglob("report.md"))
    assert common.RESULTS / "earlier" in folders
    for folder in folders:
        text = markdown("pixelrag bench", report_sections(read_rows([folder])))
        assert (folder / "report.md").read_text() == text, folder
    assert [path.name for path in write_report(tmp_path, [common.RESULTS / "earlier"])] == [
        "report.html", "report.md",
    ]  # fmt: skip


needs_namespaces = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))

_SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    total = 0
    while block := connection.recv(1 << 16):
        total += len(block)
    print(total, flush=True)
"""
_SEND = """
import socket, sys, time
start = time.monotonic()
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(2_000_000))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)  # until the other side has read all of it
print(time.monotonic() - start)
"""


def _namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


@pytest.mark.root
@needs_namespaces
def test_hosts_reach_each_other_at_the_limited_rate():
    with netns.hosts(2, rate_mbit=80) as (first, second):
        serve = subprocess.Popen(
            first.command(sys.executable, "-c", _SERVE, first.address),
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert serve.stdout.readline() == "ready\n"
            sent = subprocess.run(
                second.command(sys.executable, "-c", _SEND, first.address),
                capture_output=True,
                text=True,
                check=True,
                timeout=30,
            )
            assert serve.stdout.readline() == "2000000\n"
        finally:
            serve.kill()
            serve.wait()
    # 16 Mbit at 80 a second, less the bucket's 256 KiB.
    assert float(sent.stdout) > 0.16


@pytest.mark.root
@needs_namespaces
def test_hosts_go_whatever_happens():
    before = _namespaces()

    def fail_inside() -> None:
        with netns.hosts(2, rate_mbit=400) as hosts:
            mine = {host.name for host in hosts}
            assert mine < _namespaces() - before
            # Names are this process's own: a second set is refused and leaves the first alone.
            with pytest.raises(OSError, match="ip netns add"), netns.hosts(1, rate_mbit=400):
                pass
            assert mine < _namespaces() - before
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_inside()
    assert _namespaces() == before


@pytest.mark.root
@needs_namespaces
def test_a_case_sends_what_its_collectives_say():
    case = {"engine": "ddp", "grad_sync": "deferred", "params": "resident"}
    payload = {"case": case, "chunks": 2, "warmup": 1, "steps": 1, "interface": "eth0"}
    with netns.hosts(2, rate_mbit=1000) as hosts:
        result = communication.run_on_hosts(hosts, payload, timeout_seconds=120)
    assert result["figures"]["reductions"] == 1
    assert len(result["wall"]) == 1
    sent = result["figures"]["sent_mib"]
    assert sent == pytest.approx(result["figures"]["wire_mib"], rel=0.05)


@pytest.mark.root
@needs_namespaces
def test_a_failing_case_says_what_its_ranks_said():
    case = {"engine": "ddp", "grad_sync": "sometimes", "params": "resident"}
    payload = {"case": case, "chunks": 2, "warmup": 1, "steps": 1, "interface": "eth0"}
    with (
        pytest.raises(RuntimeError, match=r"engine\.grad_sync: got 'sometimes'"),
        netns.hosts(2, rate_mbit=1000) as hosts,
    ):
        communication.run_on_hosts(hosts, payload, timeout_seconds=120)


def test_chats_are_taken_evenly_over_their_lengths(tmp_path: Path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join("x" * (7 * i % 30) + "\n" for i in range(30)))
    assert packing.spread(path, 3) == 30
    assert [len(row) for row in path.read_text().splitlines()] == [5, 15, 25]


def test_the_packing_job_counts_processor_seconds_and_pads(monkeypatch: pytest.MonkeyPatch):
    for module, name in ((packing_job.loop, "Throughput"), (packing_job.distill, "PackedCollator")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back at the end
    said: list[str] = []
    monkeypatch.setattr(packing_job.cli, "main", lambda argv: said.extend(argv) or 0)
    assert packing_job.main([packing_job.FULL_ROWS, "--seed=1"]) == 0
    assert said == ["distill", "--seed=1"]
    assert packing_job.distill.PackedCollator(None, 0, fixed_width=False)._fixed_width
    throughput = packing_job.loop.Throughput()
    sum(range(10**6))
    throughput.step(1, 2)  # the first one counts
    assert 0 < throughput.rates()["perf/step_seconds"] < 10
