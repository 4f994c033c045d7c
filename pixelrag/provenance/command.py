"""`pixelrag inspect PATH [PATH]`: what an artifact is, and whether two belong together."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pixelrag.arguments import Parser
from pixelrag.errors import ProvenanceError
from pixelrag.provenance.artifact import Artifact, disagreements, read_artifact


def main(argv: Sequence[str]) -> int:
    """Describe one or two artifacts; returns the exit code.

    Raises:
        ProvenanceError: one is not known, is not whole, or two do not belong together.
    """
    parser = Parser(
        prog="pixelrag inspect",
        description="Say what a folder is: a checkpoint, run, model, adapter, index generation or "
        "teacher cache; with two, whether they belong together. Exit code 9 where one is not "
        "whole, or they do not.",
    )
    parser.add_argument("path", type=Path, help="a folder")
    parser.add_argument("other", type=Path, nargs="?", help="another one, to compare it with")
    parser.add_argument("--json", action="store_true", help="print one JSON object a folder")
    options = parser.parse_args(list(argv))
    artifacts = [read_artifact(p) for p in (options.path, options.other) if p is not None]
    for artifact in artifacts:
        sys.stdout.write(_as_json(artifact) if options.json else _as_text(artifact))
    broken = [f"  {a.path}: {text}" for a in artifacts for text in a.problems]
    if broken:
        raise ProvenanceError("not whole:\n" + "\n".join(broken))
    if len(artifacts) == 2:
        _compare(*artifacts)
    return 0


def _compare(one: Artifact, other: Artifact) -> None:
    shared = sorted(one.marks.keys() & other.marks.keys())
    if not shared:
        raise ProvenanceError(
            f"{one.path} ({one.kind}) and {other.path} ({other.kind}) have no mark in common: "
            "whether they belong together cannot be told"
        )
    found = disagreements(one, other)
    if found:
        raise ProvenanceError(
            "they do not belong together:\n" + "\n".join(f"  {text}" for text in found)
        )
    sys.stdout.write(f"they agree in {', '.join(shared)}\n")


def _as_text(artifact: Artifact) -> str:
    width = max((len(name) for name in (*artifact.facts, *artifact.marks)), default=0)
    lines = [f"{artifact.path}: {artifact.kind}"]
    lines += [f"  {name:<{width}}  {_in_words(value)}" for name, value in artifact.facts.items()]
    if artifact.marks:
        lines.append("  the same in what belongs together:")
    lines += [f"  {name:<{width}}  {value}" for name, value in artifact.marks.items()]
    return "\n".join(lines) + "\n"


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):  # a figure by its name
        return ", ".join(f"{name} {_in_words(item)}" for name, item in value.items())
    return "none" if value is None else str(value)


def _as_json(artifact: Artifact) -> str:
    return json.dumps(asdict(artifact) | {"path": str(artifact.path)}) + "\n"
