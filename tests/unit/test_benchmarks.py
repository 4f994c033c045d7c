"""The benchmark scripts run, at sizes that measure nothing."""

import importlib.util
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import (
    common,
    communication,
    gradcache_cost,
    netns,
    packing,
    packing_job,
    peers,
    rag_refresh,
    report,
    save_stall,
    tiled_loss,
)
from pixelrag.distributed.env import process_group

LACKING = netns.missing_requirement()


def _lines(output: str) -> list[dict]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.fixture
def few_texts(monkeypatch: pytest.MonkeyPatch):
    """Texts without reading the standard library, of unlike lengths."""
    monkeypatch.setattr(
        common,
        "code_search_pairs",
        lambda n: (
            [f"what is {i}" + " and so on" * (i % 3) for i in range(n)],
            [f"it is {i}" + ", or so" * (5 * i % 7) for i in range(n)],
        ),
    )


def test_interleaved_runs_in_turns_and_leaves_the_warm_up_out():
    calls: list[str] = []
    candidates = {name: lambda name=name: calls.append(name) for name in "abc"}
    taken = common.interleaved(candidates, rounds=2, warmup=1)
    assert "".join(calls) == "abc" + "cba" + "abc"
    assert [len(t.wall) for t in taken.values()] == [2, 2, 2]


def test_percentiles_and_ratios():
    assert common.spread([5.0, 1.0, 2.0, 4.0, 3.0, 6.0]) == {"p20": 2.0, "p50": 3.5, "p80": 5.0}
    ours, theirs = common.Taken([1.0, 4.0], [1.0, 1.0]), common.Taken([2.0, 2.0], [2.0, 2.0])
    found = common.ratios(ours, theirs)
    assert found["wall"]["p50"] == 1.25  # of the ratios, not the ratio of the medians
    assert found["cpu"]["p50"] == 0.5


