"""`pixelrag verify`: checks on this machine that every engine gives the full-batch gradient."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pixelrag.arguments import Parser
from pixelrag.console import say
from pixelrag.verify.cases import BARS, ENGINES, MODALITIES, Case, build_matrix

WORKER = "pixelrag.verify.worker:run_cases"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command's own options."""
    parser = Parser(
        prog="pixelrag verify",
        description="Compare the gradients of every engine with one float64 process that holds "
        "the whole global batch. Exit code 1 where a case misses its bar.",
    )
    parser.add_argument(
        "--engine", action="extend", nargs="+", choices=ENGINES, metavar="E",
        help=f"engines to check, out of {', '.join(ENGINES)}; default all",
    )  # fmt: skip
    parser.add_argument("--nproc", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument("--quick", action="store_true", help="a ninth of the matrix")
    parser.add_argument(
        "--grad-sync", choices=("auto", "deferred", "per_chunk"), default="auto",
        help="as engine.grad_sync (default auto)",
    )  # fmt: skip
    parser.add_argument(
        "--params", choices=("auto", "resident", "sharded"), default="auto",
        help="as engine.params (default auto; sharded is for zero3 and fsdp2)",
    )  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object a case")
    parser.add_argument(
        "--timeout", type=float, default=1800, help="seconds an engine may take (default 1800)"
    )
    options = parser.parse_args(list(argv))
    if options.nproc < 1:
        parser.error(f"--nproc: got {options.nproc}, expected at least 1")
    engines = options.engine or [
        e for e in ENGINES if options.params != "sharded" or e in ("zero3", "fsdp2")
    ]
    unable = [e for e in engines if options.params == "sharded" and e not in ("zero3", "fsdp2")]
    if unable:
        parser.error(f"--params: sharded, but {', '.join(unable)} replicates parameters")
    options.engine = list(dict.fromkeys(engines))
    return options


def main(argv: Sequence[str]) -> int:
    """Run the matrix; returns the exit code."""
    options = parse(argv)
    started = time.monotonic()
    run = _in_place if "WORLD_SIZE" in os.environ else _spawned
    outcomes = run(options)
    failed = [o for o in outcomes if not o["passed"]]
    if not options.json and _is_main():
        say(_summary(outcomes, failed, time.monotonic() - started))
    return 1 if failed else 0


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _payload(cases: list[Case], options: argparse.Namespace, folder: str) -> dict:
    return {
        "folder": folder,
        "cases": [asdict(case) for case in cases],
        "grad_sync": options.grad_sync,
        "params": options.params,
    }


def _spawned(options: argparse.Namespace) -> list[dict]:
    """Start processes, one group of them an engine, so that engines cannot disturb each other."""
    from pixelrag.distributed.spawn import run_workers
    from pixelrag.verify.inputs import write_inputs

    outcomes = []
    with tempfile.TemporaryDirectory(prefix="pixelrag-verify-") as folder:
        write_inputs(Path(folder))
        for engine in options.engine:
            cases = build_matrix([engine], quick=options.quick)
            by_rank = run_workers(
                WORKER,
                _payload(cases, options, folder),
                nproc=options.nproc,
                timeout_seconds=options.timeout,
                device=options.device,
            )
            _print(by_rank[0], as_json=options.json)
            outcomes += by_rank[0]
    return outcomes


def _in_place(options: argparse.Namespace) -> list[dict]:
    """Under a launcher this process is one rank already."""
    from pixelrag.distributed.env import process_group
    from pixelrag.verify.inputs import write_inputs
    from pixelrag.verify.worker import run_cases

    outcomes = []
    with tempfile.TemporaryDirectory(prefix="pixelrag-verify-") as own:
        # Every rank writes its own, as hosts need not share a folder; and before the group is
        # there, since transformers then saves on rank 0 only.
        write_inputs(Path(own))
        with process_group(options.device, options.timeout) as world:
            for engine in options.engine:
                cases = build_matrix([engine], quick=options.quick)
                found = run_cases(world, _payload(cases, options, own))
                _print(found, as_json=options.json)
                outcomes += found
    return outcomes


def _print(outcomes: list[dict], *, as_json: bool) -> None:
    if not _is_main():
        return
    for outcome in outcomes:
        if as_json:
            say(json.dumps(outcome))
            continue
        case = Case(**{name: outcome[name] for name in Case.__slots__})
        say(
            f"{'ok  ' if outcome['passed'] else 'MISS'} {case.label()} "
            f"error {outcome['relative_error']:.1e}  norm ratio 1{outcome['norm_ratio'] - 1:+.1e}  "
            f"temperature {outcome['temperature_error']:.1e}  "
            f"{outcome['num_reductions']} gradient reductions for {outcome['num_chunks']} chunks, "
            f"{outcome['num_collectives']} collectives"
        )
        for problem in outcome["problems"]:
            say(f"     {problem}")


def _summary(outcomes: list[dict], failed: list[dict], seconds: float) -> str:
    worst = max(outcomes, key=lambda o: o["relative_error"] / BARS[o["precision"]])
    count = (
        f"{len(outcomes)} cases over {len(MODALITIES)} modalities in {seconds:.0f} s; "
        f"largest gradient error {worst['relative_error']:.1e} ({worst['engine']}, "
        f"{worst['precision']})"
    )
    if not failed:
        return f"Every case gives the full-batch gradient: {count}."
    engines = ", ".join(sorted({o["engine"] for o in failed}))
    return (
        f"{len(failed)} cases miss the full-batch gradient, on {engines}: {count}. "
        "Do not train with these engines on this machine; the lines marked MISS say what is off."
    )
