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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel

from benchmarks import common, netns
from pixelrag.bench.engine import Counted, make_chunks, make_step, summarise
from pixelrag.bench.memory import MIB
from pixelrag.bench.models import adamw
from pixelrag.bench.timing import Spread, Taken, interleaved
from pixelrag.config.bench import EngineWork
from pixelrag.distributed.env import World, process_group
from pixelrag.distributed.spawn import run_workers
from pixelrag.engine import build_engine
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
        ``wall`` and ``cpu``, seconds of each measured step, and ``figures``: ``sent_mib`` a step as
        the kernel counted it, and what one further step issued.
    """
    case = Case(**payload["case"])
    engine = _engine(case, small_bert())
    sizes = EngineWork(chunks=payload["chunks"], rows=ROWS, tokens=TOKENS)
    sides = [
        make_chunks(sizes, VOCABULARY, 2 * world.rank + side, torch.device("cpu"))
        for side in (0, 1)
    ]
    step = make_step(engine, *sides)
    for _ in range(payload["warmup"]):
        step()
    sent = _sent(payload["interface"])
    taken = interleaved({"": step}, rounds=payload["steps"], warmup=0)[""]
    sent = _sent(payload["interface"]) - sent
    counted = Counted(engine)
    make_step(counted, *sides)()
    figures = summarise(counted, world.world_size)
    if payload["interface"]:
        figures["sent_mib"] = round(sent / max(1, payload["steps"]) / MIB, 2)
    return {**asdict(taken), "figures": figures}


def _engine(case: Case, module: BiEncoder) -> Any:
    blocks = module.encoder.blocks()
    if case.grad_sync == "stock":
        from benchmarks.stock import StockFSDP2, StockZero3

        kind = {"zero3": StockZero3, "fsdp2": StockFSDP2}[case.engine]
        return kind(module, adamw, blocks)
    return build_engine(
        module,
        adamw,
        name=case.engine,
        device=torch.device("cpu"),
        blocks=blocks,
        grad_sync=case.grad_sync,
        params=case.params,
    )


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


def speed_ups(seconds: Mapping[Case, float]) -> dict[Case, dict[str, float]]:
    """How many times faster each deferred + resident case is than each that defers nothing."""
    fast = [c for c in seconds if (c.grad_sync, c.params) == ("deferred", "resident")]
    slow = [
        c
        for c in seconds
        if c.grad_sync == "stock" or (c.grad_sync, c.params) == ("per_chunk", "sharded")
    ]
    return {
        quick: {f"times_faster_than {lazy.name}": seconds[lazy] / seconds[quick] for lazy in slow}
        for quick in fast
    }


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
    common.add_output(parser)
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker is not None:
        worker(arguments.worker)
    if arguments.chunks < 2 or arguments.chunks % 2:
        parser.error("--chunks: half of them are queries, so an even number of at least 2")
    lacking = None if arguments.count else netns.missing_requirement()
    if lacking:
        parser.error(f"{lacking}; --count needs none of this")
    results = common.Results("communication", arguments, 1)
    payload = {"chunks": arguments.chunks, "warmup": 2, "steps": 0, "interface": None}
    if arguments.count:
        for case in _chosen(ALL, arguments.only):
            result = run_workers(
                "benchmarks.communication:measure",
                payload | {"case": asdict(case)},
                nproc=WORLD_SIZE,
                device="cpu",
            )[0]
            results.add(asdict(case), figures=result["figures"])
        return
    # So that the namespaces go even where a supervisor ends this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    payload |= {"warmup": arguments.warmup, "steps": arguments.steps, "interface": "eth0"}
    found: dict[Case, dict[str, Any]] = {}
    for case in _chosen(ALL if arguments.only else TIMED, arguments.only):
        with netns.hosts(WORLD_SIZE, rate_mbit=arguments.rate_mbit) as hosts:
            case_payload = payload | {"case": asdict(case)}
            found[case] = run_on_hosts(hosts, case_payload, timeout_seconds=300)
        print(f"{case.name}: {Spread.of(found[case]['wall'])} s", flush=True)
    gains = speed_ups({case: Spread.of(result["wall"]).p50 for case, result in found.items()})
    for case, result in found.items():
        figures = result["figures"] | {k: round(v, 2) for k, v in gains.get(case, {}).items()}
        results.add(asdict(case), Taken(result["wall"], result["cpu"]), figures)


if __name__ == "__main__":
    main()
