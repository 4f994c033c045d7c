"""The demo's figures, as lines to print and as numbers to keep."""

from __future__ import annotations

import json
from pathlib import Path

_SHOWN = {"recall@1": "recall@1", "recall@10": "recall@10", "mrr": "MRR"}


def retrieval_table(before: Path, after: Path) -> tuple[list[str], dict]:
    """Compare two files of ``pixelrag eval --output`` over the same queries.

    Returns:
        Lines of a table, with the paired 95 % bootstrap interval of each change, and the numbers.
    """
    # Here, so that the demo's --help needs no torch.
    from pixelrag.evaluate.compare import compare, read_measured

    old, new = (read_measured(path)["eval"] for path in (before, after))
    changes = compare(old, new)
    lines = [f"{'':10} before   after    change   95 % paired interval"]
    results: dict = {}
    for name, label in _SHOWN.items():
        found = changes[name]
        interval = [found.change.low, found.change.high]
        results[name] = {"before": found.baseline, "after": found.value, "interval": interval}
        lines.append(
            f"{label:10} {found.baseline:.4f}   {found.value:.4f}   "
            f"{found.change.mean:+.4f}  {interval[0]:+.4f} to {interval[1]:+.4f}"
        )
    rose = results["recall@1"]["interval"][0] > 0
    verdict = "rose beyond" if rose else "did not rise beyond"
    lines.append(f"held-out recall@1 over {len(new.queries)} queries {verdict} its paired interval")
    return lines, results


def tiles_verdict(metrics: Path, num_eval: int) -> tuple[list[str], dict]:
    """Read a run's metrics: did the loss fall, and does held-out accuracy beat chance?"""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    accuracy = next(row["eval/accuracy"] for row in reversed(rows) if "eval/accuracy" in row)
    chance = 1.0 / num_eval
    results = {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "accuracy": accuracy,
        "chance": chance,
    }
    return [
        f"training loss {losses[0]:.2f} (mean of the first steps logged) -> {losses[-1]:.2f}; "
        f"held-out accuracy among {num_eval} pages {accuracy:.3f}, chance {chance:.3f}"
    ], results


def distill_table(metrics: Path) -> tuple[list[str], dict]:
    """Compare the evaluations before the first step and after the last one of a distillation run.

    Returns:
        Lines of a table, and the numbers.
    """
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    evaluations = [row for row in rows if "eval/loss" in row]
    first, last = evaluations[0], evaluations[-1]
    lines = [f"{'held out':26} before   after"]
    results = {}
    for name, label in (
        ("eval/ce_loss", "cross entropy"),
        ("eval/kd_loss", "KL to the teacher (x T^2)"),
        ("eval/agreement", "same top token"),
    ):
        lines.append(f"{label:26} {first[name]:.4f}  {last[name]:.4f}")
        results[name.removeprefix("eval/")] = {"before": first[name], "after": last[name]}
    return lines, results
