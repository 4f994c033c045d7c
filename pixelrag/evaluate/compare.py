"""`pixelrag compare`: a paired test between two measurements of the same queries."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pixelrag.errors import DataError
from pixelrag.evaluate.bootstrap import Interval, paired_bootstrap, randomization_test
from pixelrag.evaluate.ranking import per_query_metrics
from pixelrag.evaluate.runs import Qrels, ranks_of, read_qrels, read_run


@dataclass(frozen=True, slots=True)
class Measured:
    """Every query's figures: name -> one value a query, in the order of ``queries`` (their ids)."""

    queries: list[str]
    per_query: Mapping[str, Sequence[float] | np.ndarray]


@dataclass(frozen=True, slots=True)
class Difference:
    """How one figure differs between two measurements of the same queries.

    Attributes:
        baseline, value: means over the queries.
        change: mean of value - baseline with its paired 95 % bootstrap interval.
        p_value: of `randomization_test`; not corrected for looking at several figures.
    """

    baseline: float
    value: float
    change: Interval
    p_value: float


def compare(baseline: Measured, new: Measured) -> dict[str, Difference]:
    """Compare every figure that both have, query by query, whatever their order.

    Raises:
        DataError: the queries are not the same, or no figure is common.
    """
    unlike = set(baseline.queries) ^ set(new.queries)
    if unlike:
        raise DataError(
            f"{len(unlike)} queries were measured on one side only, first {min(unlike)!r} "
            f"(baseline: {len(baseline.queries)} queries, new: {len(new.queries)}); a paired test "
            "needs the same queries"
        )
    common = [name for name in new.per_query if name in baseline.per_query]
    if not common:
        raise DataError(
            f"no figure is common: the baseline has {', '.join(baseline.per_query) or 'none'}, the "
            f"new one {', '.join(new.per_query) or 'none'}"
        )
    place = {query: index for index, query in enumerate(baseline.queries)}
    order = [place[query] for query in new.queries]
    found = {}
    for name in common:
        before_Q = np.asarray(baseline.per_query[name], np.float64)[order]
        after_Q = np.asarray(new.per_query[name], np.float64)
        change = paired_bootstrap(before_Q, after_Q)
        p_value = randomization_test(before_Q, after_Q)
        found[name] = Difference(float(before_Q.mean()), float(after_Q.mean()), change, p_value)
    return found


def table(differences: Mapping[str, Difference], num_queries: int) -> list[str]:
    """The comparison as lines to print."""
    width = max(len(name) for name in differences)
    head = f"{'':{width}}  baseline     new   change   95 % interval        p"
    return [
        f"paired over {num_queries} queries:",
        head,
        *(
            f"{name:{width}}    {d.baseline:.4f}  {d.value:.4f}  {d.change.mean:+.4f}"
            f"   {d.change.low:+.4f} to {d.change.high:+.4f}   {d.p_value:.4f}"
            for name, d in differences.items()
        ),
    ]


def as_json(differences: Mapping[str, Difference]) -> dict[str, Any]:
    """The comparison as plain values."""
    return {name: asdict(difference) for name, difference in differences.items()}


def read_measured(path: Path, qrels: Qrels | None = None) -> Measured:
    """Read what ``pixelrag eval --output`` wrote, or, with qrels, a TREC run.

    Raises:
        DataError: unreadable, or a run without qrels.
    """
    if path.suffix == ".json":
        return _of_json(path)
    if qrels is None:
        raise DataError(f"{path}: a TREC run is judged by qrels; name their file with --qrels")
    return Measured(list(qrels), per_query_metrics(ranks_of(read_run(path), qrels)))


def _of_json(path: Path) -> Measured:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        measured = Measured(content["queries"], content["per_query"])
        lengths = {len(values) for values in measured.per_query.values()}
        if lengths != {len(measured.queries)} or len(set(measured.queries)) < len(measured.queries):
            raise ValueError("its figures are not one for each of its queries")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: no result of `pixelrag eval --output` with figures of every query: {error!r}"
        ) from error
    return measured


def main(argv: Sequence[str]) -> int:
    """Print the comparison of two files; returns the exit code."""
    parser = argparse.ArgumentParser(prog="pixelrag compare", description=__doc__)
    kind = "a .json file of `pixelrag eval --output`, or a TREC run"
    parser.add_argument("baseline", type=Path, help=kind)
    parser.add_argument("new", type=Path, help=f"the same of what is compared with it: {kind}")
    parser.add_argument("--qrels", type=Path, help="TREC qrels that judge the runs")
    options = parser.parse_args(list(argv))
    qrels = None if options.qrels is None else read_qrels(options.qrels)
    baseline, new = (read_measured(path, qrels) for path in (options.baseline, options.new))
    lines = table(compare(baseline, new), len(new.queries))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
