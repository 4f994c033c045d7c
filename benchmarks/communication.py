"""What a step costs in collectives, bytes and, over a slow link, time: by engine and mode.

    python -m benchmarks.communication                # two namespaces, 400 Mbit; Linux, root
    python -m benchmarks.communication --count        # collectives and bytes only; anywhere

A step is one GradCache step over a small BERT: half of the chunks queries, half documents. The
rows are few, so that a step over the slow link is nearly all communication. Each case has two
fresh processes. `stock` cases are FSDP2 and ZeRO-3 without this project's engines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel

from benchmarks import common, netns
from pixelrag.distributed.counting import CollectiveCounter
from pixelrag.distributed.env import World, process_group
from pixelrag.distributed.spawn import run_workers
from pixelrag.engine import build_engine
from pixelrag.gradcache import gradcache_step
from pixelrag.models import Embedder
from pixelrag.models.biencoder import BiEncoder

# Few tokens: the step shall be communication, as a large model's is over a slow link.
ROWS, TOKENS, VOCABULARY = 2, 8, 500
WORLD_SIZE = 2
_GRACE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    engine: str
    grad_sync: str
    params: str

    @property
    def name(self) -> str:
        """As the results call it."""
        return f"{self.engine} {self.grad_sync} {self.params}"


STOCK = [Case("zero3", "stock", "stock"), Case("fsdp2", "stock", "stock")]
REPLICATED = [
    Case(engine, grad_sync, "resident")
    for engine in ("ddp", "zero0", "zero1", "zero2")
    for grad_sync in ("deferred", "per_chunk")
]
SHARDING = [
    Case(engine, grad_sync, params)
    for engine in ("zero3", "fsdp2")
    for grad_sync in ("deferred", "per_chunk")
    for params in ("resident", "sharded")
]
ALL = STOCK + REPLICATED + SHARDING
# Over the slow link zero0 and zero1 would repeat ddp and zero2.
TIMED = [case for case in ALL if case.engine not in ("zero0", "zero1")]


def small_bert() -> BiEncoder:
    """A bi-encoder of about 9 MB in fp32, every matrix of which ZeRO-3's defaults shard."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=320,  # 320 * 320 is just above DeepSpeed's persistence threshold of 100,000
        num_hidden_layers=2,
        num_attention_heads=5,
        intermediate_size=1024,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    return BiEncoder(Embedder(BertModel(config, add_pooling_layer=False), "mean")).train()


