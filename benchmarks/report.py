"""Turns the JSONL files of a run into the tables of `benchmarks/results/summary.md`.

    python -m benchmarks.report

Every figure there is one that a file holds; nothing is typed by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS

Rows = list[dict[str, Any]]


def read(path: Path) -> Rows:
    """The objects of a result file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def of_kind(rows: Rows, kind: str) -> Rows:
    """The rows of one kind."""
    return [row for row in rows if row["kind"] == kind]


def table(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A markdown table, its first column to the left and the others to the right."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [head, rule, *lines])


def _percentiles(values: dict[str, float]) -> str:
    return f"{values['p50']:.3g} ({values['p20']:.3g} to {values['p80']:.3g})"


def conditions(rows: Rows) -> str:
    """One paragraph: what ran, where, and how busy the machine was."""
    (head,) = of_kind(rows, "environment")
    versions = ", ".join(f"{name} {v}" for name, v in head["versions"].items() if v)
    busy = ""
    if head["load_average_1min"] > 0.5:
        busy = " **Other work was running**: trust ratios and processor seconds, not the clock."
    return (
        f"`python -m {head['command']}`, {head['date']}, {head['cpu']} with {head['cores']} cores, "
        f"{head['threads']} torch thread(s) a process; {versions}. Load average at the start: "
        f"{head['load_average_1min']}.{busy}"
    )


def gradcache_cost(rows: Rows) -> str:
    """Times and memory of `benchmarks.gradcache_cost`."""
    compared = {"gradcache_over_this": ("gradcache / this", "the same, cpu")}
    if all("over_plain" in row for row in of_kind(rows, "time")):
        compared["over_plain"] = ("this / plain", "that, cpu")
    times = [
        (
            row["way"],
            row["batch"],
            _percentiles(row["seconds"]),
            _percentiles(row["cpu_seconds"]),
            *(_percentiles(row[key][clock]) for key in compared for clock in ("wall", "cpu")),
        )
        for row in of_kind(rows, "time")
    ]
    memory = [
        (row["way"], row["batch"], row["above_base_mib"], row["peak_mib"])
        for row in of_kind(rows, "memory")
    ]
    head = (
        "way",
        "batch",
        "seconds",
        "cpu seconds",
        *(w for pair in compared.values() for w in pair),
    )
    return "\n\n".join(
        [table(head, times), table(("way", "batch", "MiB above base", "peak MiB"), memory)]
    )


def peers(rows: Rows) -> str:
    """Times and memory of `benchmarks.peers`."""
    memory = {row["candidate"]: row for row in of_kind(rows, "memory")}
    unmeasured = {"above_base_mib": "not run", "peak_mib": "not run"}
    lines = [
        (
            row["candidate"],
            _percentiles(row["seconds"]),
            _percentiles(row["cpu_seconds"]),
            _percentiles(row["ours_over_this"]["wall"]),
            _percentiles(row["ours_over_this"]["cpu"]),
            memory.get(row["candidate"], unmeasured)["above_base_mib"],
            memory.get(row["candidate"], unmeasured)["peak_mib"],
            f"{row['gradient_error']:.0e}",
        )
        for row in of_kind(rows, "time")
    ]
    head = ("candidate", "seconds", "cpu seconds", "ours / this", "the same, cpu")
    return table((*head, "MiB above base", "peak MiB", "gradient error"), lines)


def communication(rows: Rows) -> str:
    """Steps over the slow link, and how many times faster the deferred ones are."""
    lines = [
        (
            f"{row['engine']} {row['grad_sync']} {row['params']}",
            _percentiles(row["seconds"]),
            _percentiles(row["cpu_seconds"]),
            row["wire_mib"],
            row["sent_mib"],
        )
        for row in of_kind(rows, "case")
    ]
    gains = [(row["fast"], row["slow"], row["times"]) for row in of_kind(rows, "speed-up")]
    head = ("case", "seconds", "cpu seconds", "MiB to send", "MiB sent")
    return "\n\n".join([table(head, lines), table(("case", "over", "times faster"), gains)])


def kd_loss(rows: Rows) -> str:
    """Time, memory and gradient errors of `benchmarks.kd_loss`."""
    summaries = of_kind(rows, "summary")
    first = summaries[0]["candidate"] if summaries else ""
    costs = [
        (
            row["candidate"],
            f"{row['cpu']:.1f}",
            f"{row['wall']:.1f}",
            f"{row['added_mib']:,.0f}",
            *(f"{row[f'{key}_to_{first}']:.3f}" for key in ("cpu", "wall", "added_mib")),
        )
        for row in summaries
    ]
    head = ("candidate", "cpu seconds", "seconds", "MiB added")
    parts = [table((*head, *(f"{key} / {first}" for key in ("cpu", "wall", "MiB"))), costs)]
    errors = of_kind(rows, "error")
    if errors:
        names = [name for name in errors[0] if name not in ("kind", "ce_weight", "loss", "kl")]
        cases = [f"KL {row['kl']:.2g} alone" if "kl" in row else "the mixture" for row in errors]
        lines = [(name, *(f"{row[name]:.2g}" for row in errors)) for name in names]
        parts.append(table(("gradient error", *cases), lines))
    return "\n\n".join(parts if summaries else parts[1:])


def packing(rows: Rows) -> str:
    """Tokens a processor second of `benchmarks.packing`."""
    runs = [
        (
            row["way"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['step_seconds']:.2f}",
            f"{row['peak_gib']:.2f}",
        )
        for row in of_kind(rows, "run")
    ]
    (total,) = of_kind(rows, "summary")
    head = ("way", "tokens a second", "seconds a step", "peak GiB")
    ratios = [
        f"{key.removeprefix('packed_over_')} {value:.2f}"
        for key, value in total.items()
        if key.startswith("packed_over_")
    ]
    shape = f"{total['rows']} rows of {total['row_length']:,} tokens"
    return f"{shape}.\n\n{table(head, runs)}\n\nPacked over: {', '.join(ratios)}."


def rag_refresh(rows: Rows) -> str:
    """Steps beside a refresh, indexes and memory of `benchmarks.rag_refresh`."""
    steps = [
        (
            row["ranks"],
            _percentiles(row["alone_seconds"]),
            _percentiles(row["beside_seconds"]),
            f"{row['ratio']:.2f}",
        )
        for row in of_kind(rows, "steps")
        if "ratio" in row
    ]
    indexes = [
        (
            f"{row['type']} ({row['factory']})",
            f"{row['vectors']:,}",
            row["build_cpu_seconds"],
            row["query_cpu_ms"],
            row["recall"],
        )
        for row in of_kind(rows, "index")
    ]
    memory = [
        (
            row["type"],
            *(row[f"{n}_mib"] for n in ("file", "one_private", "two_private", "two_mapped")),
        )
        for row in of_kind(rows, "memory")
    ]
    return "\n\n".join(
        [
            table(("ranks", "step alone, s", "beside a refresh, s", "ratio"), steps),
            table(("index", "vectors", "build, cpu s", "cpu ms a query", "recall@10"), indexes),
            table(("index", "file MiB", "one: private", "two: private", "two: mapped"), memory),
        ]
    )


def tiled_loss(rows: Rows) -> str:
    """Time and memory of `benchmarks.tiled_loss`."""
    times = [
        (
            f"{row['loss']}, {row['way']}",
            row["batch"],
            row["dim"],
            _percentiles(row["seconds"]),
            _percentiles(row["cpu_seconds"]),
            _percentiles(row["tiled_over_this"]["wall"]),
            _percentiles(row["tiled_over_this"]["cpu"]),
        )
        for row in of_kind(rows, "time")
    ]
    head = ("loss", "batch", "D", "seconds", "cpu seconds", "tiled / this", "the same, cpu")
    parts = [table(head, times)]
    parts += [
        f"{row['loss']}: tiled differs from plain by {row['loss_error']:.0e} in the loss and "
        f"{row['gradient_error']:.0e} in the gradients (relative L2, the worst of them)."
        for row in of_kind(rows, "difference")
    ]
    parts += [
        f"{row['batch']:,} queries and documents at D = {row['dim']}: {row['added_mib']:,} MiB "
        f"above the embeddings ({row['embeddings_mib']:,} MiB); the matrix alone would be "
        f"{row['matrix_mib']:,} MiB. {row['seconds']} seconds."
        for row in of_kind(rows, "memory")
    ]
    return "\n\n".join(parts)


SECTIONS: dict[str, Callable[[Rows], str]] = {
    "gradcache_cost": gradcache_cost,
    "peers": peers,
    "communication": communication,
    "kd_loss": kd_loss,
    "packing": packing,
    "rag_refresh": rag_refresh,
    "tiled_loss": tiled_loss,
}


def summary(folder: Path) -> str:
    """The whole page, from those files that are there: NAME.jsonl, or NAME-CASE.jsonl."""
    parts = ["# Measured", "Medians, with the 20th and 80th percentile."]
    for name, section in SECTIONS.items():
        for path in sorted([*folder.glob(f"{name}.jsonl"), *folder.glob(f"{name}-*.jsonl")]):
            rows = read(path)
            parts += [f"## {path.stem}", conditions(rows), section(rows)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (RESULTS / "summary.md").write_text(summary(RESULTS), encoding="utf-8")
