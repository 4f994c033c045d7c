"""`pixelrag launch-check`: every rank reports, and what must not differ is compared."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pixelrag.arguments import Parser

if TYPE_CHECKING:
    from pixelrag.launch_check.probe import Report


# Beyond this, timeouts and log lines of two hosts cannot be compared.
MAX_SKEW_MS = 1000.0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command's own options."""
    parser = Parser(
        prog="pixelrag launch-check",
        description="Start it under the launcher of the run: every rank reports host, device, "
        "driver, versions, free memory, clock, the paths it sees, and the cost of collectives. "
        "Exit code 6 where versions, drivers or files differ.",
    )
    parser.add_argument(
        "--path", action="append", default=[], metavar="PATH",
        help="a file or folder that every rank must see alike (data, models); may be repeated",
    )  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--message-mib", type=int, default=64, metavar="N",
        help="size of the large message (default 64)",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=120, help="seconds (default 120)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a rank")
    options = parser.parse_args(list(argv))
    if options.message_mib < 1:
        parser.error(f"--message-mib: got {options.message_mib}, expected at least 1")
    return options


def main(argv: Sequence[str]) -> int:
    """Probe and compare; returns the exit code.

    Raises:
        EngineError: a rank is missing, or versions, drivers or files differ; on every rank.
    """
    options = parse(argv)
    # Here, so that --help needs no torch.
    from pixelrag.distributed.collectives import gather_objects, told_by_main
    from pixelrag.distributed.env import process_group
    from pixelrag.distributed.together import together
    from pixelrag.errors import EngineError
    from pixelrag.launch_check.probe import probe

    sizes = (8, options.message_mib << 20)
    with process_group(options.device, options.timeout) as world:
        with together():
            own = probe(world, options.path, sizes)
        reports = gather_objects(own)
    if world.is_main:
        lines = (
            [json.dumps(report.to_json()) for report in reports]
            if options.json
            else table(reports, sizes)
        )
        sys.stdout.write("\n".join(lines) + "\n")
    problems = differences(reports)
    if problems:
        raise told_by_main(
            EngineError("the ranks are not alike:\n" + "\n".join(f"  {text}" for text in problems))
        )
    return 0


def _package(report: Report, name: str) -> str:
    return report.packages[name]


def _seen(report: Report, path: str) -> str:
    return report.paths[path] or "not there"


def differences(reports: Sequence[Report]) -> list[str]:
    """What must be equal on all ranks and is not, or is missing; empty when a run can start."""
    compared: dict[str, Callable[[Report], str]] = {
        "python": lambda r: r.python,
        "driver": lambda r: r.driver,
    }
    for name in reports[0].packages:
        compared[f"package {name}"] = partial(_package, name=name)
    problems = []
    for what, value_of in compared.items():
        groups = _grouped(reports, value_of)
        if len(groups) > 1:
            problems.append(f"{what}: {_told(groups)}; install the same everywhere")
    for path in reports[0].paths:
        groups = _grouped(reports, partial(_seen, path=path))
        if list(groups) == ["not there"]:
            problems.append(f"{path}: no rank sees it; is the path right, the disk mounted?")
        elif len(groups) > 1:
            problems.append(
                f"{path}: {_told(groups)}; expected the same content on all hosts, a shared "
                "disk or an equal copy"
            )
    problems += [
        f"clock of rank {r.rank} on {r.host} is {r.clock_skew_ms / 1000:+.1f} s off rank 0's; "
        "run a time service on every host"
        for r in reports
        if abs(r.clock_skew_ms) > MAX_SKEW_MS
    ]
    places = _grouped(reports, lambda r: f"{r.host} {r.device}" if "cuda" in r.device else "")
    problems += [
        f"{place}: ranks {', '.join(map(str, ranks))} share it; start one process a device"
        for place, ranks in places.items()
        if place and len(ranks) > 1
    ]
    return problems


def table(reports: Sequence[Report], sizes: Sequence[int]) -> list[str]:
    """Lines for a person: what all ranks share, then a row a rank."""
    small, large = sizes
    first = reports[0]
    versions = ", ".join(f"{n} {v}" for n, v in first.packages.items())
    slowest = max(r.collectives[large] for r in reports)
    world = len(reports)
    # What a ring all-reduce makes each rank send.
    sent = 2 * large * (world - 1) / world
    rate = "" if world == 1 else f", {sent / slowest / 1e6:.2f} GB/s sent by each rank"
    lines = [
        f"{world} ranks on {len({r.host for r in reports})} hosts; rank 0: python {first.python}, "
        f"{versions}, driver {first.driver}",
        f"all-reduce: {max(r.collectives[small] for r in reports):.2f} ms for {small} bytes, "
        f"{slowest:.1f} ms for {large >> 20} MiB{rate}",
        f"{'rank':>4}  {'host':<20} {'device':<28} {'cores':>5} {'threads':>7} "
        f"{'free GiB':>8} {'clock ms':>8}",
    ]
    lines += [
        f"{r.rank:>4}  {r.host:<20.20} {r.device:<28.28} {r.cores:>5} {r.threads:>7} "
        f"{r.free_gib:>8.1f} {r.clock_skew_ms:>+8.1f}"
        for r in reports
    ]
    lines += [f"{path}: {first.paths[path] or 'not there'} (rank 0)" for path in first.paths]
    return lines


def _grouped(reports: Sequence[Report], value_of: Callable[[Report], str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for report in reports:
        groups.setdefault(value_of(report), []).append(report.rank)
    return groups


def _told(groups: dict[str, list[int]]) -> str:
    def ranks(found: list[int]) -> str:
        return ", ".join(map(str, found[:16])) + (", ..." if len(found) > 16 else "")

    return "; ".join(f"{value} on rank {ranks(found)}" for value, found in groups.items())
