"""`pixelrag compare`: a paired test between two measurements of the same queries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pixelrag.arguments import Parser
from pixelrag.console import say


def main(argv: Sequence[str]) -> int:
    """Print the comparison of two files; returns the exit code.

    Raises:
        DataError: a file cannot be read, or the queries are not the same.
    """
    parser = Parser(
        prog="pixelrag compare",
        description="Compare what was measured of the same queries: means, the paired 95 % "
        "bootstrap interval of their difference, and the p value of a paired randomisation test.",
    )
    kind = "a .json file of `pixelrag eval --output`, or a TREC run"
    parser.add_argument("baseline", type=Path, help=kind)
    parser.add_argument("new", type=Path, help="the same of what is compared with it")
    parser.add_argument("--qrels", type=Path, help="TREC qrels that judge the runs")
    options = parser.parse_args(list(argv))
    # Here, so that --help needs no torch.
    from pixelrag.evaluate.compare import compare_sets, read_measured, tables
    from pixelrag.evaluate.runs import read_qrels

    qrels = None if options.qrels is None else read_qrels(options.qrels)
    baseline, new = (read_measured(path, qrels) for path in (options.baseline, options.new))
    say("\n".join(tables(compare_sets(baseline, new))))
    return 0
