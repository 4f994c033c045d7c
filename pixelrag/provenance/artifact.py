"""Reads what runs leave behind, by its small files alone: no weights, no torch.

Marks are what two artifacts can be compared by: hashes of data, vocabulary, chat template,
passages, configuration. Libraries' versions are no marks; they drift, and are only shown.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pixelrag.errors import CheckpointError, ProvenanceError
from pixelrag.json_text import read_json
from pixelrag.train.atomic import MANIFEST as COMPLETE
from pixelrag.train.atomic import inspect as problems_of
from pixelrag.train.atomic import read_manifest
from pixelrag.train.checkpoint import list_checkpoints

_SETTINGS = "pixelrag.json"


@dataclass(frozen=True, slots=True)
class Artifact:
    """One artifact.

    Attributes:
        path: where it lies.
        kind: what it is, in words.
        facts: what to show of it.
        marks: what it can be compared by.
        problems: what is wrong with it; empty when it is whole.
    """

    path: Path
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_artifact(path: Path) -> Artifact:
    """Tell what lies at ``path``.

    Raises:
        ProvenanceError: there is nothing, or nothing that pixelrag or transformers writes, or its
            files are altered.
    """
    if not path.is_dir():
        raise ProvenanceError(f"{path}: got no folder, expected one that a run wrote or a model's")
    readers: tuple[tuple[str, Callable[[Path], Artifact]], ...] = (
        (COMPLETE, _checkpoint),
        ("manifest.json", _with_manifest),
        ("adapter_config.json", _model),
        ("config.json", _model),
        ("config.yaml", _run),
        ("generator/config.json", _rag_export),
    )
    for name, read in readers:
        if (path / name).is_file():
            try:
                return read(path)
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                reason = f"altered, or of another version ({error!r})"
                raise ProvenanceError(f"{path / name}: {reason}") from error
    known = ", ".join(name for name, _ in readers)
    raise ProvenanceError(
        f"{path}: not an artifact that is known here (it has none of {known}); name the folder of "
        "a checkpoint, run, model, adapter, index generation or teacher cache"
    )


def disagreements(one: Artifact, other: Artifact) -> list[str]:
    """Marks that both have and that differ; a sentence each."""
    return [
        f"{name}: {one.marks[name]} in {one.path}, {other.marks[name]} in {other.path}"
        for name in sorted(one.marks.keys() & other.marks.keys())
        if one.marks[name] != other.marks[name]
    ]


def _checkpoint(path: Path) -> Artifact:
    try:
        manifest = read_manifest(path)
        state = _json(path / "state.json")
        info, versions = manifest["info"], manifest["versions"]
        position = state["position"]
        sizes = sum(entry["size"] for entry in manifest["files"].values())
        facts = {
            "step": state["step"],
            "written by": f"{info['engine']}, {info['world_size']} ranks",
            "size": f"{sizes / 2**20:.1f} MiB in {len(manifest['files'])} files",
            "optimizer state": "yes" if _has(path, "optimizer*.safetensors") else "no",
            "averages": "yes" if _has(path, "ema*.safetensors") else "no",
            "best figure": state["best"],
            "versions": ", ".join(f"{name} {value}" for name, value in versions.items()),
        }
        marks = {"configuration": state["fingerprint"]} | _strings(position)
    except (KeyError, TypeError, AttributeError, ProvenanceError, CheckpointError) as error:
        return Artifact(path, "checkpoint", problems=[f"cannot be read: {error}"])
    return Artifact(path, "checkpoint", facts, marks, problems_of(path))


def _strings(position: Mapping[str, Any]) -> dict[str, str]:
    """Fingerprints among what says where the data stand, whichever the job's."""
    found = {k: v for k, v in position.items() if isinstance(v, str)}
    nested = [v for v in position.values() if isinstance(v, Mapping)]
    for inner in nested:
        found |= {k: v for k, v in inner.items() if isinstance(v, str) and len(v) >= 12}
    return found


