"""The command line of a demo: its folder, and numbers of one or more."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from pixelrag.arguments import Parser


def parser_of(demo: str, description: str | None) -> Parser:
    """A parser that knows `--output`, to which a demo may add its own words."""
    parser = Parser(prog=f"pixelrag demo {demo}", description=description)
    folder = Path(f"runs/demo-{demo}")
    parser.add_argument(
        "--output", type=Path, default=folder,
        help=f"folder for data, runs and results; emptied first (default {folder})",
    )  # fmt: skip
    return parser


def parsed(
    parser: Parser,
    numbers: Mapping[str, tuple[int, str]],
    argv: Sequence[str],
) -> argparse.Namespace:
    """The options; `numbers` are further ones, name -> (default, meaning), each at least 1."""
    for name, (default, meaning) in numbers.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{meaning} (default {default})"
        )
    options = parser.parse_args(list(argv))
    for name in numbers:
        if (value := getattr(options, name.replace("-", "_"))) < 1:
            parser.error(f"--{name}: got {value}, expected at least 1")
    return options
