"""`pixelrag export`: makes of a checkpoint what other tools load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pixelrag.arguments import Parser
from pixelrag.console import say

FORMS = ("hf", "adapter", "merged", "sentence-transformers")
DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str]) -> int:
    """Export what the command line names; returns the exit code.

    Raises:
        PixelragError: see `pixelrag.train.export.export`.
    """
    parser = Parser(
        prog="pixelrag export",
        description="Write a checkpoint, best/ or last/ of a run as a folder for other tools. "
        "Needs no GPU, and holds the model in memory once.",
    )
    parser.add_argument(
        "checkpoint", type=Path, help="checkpoint-<step>, best or last of a run's folder"
    )
    parser.add_argument(
        "--to", choices=FORMS, required=True,
        help="hf: the whole model for from_pretrained; adapter: LoRA weights alone, for PEFT; "
        "merged: base and adapter in one; sentence-transformers: whole, for that library",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of the written weights (float32)"
    )
    parser.add_argument(
        "--max-shard-size", default="5GB",
        help="larger weights are several files and an index (5GB)",
    )  # fmt: skip
    options = parser.parse_args(list(argv))
    # Here, so that --help needs no torch.
    import torch

    from pixelrag.train.export import export

    export(
        options.checkpoint,
        options.to,
        options.output,
        dtype=getattr(torch, options.dtype),
        max_shard_size=options.max_shard_size,
    )
    say(f"exported {options.checkpoint} to {options.output}")
    return 0