def _with_manifest(path: Path) -> Artifact:
    content = _json(path / "manifest.json")
    if "generation" in content:
        facts = {k: content[k] for k in ("generation", "step", "num_passages", "dim", "metric")}
        facts |= {f"index {k}": v for k, v in content["index"].items()}
        facts |= {f"measured {k}": v for k, v in content["validation"].items()}
        sizes = {name: entry["size"] for name, entry in content["files"].items()}
        return Artifact(
            path, "index generation", facts, dict(content["fingerprints"]), _unlike(path, sizes)
        )
    if content.get("kind") in ("hidden_states", "top_k"):
        names = (
            "teacher",
            "num_documents",
            "num_tokens",
            "max_length",
            "k",
            "temperature",
            "codec",
        )
        facts = {name: content[name] for name in names if content.get(name)}
        marks = {"vocabulary": content["vocabulary"], "data": " ".join(content["data"])}
        missing = [f"{part}: missing" for part in content["parts"] if not (path / part).is_file()]
        return Artifact(path, f"teacher cache ({content['kind']})", facts, marks, missing)
    raise ProvenanceError(f"{path / 'manifest.json'}: not a manifest of pixelrag's")


def _unlike(path: Path, sizes: Mapping[str, int]) -> list[str]:
    found = {
        name: (path / name).stat().st_size if (path / name).is_file() else -1 for name in sizes
    }
    return [
        f"{name}: {'missing' if found[name] < 0 else f'{found[name]} bytes, expected {size}'}"
        for name, size in sizes.items()
        if found[name] != size
    ]


def _model(path: Path) -> Artifact:
    adapter = (
        _json(path / "adapter_config.json") if (path / "adapter_config.json").is_file() else {}
    )
    config = _json(path / "config.json") if (path / "config.json").is_file() else {}
    facts: dict[str, Any] = {}
    if adapter:
        facts["base model"] = adapter.get("base_model_name_or_path")
        facts["rank"] = adapter.get("r")
    facts |= {k: config[k] for k in ("model_type", "architectures", "vocab_size") if k in config}
    if (path / _SETTINGS).is_file():
        facts |= {f"pixelrag {k}": v for k, v in _json(path / _SETTINGS).items()}
    marks = _tokenizer_marks(path)
    problems = [] if _has(path, "*.safetensors") else ["no weights (*.safetensors) here"]
    return Artifact(path, "PEFT adapter" if adapter else "model", facts, marks, problems)


def _tokenizer_marks(path: Path) -> dict[str, str]:
    """The contract that two models must share to read one another's tokens."""
    marks = {}
    if (path / "tokenizer.json").is_file():
        content = _json(path / "tokenizer.json")
        vocabulary = content.get("model", {}).get("vocab", {})
        added = [(t["id"], t["content"]) for t in content.get("added_tokens", [])]
        marks["vocabulary"] = _hash([vocabulary, added])
        marks["special tokens"] = ", ".join(text for _, text in added[:8])
    template = path / "chat_template.jinja"
    if template.is_file():
        marks["chat template"] = _hash(template.read_text(encoding="utf-8"))
    return marks


def _run(path: Path) -> Artifact:
    checkpoints = list_checkpoints(path)
    facts: dict[str, Any] = {"checkpoints": ", ".join(p.name for _, p in checkpoints) or "none"}
    for name in ("best", "last", "index"):
        facts[name] = "there" if (path / name).is_dir() else "not there"
    if (path / "PREEMPTED").is_file():
        facts["preempted"] = (path / "PREEMPTED").read_text(encoding="utf-8").split("\n")[0]
    if (path / "summary.json").is_file():
        summary = _json(path / "summary.json")
        facts |= {k: summary[k] for k in ("step", "best", "engine", "world_size", "seconds")}
    marks = _checkpoint(checkpoints[0][1]).marks if checkpoints else {}
    return Artifact(path, "run", facts, marks)


def _rag_export(path: Path) -> Artifact:
    parts = {p.name: _model(p) for p in sorted(path.iterdir()) if (p / "config.json").is_file()}
    problems = [f"{name}: {text}" for name, part in parts.items() for text in part.problems]
    return Artifact(path, "RAG model", {"parts": ", ".join(parts)}, {}, problems)


def _has(path: Path, pattern: str) -> bool:
    return next(path.glob(pattern), None) is not None


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, finite=False)
    except (OSError, ValueError) as error:
        raise ProvenanceError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ProvenanceError(f"{path}: got a {type(content).__name__}, expected an object")
    return content