def measure(world: World, payload: dict[str, Any]) -> dict[str, Any]:
    """Run one case on this rank; the target of `run_workers`.

    Args:
        world: this process's place.
        payload: ``case`` (fields of `Case`), ``chunks`` (of a step, even), ``warmup``,
            ``steps`` (measured), and ``interface`` (whose sent bytes to read, or None).

    Returns:
        ``seconds`` and ``cpu_seconds`` of each measured step, ``sent_mib`` a step as the kernel
        counted it, and ``counted``: what one further step issued.
    """
    case = Case(**payload["case"])
    module = small_bert()
    engine = _engine(case, module)
    queries = _chunks(payload["chunks"] // 2, seed=2 * world.rank)
    documents = _chunks(payload["chunks"] // 2, seed=2 * world.rank + 1)
    positive_B = torch.arange(ROWS * len(queries))

    def step() -> None:
        gradcache_step(engine, queries, documents, positive_B)
        engine.step(common.MAX_NORM)

    for _ in range(payload["warmup"]):
        step()
    sent = _sent(payload["interface"])
    taken = common.interleaved({"step": step}, rounds=payload["steps"], warmup=0)["step"]
    sent = _sent(payload["interface"]) - sent
    counted = _Counted(engine)
    gradcache_step(counted, queries, documents, positive_B)
    counted.step(common.MAX_NORM)
    return {
        "seconds": taken.wall,
        "cpu_seconds": taken.cpu,
        "sent_mib": sent / max(1, payload["steps"]) / common.MIB,
        "counted": summarise(counted, world.world_size),
    }


class _Counted:
    """An engine whose own collectives are counted, and not those of the embeddings around it.

    Attributes:
        everything: all that the engine issued.
        backward_only: the part of it that reduces gradients, and not their norms.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.everything = CollectiveCounter()
        self.backward_only = CollectiveCounter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __call__(self, role: str, **batch: Any) -> Any:
        with self.everything:
            return self._engine(role, **batch)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        with self.everything, self.backward_only:
            self._engine.backward(loss, last=last)

    def step(self, max_norm: float | None) -> None:
        with self.everything:
            self._engine.step(max_norm)


def summarise(counted: _Counted, world_size: int) -> dict[str, Any]:
    """What an engine's collectives moved in one step.

    Returns:
        ``gathers`` and ``reductions`` (calls; of gradients, not of scalars), ``gathered_mib`` and
        ``reduced_mib`` (sizes of the whole tensors), ``wire_mib`` (what a rank must send for
        them: a gather or reduce-scatter of a whole of P bytes costs P (W-1)/W, an all-reduce
        twice that) and ``by_name`` (all calls).
    """
    everything, backward = counted.everything, counted.backward_only
    # The counter adds up both buffers, a whole and a shard of it.
    whole = world_size / (world_size + 1)
    gathers = {name: n for name, n in everything.calls.items() if "gather" in name}
    gathered = sum(everything.bytes[name] for name in gathers) * whole / common.MIB
    scattered = all_reduced = 0.0
    for name, size in backward.bytes.items():
        if "reduce_scatter" in name:
            scattered += size * whole / common.MIB
        elif "reduce" in name:
            all_reduced += size / common.MIB
    share = (world_size - 1) / world_size
    return {
        "gathers": sum(gathers.values()),
        "gathered_mib": round(gathered, 2),
        "reductions": backward.gradient_reductions,
        "reduced_mib": round(scattered + all_reduced, 2),
        "wire_mib": round((gathered + scattered + 2 * all_reduced) * share, 2),
        "by_name": dict(everything.calls),
    }


def _engine(case: Case, module: BiEncoder) -> Any:
    blocks = module.encoder.blocks()
    if case.grad_sync == "stock":
        from benchmarks.stock import StockFSDP2, StockZero3

        kind = {"zero3": StockZero3, "fsdp2": StockFSDP2}[case.engine]
        return kind(module, common.adamw, blocks)
    return build_engine(
        module,
        common.adamw,
        name=case.engine,
        device=torch.device("cpu"),
        blocks=blocks,
        grad_sync=case.grad_sync,
        params=case.params,
    )


def _chunks(count: int, *, seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    mask_BT = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    return [
        {
            "input_ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator),
            "attention_mask": mask_BT,
        }
        for _ in range(count)
    ]


def _sent(interface: str | None) -> int:
    return netns.sent_bytes(interface) if interface else 0


def run_on_hosts(
    hosts: Sequence[netns.Host], payload: dict[str, Any], *, timeout_seconds: float
) -> dict[str, Any]:
    """Run `measure` with one process a host; return rank 0's result.

    Raises:
        RuntimeError: a rank failed or time ran out; the message holds the ranks' output.
    """
    with tempfile.TemporaryDirectory(prefix="pixelrag-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        workers = []
        for rank, host in enumerate(hosts):
            output = stack.enter_context((folder / f"output{rank}.txt").open("w"))
            worker = subprocess.Popen(
                host.command(
                    sys.executable,
                    "-m",
                    "benchmarks.communication",
                    "--worker",
                    json.dumps(payload | {"result": str(folder / f"result{rank}.json")}),
                ),
                env=os.environ | _launcher_variables(hosts, rank),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            workers.append(worker)
            stack.callback(worker.wait)
            stack.callback(worker.kill)
        _wait(workers, timeout_seconds)
        codes = [worker.poll() for worker in workers]
        if codes != [0] * len(workers):
            said = [
                (folder / f"output{rank}.txt").read_text()[-3000:] for rank in range(len(hosts))
            ]
            raise RuntimeError(
                f"{payload['case']}: exit codes {codes} (None: still running after "
                f"{timeout_seconds:g} s)\n" + "\n".join(said)
            )
        return json.loads((folder / "result0.json").read_text(encoding="utf-8"))


def _launcher_variables(hosts: Sequence[netns.Host], rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_WORLD_SIZE": str(len(hosts)),  # they share this machine's memory
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": "29500",  # each case has a namespace's ports to itself
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }


def _wait(workers: Sequence[subprocess.Popen], timeout_seconds: float) -> None:
    """Until all have ended, or one failed and the others had a moment to fail by themselves."""
    deadline = time.monotonic() + timeout_seconds
    while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
        if any(worker.poll() not in (None, 0) for worker in workers):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(0.05)


def worker(payload: dict[str, Any]) -> None:
    """One rank of `run_on_hosts`; ends the process."""
    torch.set_num_threads(1)
    with process_group("cpu", 120) as world:
        result = measure(world, payload)
        Path(payload["result"]).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    # gloo's threads can abort a process in the interpreter's exit although all went well.
    os._exit(0)


def row_of(case: Case, result: dict[str, Any]) -> dict[str, Any]:
    """A case's line in the results."""
    row = {"kind": "case", **asdict(case), **result["counted"]}
    if result["seconds"]:
        row |= {
            "seconds": common.spread(result["seconds"]),
            "cpu_seconds": common.spread(result["cpu_seconds"]),
            "steps": len(result["seconds"]),
            "sent_mib": round(result["sent_mib"], 2),
        }
    return row


def speed_ups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times faster each deferred + resident case is than each that defers nothing."""
    timed = {(r["engine"], r["grad_sync"], r["params"]): r["seconds"]["p50"] for r in rows}
    fast = {key: s for key, s in timed.items() if key[1:] == ("deferred", "resident")}
    slow = {k: s for k, s in timed.items() if k[1] == "stock" or k[1:] == ("per_chunk", "sharded")}
    return [
        {
            "kind": "speed-up",
            "fast": " ".join(quick),
            "slow": " ".join(lazy),
            "times": round(slow[lazy] / fast[quick], 2),
        }
        for quick in fast
        for lazy in slow
    ]


def _chosen(cases: Sequence[Case], names: Sequence[str] | None) -> list[Case]:
    return [case for case in cases if names is None or case.name in names]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the cases and write them down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.communication")
    parser.add_argument("--count", action="store_true", help="count only, no link and no times")
    parser.add_argument("--chunks", type=int, default=12, help="chunks of a step, even")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those")
    parser.add_argument("--rate-mbit", type=int, default=400, help="what a host may send")
    names = [case.name for case in ALL]
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=f"of {names}")
    parser.add_argument("--output", type=Path, help="JSONL file to write")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker is not None:
        worker(arguments.worker)
    if arguments.chunks < 2 or arguments.chunks % 2:
        parser.error("--chunks: half of them are queries, so an even number of at least 2")
    lacking = None if arguments.count else netns.missing_requirement()
    if lacking:
        parser.error(f"{lacking}; --count needs none of this")
    results = common.Results(arguments.output, 1, ["benchmarks.communication", *sys.argv[1:]])
    size = sum(p.numel() for p in small_bert().parameters()) * 4 / common.MIB
    settings = {"parameters_mib": round(size, 2), "chunks": arguments.chunks, "ranks": WORLD_SIZE}
    payload = {"chunks": arguments.chunks, "warmup": 2, "steps": 0, "interface": None}
    if arguments.count:
        results.add({"kind": "workload", **settings})
        for case in _chosen(ALL, arguments.only):
            result = run_workers(
                "benchmarks.communication:measure",
                payload | {"case": asdict(case)},
                nproc=WORLD_SIZE,
                device="cpu",
            )[0]
            results.add(row_of(case, result))
        return
    # So that the namespaces go even where a supervisor ends this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    results.add({"kind": "workload", **settings, "rate_mbit": arguments.rate_mbit})
    payload |= {"warmup": arguments.warmup, "steps": arguments.steps, "interface": "eth0"}
    rows = []
    for case in _chosen(ALL if arguments.only else TIMED, arguments.only):
        with netns.hosts(WORLD_SIZE, rate_mbit=arguments.rate_mbit) as hosts:
            case_payload = payload | {"case": asdict(case)}
            result = run_on_hosts(hosts, case_payload, timeout_seconds=300)
        rows.append(row_of(case, result))
        results.add(rows[-1])
    for row in speed_ups(rows):
        results.add(row)


if __name__ == "__main__":
    main()
