"""What a run's folder tells about one of its checkpoints or exports, for the model card."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pixelrag.config.yaml_file import read_yaml
from pixelrag.errors import CheckpointError
from pixelrag.export.model_card import RunFacts
from pixelrag.json_text import read_json
from pixelrag.train.atomic import MANIFEST
from pixelrag.train.checkpoint import list_checkpoints
from pixelrag.train.loop import SUMMARY


def run_of(checkpoint: Path) -> RunFacts:
    """Gather what there is; a folder that was moved away from its run tells less, or nothing.

    Raises:
        CheckpointError: a file of the run is there and cannot be read.
    """
    folder = checkpoint.resolve().parent
    config_file = next(
        (p / "config.yaml" for p in (checkpoint, folder) if (p / "config.yaml").is_file()), None
    )
    if config_file is None:
        return RunFacts(str(checkpoint))
    config = read_yaml(config_file).values
    state = _json(checkpoint / "state.json") or _newest_state(folder)
    summary, own = _json(folder / SUMMARY) or {}, _json(checkpoint / MANIFEST) or {}
    records = _evaluations(folder / "metrics.jsonl")
    metric = config.get("checkpoint", {}).get("best_metric")
    record = _record_of(checkpoint.resolve().name, records, metric, summary.get("step"))
    return RunFacts(
        checkpoint=str(checkpoint),
        base=(config.get("model") or config.get("student") or {}).get("name_or_path"),
        step=record.get("step", state.get("step") if own else None),
        data=tuple(config.get("data", {}).get("train", ())),
        data_fingerprint=state.get("position", {}).get("data"),
        figures={k: v for k, v in record.items() if k != "step"},
        config=config_file.read_text(encoding="utf-8"),
        versions=own.get("versions") or summary.get("versions") or {},
    )


def _newest_state(folder: Path) -> dict[str, Any]:
    for _, path in list_checkpoints(folder):
        if state := _json(path / "state.json"):
            return state
    return {}


def _record_of(
    name: str, records: list[dict[str, Any]], metric: str | None, last: int | None
) -> dict[str, Any]:
    """The evaluation of a checkpoint's step, of the best step, or of the last one."""
    if found := re.fullmatch(r"checkpoint-(\d+)", name):
        return next((r for r in records if r["step"] == int(found[1])), {"step": int(found[1])})
    if name == "last" and last is not None:
        return next((r for r in records if r["step"] == last), {"step": last})
    if name == "best" and metric is not None and any(metric in r for r in records):
        choose = min if metric.endswith("loss") else max
        # As the loop chooses: trained steps only, the first of equal ones.
        trained = [r for r in records if metric in r and r["step"]]
        return choose(trained, key=lambda r: r[metric], default={})
    return {}


def _evaluations(path: Path) -> list[dict[str, Any]]:
    """Records of metrics.jsonl that are of an evaluation."""
    if not path.is_file():
        return []
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [record for record in records if "train/loss" not in record]


def _json(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(path, finite=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
