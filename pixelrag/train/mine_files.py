"""The files of `pixelrag mine`: rows as they were, with what was found; and the work's folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pixelrag.data.lines import file_labels, parsed_lines
from pixelrag.data.pairs import names_of
from pixelrag.data.schema import PairRow
from pixelrag.errors import CheckpointError
from pixelrag.json_text import read_json
from pixelrag.retrieval.durable import put_text
from pixelrag.retrieval.mining import Mined

MANIFEST = "mined.json"
WORK = "work"
_PLAN = "plan.json"


class MinedFiles:
    """Input files, and those to write under the same names.

    Args:
        inputs: JSONL files of rows.
        output: folder to write.

    Attributes:
        work: folder of what is not finished.
    """

    def __init__(self, inputs: Sequence[str], output: Path) -> None:
        self.output = output
        self.work = output / WORK
        self._inputs = names_of(inputs)
        self._labels = file_labels(self._inputs)
        whole = [os.path.abspath(name) for name in self._inputs]  # no ".." may lead out of output
        self._outputs = [output / label for label in file_labels(whole)]

    def begin(self, plan: dict[str, Any]) -> bool:
        """Whether all is done; else make sure that the work folder is of this plan.

        Raises:
            CheckpointError: the folder holds something else.
        """
        for path in (self.output / MANIFEST, self.work / _PLAN):
            before = _read(path)
            if before is None:
                continue
            unlike = [k for k in plan if before.get("plan", before).get(k) != plan[k]]
            if unlike:
                raise CheckpointError(
                    f"{self.output} holds negatives mined with other {', '.join(unlike)}; choose "
                    "another --output, or remove it"
                )
            if path.name == MANIFEST:
                shutil.rmtree(self.work, ignore_errors=True)
            return path.name == MANIFEST
        taken = [str(path) for path in self._outputs if path.exists()]
        if taken:
            raise CheckpointError(
                f"{taken[0]} exists and was not mined here (no {MANIFEST} beside it); choose "
                "another --output"
            )
        with writing(self.output):
            self.work.mkdir(parents=True, exist_ok=True)
            put_text(self.work / _PLAN, json.dumps(plan))
        return False

    def objects(self) -> dict[str, dict[str, Any]]:
        """The rows as they stand in the files, by sample id."""
        return {
            f"{label}:{line}": value
            for name, label in zip(self._inputs, self._labels, strict=True)
            for line, value in parsed_lines(name, lambda value, _, __: value)
            if isinstance(value, dict)
        }

    def line(self, value: Mapping[str, Any], row: PairRow, mined: Mined) -> str:
        """A row as it is written: what it had, and its new negatives; paths from its new place."""
        folder = self._outputs[self._file_of(row)].parent
        kept = {k: v for k, v in value.items() if k not in ("neg_passages", "neg_chunk_paths")}
        images = [os.path.relpath(d.image, folder) for d in row.positives if d.image is not None]
        is_image = row.positive.image is not None
        if is_image:
            kept["chunk_path"] = images.pop(0)
        if images:
            kept["pos_chunk_paths"] = images
        found: dict[str, Any] = {}
        if mined.documents:
            name = "neg_chunk_paths" if is_image else "neg_passages"
            found = {
                name: [
                    os.path.relpath(d.image, folder) if d.image is not None else d.text
                    for d in mined.documents
                ],
                "neg_scores": [round(score, 6) for score in mined.scores],
                "neg_ranks": mined.ranks,
            }
        found["positive_score"] = round(mined.positive_score, 6)
        found["positive_rank"] = mined.positive_rank
        return json.dumps({**kept, **found}, ensure_ascii=False)

    def part(self, shard: int) -> Path:
        """File of a shard's rows."""
        return self.work / f"rows-{shard:05d}.jsonl"

    def finish(
        self, plan: dict[str, Any], rows: Sequence[PairRow], num_shards: int
    ) -> dict[str, Any]:
        """Write the files of all shards, then the manifest, then drop the work."""
        parts = [self.part(shard) for shard in range(num_shards)]
        lines = [line for part in parts for line in part.read_text("utf-8").split("\n") if line]
        found = [json.loads(line) for line in lines]
        counts = [len(row.get("neg_scores", ())) for row in found]
        figures = {
            "rows": len(lines),
            "negatives": sum(counts),
            "short_rows": sum(count < plan["mining"]["num_negatives"] for count in counts),
            "positives_found": float(np.mean([row["positive_rank"] is not None for row in found])),
        }
        of = [self._file_of(row) for row in rows]
        with writing(self.output):
            for number, path in enumerate(self._outputs):
                path.parent.mkdir(parents=True, exist_ok=True)
                own = [line for line, file in zip(lines, of, strict=True) if file == number]
                put_text(path, "".join(f"{line}\n" for line in own))
            put_text(
                self.output / MANIFEST,
                json.dumps({"plan": plan, "figures": figures}, indent=1) + "\n",
            )
            shutil.rmtree(self.work)
        return figures

    def _file_of(self, row: PairRow) -> int:
        return self._labels.index(row.sample_id.rpartition(":")[0])


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Word what the disk refuses."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be written: {error.strerror or error}. Free space or mend "
            "permissions, and give the same command again: finished shards stay"
        ) from error


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(path, finite=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; remove the folder") from error
