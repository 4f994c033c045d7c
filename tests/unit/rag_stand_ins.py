"""Passages and encoders for the tests of the refresh: cheap, and faulty when told to.

They run inside real worker processes, which name them as ``tests.unit.rag_stand_ins:...``.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pixelrag.retrieval.generation import Generation
from pixelrag.retrieval.generations import Generations
from pixelrag.retrieval.refresh_spec import Call, RefreshSpec

DIM = 16


@dataclass(frozen=True)
class StandInPassage:
    id: str
    title: str
    text: str | None
    image: Path | None = None


class StandInStore:
    """What `pixelrag.data.passages.PassageStore` promises, over a JSONL file."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        rows = [json.loads(line) for line in content.splitlines()]
        self._passages = [StandInPassage(r["id"], r.get("title", ""), r["text"]) for r in rows]
        self.ids = [p.id for p in self._passages]
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._passages)

    def __getitem__(self, row: int) -> StandInPassage:
        return self._passages[row]


def write_passages(path: Path, count: int, *, word: str = "passage") -> Path:
    rows = [{"id": f"doc-{i}", "title": f"T{i}", "text": f"{word} {i} é"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def open_store(path: str, faults: dict[str, str] | None = None, flag: str = "") -> StandInStore:
    """Open passages; ``faults`` maps a job (encode, build, validate) to what it does here."""
    act(faults or {}, flag)
    return StandInStore(Path(path))


def encoder(
    *,
    weights: Path,
    device: str,
    progress: Callable[[], None],
    faults: dict[str, str] | None = None,
    flag: str = "",
    log: str = "",
    noise: float = 0.0,
    seconds: float = 0.0,
    foreign: str = "",
) -> Callable[[Sequence[Any]], np.ndarray]:
    """Vectors that depend on the weights and the text alone (and on the batch with ``noise``).

    The shard that begins with the passage ``foreign`` comes from a host with another model.
    """
    salt = weights.read_bytes()
    if log and job() == "encode":
        _append(log, {"pid": os.getpid(), "device": device, **_priority()})

    def encode(passages: Sequence[Any]) -> np.ndarray:
        act(faults or {}, flag, "after " if _encoded(log) else "")
        time.sleep(seconds if job() == "encode" else 0.0)
        other = job() == "encode" and passages[0].id == foreign
        vectors = np.stack(
            [vector(b"other" if other else salt, p.title + "|" + p.text) for p in passages]
        )
        if len(passages) > 1:
            vectors[:, 0] += noise
        if (faults or {}).get(job()) == "nan":
            vectors[1] = np.nan
        if (faults or {}).get(job()) == "zero":
            vectors[1] = 0
        if (faults or {}).get(job()) == "shape":
            vectors = vectors[:, 1:]
        if log and job() == "encode":
            _append(log, {"first": passages[0].id, "rows": len(passages)})
        progress()
        return vectors

    return encode


def vector(salt: bytes, text: str) -> np.ndarray:
    digest = hashlib.sha256(salt + text.encode("utf-8")).digest()
    values = np.random.default_rng(int.from_bytes(digest[:8], "big")).standard_normal(DIM)
    return (values / np.linalg.norm(values)).astype(np.float32)


def job() -> str:
    """What this worker does; Ray's actors, and one that a test makes in its process, encode."""
    is_actor = "default_worker" in sys.argv[0] or len(sys.argv) < 3
    return "encode" if is_actor else sys.argv[2]


def act(faults: dict[str, str], flag: str, when: str = "") -> None:
    """Do what the faults say for this job, only once where a flag file is named."""
    fault = faults.get(when + job())
    if fault is None or fault in ("nan", "zero", "shape") or (flag and Path(flag).exists()):
        return
    if flag:
        Path(flag).touch()
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "hang":
        time.sleep(1000)
    elif fault == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    elif fault == "raise":
        raise ValueError("something odd")


def _encoded(log: str) -> bool:
    return bool(log) and Path(log).exists() and '"rows"' in Path(log).read_text()


def _priority() -> dict[str, Any]:
    try:  # empty for a process that has no group, as an actor has none where its cluster has none
        group = next(reversed(Path("/proc/self/autogroup").read_text().split()), None)
    except OSError:
        group = None
    return {
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "group_nice": group,
        "session": os.getsid(0),
        "threads": os.environ["OMP_NUM_THREADS"],
        "rank": os.environ.get("RANK"),
    }


def _append(log: str, content: dict[str, Any]) -> None:
    with open(log, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(content) + "\n")


def log_lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def encoded_rows(log: Path) -> list[str]:
    """First passages of the shards that were encoded, in order."""
    return [line["first"] for line in log_lines(log) if "first" in line]


def make_recipe(passages: Path, **changes: Any) -> RefreshSpec:
    """A recipe for the stand-ins. `passage_options` and `encoder_options` go to them."""
    here = "tests.unit.rag_stand_ins"
    store = StandInStore(passages)
    options = {"path": str(passages), **changes.pop("passage_options", {})}
    values: dict[str, Any] = {
        "generation": 0,
        "step": -1,
        "passages": Call(f"{here}:open_store", options),
        "encoder": Call(f"{here}:encoder", changes.pop("encoder_options", {})),
        "num_passages": len(store),
        "dim": DIM,
        "fingerprints": {"passages": store.fingerprint, "pooling": "mean"},
        "index": {"factory": "Flat"},
        "shard_rows": 20,
        "nice": 0,  # the suite shall not wait for a busy machine to have time
        "timeout_seconds": 60.0,
    }
    return RefreshSpec(**values | changes)


def make_generation(
    root: Path, number: int, *, step: int | None = None, rows: int = 50, shards: int = 1
) -> Generation:
    """Publish a generation without any process, vectors of `vector(b"", "row <i>")`."""
    from pixelrag.retrieval import durable
    from pixelrag.retrieval.generation import METRIC, VECTORS, index_names, write_tables
    from pixelrag.retrieval.generation import shard_bounds as bounds_of
    from pixelrag.retrieval.index import IndexSettings, build_index
    from pixelrag.retrieval.refresh_worker import save_vectors

    generations = Generations(root)
    part = generations.part(number)
    (part / "work").mkdir(parents=True)
    vectors = np.stack([vector(b"%d" % number, f"row {i}") for i in range(rows)])
    durable.put(part / VECTORS, lambda path: save_vectors(path, vectors))
    settings = IndexSettings("Flat")
    bounds = bounds_of(rows, shards)
    for shard, name in enumerate(index_names(shards)):
        index = build_index(vectors[bounds[shard] : bounds[shard + 1]], settings)
        durable.put(part / name, index.write)
    write_tables(part, [f"id-{i}" for i in range(rows)], DIM, settings)
    generations.seal(
        number,
        step=10 * number if step is None else step,
        num_passages=rows,
        dim=DIM,
        metric=METRIC,
        index={"factory": "Flat"},
        index_files=index_names(shards),
        fingerprints={"passages": "p", "weights": f"w{number}"},
        validation={"recall@10": 1.0},
    )
    generations.publish(number)
    return generations.open(number)
