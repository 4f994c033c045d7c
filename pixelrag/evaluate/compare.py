"""Paired comparisons of two measurements of the same queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pixelrag.errors import DataError
from pixelrag.evaluate.bootstrap import Interval, paired_bootstrap, randomization_test
from pixelrag.evaluate.ranking import per_query_metrics
from pixelrag.evaluate.runs import Qrels, ranks_of, read_run
from pixelrag.json_text import read_json


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


def tables(sets: Mapping[str, tuple[int, Mapping[str, Difference]]]) -> list[str]:
    """Comparisons as lines to print."""
    return [line for name, one in sets.items() for line in _table(name, *one)]


def _table(name: str, num_queries: int, differences: Mapping[str, Difference]) -> list[str]:
    width = max(len(figure) for figure in differences)
    head = f"{'':{width}}  baseline     new   change   95 % interval        p"
    return [
        f"{name}, paired over {num_queries} queries:",
        head,
        *(
            f"{figure:{width}}    {d.baseline:.4f}  {d.value:.4f}  {d.change.mean:+.4f}"
            f"   {d.change.low:+.4f} to {d.change.high:+.4f}   {d.p_value:.4f}"
            for figure, d in differences.items()
        ),
    ]


def as_json(sets: Mapping[str, tuple[int, Mapping[str, Difference]]]) -> dict[str, Any]:
    """Comparisons as plain values."""
    return {
        name: {figure: asdict(d) for figure, d in one.items()} for name, (_, one) in sets.items()
    }


def compare_sets(
    baseline: Mapping[str, Measured], new: Mapping[str, Measured]
) -> dict[str, tuple[int, dict[str, Difference]]]:
    """Compare the sets of queries that both have: name -> (number of queries, differences).

    Raises:
        DataError: see `compare`; or no set is common.
    """
    common = [name for name in new if name in baseline]
    if not common:
        raise DataError(
            f"nothing to compare: the baseline has figures of {_names(baseline)}, the new one of "
            f"{_names(new)}"
        )
    return {name: (len(new[name].queries), compare(baseline[name], new[name])) for name in common}


def _names(sets: Mapping[str, Measured]) -> str:
    return ", ".join(sets) or "no queries"


def measured_json(sets: Mapping[str, Measured]) -> dict[str, Any]:
    """Every query's figures as `read_measured` reads them: the part of `eval --output`."""
    return {
        name: {
            "queries": one.queries,
            "per_query": {figure: list(map(float, v)) for figure, v in one.per_query.items()},
        }
        for name, one in sets.items()
    }


def read_measured(path: Path, qrels: Qrels | None = None) -> dict[str, Measured]:
    """Read what ``pixelrag eval --output`` wrote, or, with qrels, a TREC run, as set "eval".

    Raises:
        DataError: unreadable, or a run without qrels.
    """
    if path.suffix == ".json":
        return _of_json(path)
    if qrels is None:
        raise DataError(f"{path}: a TREC run is judged by qrels; name their file with --qrels")
    return {"eval": Measured(list(qrels), per_query_metrics(ranks_of(read_run(path), qrels)))}


def _of_json(path: Path) -> dict[str, Measured]:
    try:
        content = read_json(path)
        sets = {
            name: Measured(entry["queries"], entry["per_query"])
            for name, entry in content["measured"].items()
        }
        for name, one in sets.items():
            lengths = {len(values) for values in one.per_query.values()} | {len(set(one.queries))}
            if lengths != {len(one.queries)}:
                raise ValueError(f"{name}: its figures are not one for each of its queries")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: no result of `pixelrag eval --output` with figures of every query: {error!r}"
        ) from error
    return sets
