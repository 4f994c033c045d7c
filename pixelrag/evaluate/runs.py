"""TREC files: what a search found (a run), and what it should have found (qrels).

    query Q0 document rank score tag        a run, best first
    query 0 document 1                      qrels; relevance is binary here

Readers of runs, trec_eval among them, sort by score in float32 and break ties by document name.
Scores are therefore written as float32 and strictly falling, equal ones set apart by the smallest
step there is, so that every tool ranks as pixelrag does. White space and "%" within a name are
percent-encoded, since white space ends a field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np

from pixelrag.errors import DataError
from pixelrag.evaluate.ranking import UNRANKED, Ranks

Run = dict[str, list[tuple[str, float]]]
"""Query id -> (document id, score), best first."""
Qrels = dict[str, set[str]]
"""Query id -> ids of its relevant documents."""

_UNSAFE = re.compile(r"[\s%]")


def trec_name(name: str) -> str:
    """The name without white space; `urllib.parse.unquote` undoes it."""
    return _UNSAFE.sub(lambda found: quote(found.group()), name)


def run_text(run: Mapping[str, Sequence[tuple[str, float]]], tag: str) -> str:
    """A run as the text of a TREC file."""
    lines = []
    for query, found in run.items():
        last = np.float32(np.inf)
        for rank, (document, score) in enumerate(found, start=1):
            last = min(np.float32(score), np.nextafter(last, np.float32(-np.inf)))
            name = trec_name(document)
            lines.append(f"{trec_name(query)} Q0 {name} {rank} {last!s} {trec_name(tag)}\n")
    return "".join(lines)


def qrels_text(qrels: Mapping[str, Sequence[str] | set[str]]) -> str:
    """Qrels as the text of a TREC file."""
    return "".join(
        f"{trec_name(query)} 0 {trec_name(document)} 1\n"
        for query, documents in qrels.items()
        for document in sorted(documents)
    )


def read_run(path: Path) -> Run:
    """Read a run; the order is that of the scores, the `rank` column is ignored as in trec_eval.

    Raises:
        DataError: unreadable, not six fields, no number for a score, or a document named twice.
    """
    run: Run = {}
    for line, fields in _fields(path, 6, "query Q0 document rank score tag"):
        query, _, document, _, score, _ = fields
        try:
            value = float(score)
        except ValueError as error:
            raise DataError(f"{path}:{line}: score {score!r} is not a number") from error
        if not np.isfinite(value):
            raise DataError(f"{path}:{line}: score {score} is not finite")
        run.setdefault(query, []).append((document, value))
    for query, found in run.items():
        if len({document for document, _ in found}) < len(found):
            raise DataError(f"{path}: query {query} finds a document more than once")
        # By name, last first, and then by score: what trec_eval makes of ties.
        found.sort(key=lambda hit: hit[0], reverse=True)
        found.sort(key=lambda hit: hit[1], reverse=True)
    return run


def read_qrels(path: Path) -> Qrels:
    """Read qrels; queries without a relevant document are left out, as trec_eval does.

    Raises:
        DataError: unreadable, not four fields, graded relevance (2 and more), a document judged
            twice, or nothing relevant.
    """
    qrels: Qrels = {}
    seen: set[tuple[str, str]] = set()
    for line, (query, _, document, relevance) in _fields(path, 4, "query 0 document relevance"):
        if relevance not in ("-1", "0", "1"):
            raise DataError(
                f"{path}:{line}: relevance {relevance!r}, expected 0 or 1: pixelrag's measures are "
                "binary, graded ones need another tool, such as ir_measures"
            )
        if (query, document) in seen:
            raise DataError(f"{path}:{line}: judges document {document} of query {query} again")
        seen.add((query, document))
        if relevance == "1":
            qrels.setdefault(query, set()).add(document)
    if not qrels:
        raise DataError(f"{path}: names no relevant document")
    return qrels


def ranks_of(run: Run, qrels: Qrels) -> Ranks:
    """Where a run has the relevant documents of every query of the qrels, in their order.

    Documents that a run lacks have the rank `UNRANKED` and so count as not found; the run's further
    queries are ignored.

    Raises:
        DataError: the two have no query in common.
    """
    if not run.keys() & qrels.keys():
        raise DataError(
            f"no query of the qrels (first {next(iter(qrels))!r}) is in the run (first "
            f"{next(iter(run), None)!r}); are they of one test set?"
        )
    pair_query, pair_rank, most = [], [], 1
    for number, (query, relevant) in enumerate(qrels.items()):
        place = {document: rank for rank, (document, _) in enumerate(run.get(query, []), start=1)}
        pair_query += [number] * len(relevant)
        pair_rank += [place.get(document, UNRANKED) for document in relevant]
        most = max(most, len(place))
    return Ranks(
        np.array(pair_query, np.int64),
        np.array(pair_rank, np.int64),
        len(qrels),
        num_documents=most,
    )


def _fields(path: Path, count: int, form: str) -> Iterator[tuple[int, list[str]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    for line, content in enumerate(text.splitlines(), start=1):
        fields = content.split()
        if fields and len(fields) != count:
            raise DataError(f"{path}:{line}: {len(fields)} fields, expected {count}: {form}")
        if fields:
            yield line, fields