def test_the_peak_starts_anew_and_sees_what_was_freed():
    held = torch.ones(64 * common.MIB // 4)
    del held
    common.reset_peak()
    before = common.peak_mib()
    held = torch.ones(128 * common.MIB // 4)
    del held
    assert 120 < common.peak_mib() - before < 200
    assert common.resident_mib() < before + 64


def test_a_failing_process_says_what_it_said():
    with pytest.raises(RuntimeError, match="unrecognized arguments: --nonsense"):
        common.fresh_process("json.tool", ["--nonsense"])


def _gradient(engine, way: str, chunk: int) -> dict[str, torch.Tensor]:
    queries, documents = (gradcache_cost.equal_rows(engine.module, 5, 6) for _ in range(2))
    {"plain": gradcache_cost._plain, "gradcache": gradcache_cost._gradcache}[way](
        engine, queries, documents, chunk
    )
    found = engine.gradients()
    engine.step()
    return found


def test_plain_and_gradcache_are_one_gradient(tiny_models):
    with process_group("cpu"):
        both = []
        for way in ("plain", "gradcache"):
            module, _ = common.load_biencoder(16, str(tiny_models["bert"]))
            both.append(_gradient(common.ddp_engine(module), way, 2))
    plain, cached = both
    error = sum(((plain[n] - cached[n]) ** 2).sum() for n in plain).sqrt()
    norm = sum((g**2).sum() for g in plain.values()).sqrt()
    assert norm > 0
    assert error / norm < 1e-5


def test_gradcache_cost_runs(tiny_models, tmp_path: Path, capsys):
    output = tmp_path / "cost.jsonl"
    options = "--batches 4 --time-batch 4 --chunk 2 --tokens 8 --rounds 1 --plain-up-to 0"
    gradcache_cost.main(
        [*options.split(), "--model", str(tiny_models["bert"]), "--output", str(output)]
    )
    rows = _lines(output.read_text())
    assert rows == _lines(capsys.readouterr().out)
    kinds = ["environment", "workload", *["time"] * 5, "memory"]
    assert [r["kind"] for r in rows] == kinds
    assert {r["way"] for r in rows if r["kind"] == "time"} == set(gradcache_cost.WAYS)


@pytest.mark.usefixtures("few_texts")
@pytest.mark.parametrize(("kind", "least"), [("flat", 1.0), ("hnsw", 0.9), ("ivf flat", 0.8)])
def test_indexes_find_what_exact_search_finds(kind, least):
    row = rag_refresh.measure_index(kind, 1500, 16)
    assert least <= row["recall"] <= 1.0
    assert row["build_cpu_seconds"] >= 0


def test_two_open_indexes_are_mapped_and_not_copied():
    row = rag_refresh.measure_memory("hnsw", 3000, 64)
    assert row["file_mib"] > 1
    assert row["two_private_mib"] < row["file_mib"]


def test_a_save_beside_the_training_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    from pixelrag.train.saver import Saver

    write_own = Saver._write_own
    monkeypatch.setattr(Saver, "_write_own", lambda *a: (time.sleep(0.3), write_own(*a))[1])
    sizes = {"hidden_size": 32, "num_layers": 1, "rounds": 1, "folder": str(tmp_path)}
    with process_group("cpu") as world:
        sync, beside = save_stall.measure(world, {"engine": "ddp", **sizes})
    assert beside["stall_seconds"]["p50"] < 0.3 <= sync["stall_seconds"]["p50"]
    assert min(sync["write_seconds"]["p50"], beside["write_seconds"]["p50"]) >= 0.3


@pytest.mark.usefixtures("few_texts")
def test_peers_compute_the_same_gradient(tiny_models):
    names = [name for name in peers.installed() if name != "gradcache"]
    work = peers.Workload(*common.code_search_pairs(6), 4, 16, str(tiny_models["bert"]))
    with process_group("cpu"):
        rows = peers.measure_time(names, work, rounds=1, warmup=0)
    assert [r["candidate"] for r in rows] == names
    assert len({round(r["loss"], 4) for r in rows}) == 1
    assert all(r["gradient_error"] < peers.SAME_WORK for r in rows)


def test_long_tailed_texts_are_the_same_each_time_and_mostly_short(monkeypatch):
    functions = [
        SimpleNamespace(file="a.py", name=str(i), source=f"{i:04d}" + "x" * i, docstring=f"{i}")
        for i in range(3000)
    ]
    monkeypatch.setattr(common, "read_library", lambda: SimpleNamespace(functions=functions))
    queries, documents = common.long_tail_pairs(300)
    assert (queries, documents) == common.long_tail_pairs(300)
    assert [int(query) for query in queries] == [int(text[:4]) for text in documents]
    assert len(set(documents)) == 300
    lengths = sorted(map(len, documents))
    assert 180 < lengths[150] < 270
    assert lengths[270] > 3 * lengths[150]


@pytest.mark.usefixtures("few_texts")
def test_peers_notices_other_work(tiny_models):
    model = str(tiny_models["bert"])
    queries, documents = common.code_search_pairs(6)
    with process_group("cpu"):
        candidates = {
            "a": peers.pixelrag_candidate(peers.Workload(queries, documents, 4, 16, model)),
            "b": peers.pixelrag_candidate(peers.Workload(queries, documents[::-1], 4, 16, model)),
        }
        with pytest.raises(AssertionError, match="not the same work"):
            peers.compare_gradients(candidates)


def test_peers_is_compared_with_sentence_transformers_where_it_is_installed():
    there = importlib.util.find_spec("sentence_transformers") is not None
    assert ("sentence-transformers" in peers.installed()) == there


def test_tiled_loss_runs_and_compares_the_same_loss(tmp_path: Path, capsys):
    output = tmp_path / "tiled_loss.jsonl"
    options = ["--batch=40", "--dim=8", "--rounds=1", "--memory-batch=0"]
    tiled_loss.main([*options, "--output", str(output)])
    rows = _lines(output.read_text())
    assert rows == _lines(capsys.readouterr().out)
    assert [r["kind"] for r in rows[1:]] == ["time", "time", "difference"] * 2
    for row in report.of_kind(rows, "difference"):
        assert max(row["loss_error"], row["gradient_error"]) < 1e-6
    assert "| siglip, plain | 40 | 8 |" in report.tiled_loss(rows)


def test_the_tiled_loss_holds_no_matrix():
    batch = 6144
    found = tiled_loss.measure_memory(batch, 16)
    assert found["matrix_mib"] == 144
    # Tiles of 4 MiB and the gradients; half of the matrix would be too much.
    assert found["added_mib"] < 60


def _counter(calls: dict[str, int], sizes: dict[str, int]) -> SimpleNamespace:
    return SimpleNamespace(
        calls=Counter(calls), bytes=Counter(sizes), gradient_reductions=sum(calls.values())
    )


def test_what_goes_over_the_wire():
    # Two ranks: a gather hands over half and whole, so 3 MiB of buffers are a whole of 2.
    mib = common.MIB
    gathers = {"_allgather_base_": 2}
    reductions = {"_reduce_scatter_base_": 1, "allreduce_": 1}
    sizes = {"_reduce_scatter_base_": 6 * mib, "allreduce_": 5 * mib}
    counted = SimpleNamespace(
        everything=_counter(gathers | reductions, {"_allgather_base_": 3 * mib} | sizes),
        backward_only=_counter(reductions, sizes),
    )
    found = communication.summarise(counted, 2)
    assert (found["gathers"], found["gathered_mib"]) == (2, 2.0)
    assert (found["reductions"], found["reduced_mib"]) == (2, 9.0)
    assert found["wire_mib"] == 2 / 2 + 4 / 2 + 5  # (W - 1) / W, and an all-reduce twice that


def test_speed_ups_compare_deferred_resident_with_what_defers_nothing():
    times = {
        ("fsdp2", "deferred", "resident"): 0.5,
        ("fsdp2", "per_chunk", "sharded"): 6.0,
        ("fsdp2", "deferred", "sharded"): 3.0,
        ("zero3", "stock", "stock"): 7.0,
    }
    rows = [
        {"engine": e, "grad_sync": g, "params": p, "seconds": {"p50": s}}
        for (e, g, p), s in times.items()
    ]
    found = {(r["fast"], r["slow"]): r["times"] for r in communication.speed_ups(rows)}
    assert found == {
        ("fsdp2 deferred resident", "fsdp2 per_chunk sharded"): 12.0,
        ("fsdp2 deferred resident", "zero3 stock stock"): 14.0,
    }


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
    assert result["counted"]["reductions"] == 1
    assert len(result["seconds"]) == 1
    assert result["sent_mib"] == pytest.approx(result["counted"]["wire_mib"], rel=0.05)


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


def test_the_summary_holds_what_the_files_hold(tmp_path: Path):
    head = common.environment(1) | {"command": "benchmarks.peers", "load_average_1min": 7.0}
    spread = {"p20": 1.0, "p50": 2.5, "p80": 3.0}
    time = {"kind": "time", "candidate": "pixelrag", "seconds": spread, "cpu_seconds": spread}
    time |= {"ours_over_this": {"wall": spread, "cpu": spread}, "gradient_error": 2e-7}
    memory = {"kind": "memory", "candidate": "pixelrag", "above_base_mib": 601, "peak_mib": 1015}
    path = tmp_path / "peers.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (head, time, memory)))
    page = report.summary(tmp_path)
    assert "| pixelrag | 2.5 (1 to 3) | 2.5 (1 to 3) |" in page
    assert "| 601 | 1015 | 2e-07 |" in page
    assert "Other work was running" in page
    assert "gradcache_cost" not in page  # no file, no section


def test_the_committed_summary_is_that_of_the_committed_files():
    assert (common.RESULTS / "summary.md").read_text() == report.summary(common.RESULTS)
