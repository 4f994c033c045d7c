"""`pixelrag bench`: runs suites on this machine, and reports what was measured."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pixelrag.bench.rows import Row, name_of, write_rows
from pixelrag.bench.suite import SUITES, Plan, load_plan
from pixelrag.config.help import help_text
from pixelrag.console import say
from pixelrag.errors import ConfigError

OWN = {
    "profile": "sizes: cpu-smoke, h200 or b200, or a profile of your own file",
    "output": "folder for NAME.jsonl and NAME.csv (default bench)",
    "only": "KEY=VALUE,... of the cases to run; short for --run.only",
    "dry-run": "say what would run, and run nothing",
}
# Peers have an environment of their own.
EVERY = [name for name in SUITES if name != "peers"]
USAGE = f"""\
usage: pixelrag bench SUITE [--profile NAME] [--output DIR] [--only KEY=VALUE,...] [--dry-run]
                      [--SECTION.OPTION VALUE ...]
       pixelrag bench --report DIR_OR_FILE ... [--previous DIR_OR_FILE ...] [--output DIR]

Measures speed and memory on this machine. SUITE is a YAML file of your own, all (every suite but
peers), or one of {", ".join(SUITES)}.

{chr(10).join(f"  --{name:<9} {text}" for name, text in OWN.items())}
  --report    make report.html and report.md of results, in the folder of --output (default .)
  --previous  results to compare them with, of the same hardware

  pixelrag bench SUITE --help   the settings of a suite
"""


def main(argv: Sequence[str]) -> int:
    """Run a suite or make a report; returns the exit code.

    Raises:
        ConfigError: the command line or a suite's file is wrong.
        DataError: results cannot be read or written, or are of unlike hardware.
    """
    words = list(argv)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0 if words else ConfigError.exit_code
    if any(word.startswith("--report") for word in words):
        return _report(words)
    name, *words = words
    if name.startswith("-"):
        raise ConfigError(f"bench: got {name!r}, expected a suite first: {', '.join(SUITES)}, all")
    words, own = _own_flags(words)
    plans = [
        load_plan(suite, own.get("profile"), _with_only(words, own))
        for suite in (EVERY if name == "all" else [name])
        if "--help" not in words and "-h" not in words
    ]
    if not plans:
        if name not in SUITES:
            raise ConfigError(f"bench --help: got {name!r}, expected one of {', '.join(SUITES)}")
        about = SUITES[name].config_class()
        sys.stdout.write(help_text(f"pixelrag bench {name}", about.__doc__ or "", about, OWN))
        return 0
    command = shlex.join(["pixelrag", "bench", *argv])
    load_average = os.getloadavg()[0]  # before this command's own work adds to it
    for plan in plans:
        if "dry-run" in own:
            _tell(plan)
        else:
            _run(plan, Path(own.get("output", "bench")), command, load_average)
    return 0


def _tell(plan: Plan) -> None:
    groups = plan.groups()
    say(f"{plan.title} {plan.profile}: {sum(map(len, groups))} cases")
    for group in groups:
        say("  " + "\n  ".join(map(name_of, group)))


def _run(plan: Plan, folder: Path, command: str, load_average: float) -> None:
    from pixelrag.bench.machine import this_run
    from pixelrag.distributed.env import choose_device

    run = this_run(
        choose_device(plan.config.run.device, 0), profile=plan.profile, command=command,
        config_hash=plan.config_hash, threads=plan.config.run.threads, load_average=load_average,
    )  # fmt: skip
    title = f"{plan.title}-{plan.profile}" if plan.profile else plan.title
    rows: list[Row] = []
    measure = SUITES[plan.name].workload().measure
    for group in plan.groups():
        for row in measure(plan.config, group):
            rows.append(replace(row, run=run))
            say(line_of(row))
            # What is measured is kept, whatever becomes of the rest.
            write_rows(folder, title, rows)
    say(f"{folder / title}.jsonl: {len(rows)} rows")


def line_of(row: Row) -> str:
    """What a terminal shows of a row."""
    said = [f"{row.suite}  {row.name}"]
    if row.skipped:
        return f"{said[0]}  skipped: {row.skipped}"
    if row.seconds is not None:
        said.append(f"{row.seconds} s")
    if row.tokens_per_second is not None:
        said.append(f"{row.tokens_per_second:,.0f} tokens/s")
    if row.mfu is not None:
        said.append(f"MFU {row.mfu:.1%}")
    if row.added_mib is not None:
        said.append(f"+{row.added_mib:,.0f} MiB")
    said += [f"{name} {value:.4g}" for name, value in row.figures.items()]
    return "  ".join(said)


def _own_flags(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command's own flags taken out."""
    kept: list[str] = []
    own: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        flag, equals, text = word.partition("=")
        name = flag.removeprefix("--").replace("_", "-")
        if not word.startswith("--") or name not in OWN:
            kept.append(word)
        elif name == "dry-run":
            own[name] = "true"
        else:
            value = text if equals else next(rest, "")
            if not value or (not equals and value.startswith("--")):
                raise ConfigError(f"--{name}: got nothing, expected a value after it")
            own[name] = value
    return kept, own


def _with_only(words: list[str], own: dict[str, str]) -> list[str]:
    return [*words, f"--run.only={own['only']}"] if "only" in own else words


def _report(words: list[str]) -> int:
    from pixelrag.bench.report import write_report

    lists: dict[str, list[Path]] = {"report": [], "previous": [], "output": []}
    current: list[Path] | None = None
    for word in words:
        flag, equals, text = word.partition("=")
        if word.startswith("--"):
            name = flag.removeprefix("--")
            if name not in lists:
                raise ConfigError(f"bench: {flag} does not go with --report; see pixelrag bench -h")
            current = lists[name]
            current += [Path(text)] if equals else []
        elif current is None:
            raise ConfigError(f"bench: got {word!r} before --report, expected no suite with it")
        else:
            current.append(Path(word))
    if not lists["report"]:
        raise ConfigError("--report: got nothing, expected folders or files of results")
    if len(lists["output"]) > 1:
        raise ConfigError(f"--output: got {len(lists['output'])} folders, expected one")
    folder = lists["output"][0] if lists["output"] else Path(".")
    for path in write_report(folder, lists["report"], lists["previous"]):
        say(str(path))
    return 0
