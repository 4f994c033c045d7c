"""Faults that tests put into a run: what `nursery.start(setup=...)` calls in each process.

Each wraps one method of the job, and acts at a step and on a rank that its payload names.
"""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pixelrag.errors import CheckpointError
from pixelrag.models.preprocess import Preprocessor
from pixelrag.train import contrastive, loop, saver
from pixelrag.train.metrics_writer import MetricsWriter
from pixelrag.train.signals import STOP_SIGNALS

Task = contrastive.ContrastiveTask


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _before(owner: type, name: str, action: Callable[..., None]) -> None:
    """Call `action(self, *args, **kwargs)` before each call of a method."""
    method = getattr(owner, name)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        action(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    setattr(owner, name, wrapped)


def _at_batch(number: int, action: Callable[[Any], None]) -> None:
    """Call `action(task)` when the task accumulates its batch of that number, from 1."""
    seen = 0

    def count(task: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            action(task)

    _before(Task, "accumulate", count)


def kill(payload: dict[str, Any]) -> None:
    """SIGKILL to this process in the middle of batch `batch`: gradients are half accumulated."""

    def arm(task: Any) -> None:
        backward = task.engine.backward

        def die(loss: torch.Tensor, *, last: bool) -> None:
            backward(loss, last=False)
            os.kill(os.getpid(), signal.SIGKILL)

        task.engine.backward = die

    _at_batch(payload["batch"], arm)


def kill_before_last_export(payload: dict[str, Any]) -> None:
    """SIGKILL to this process when the last checkpoint stands and `last/` is still to come."""
    _before(loop.Loop, "_finish", lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def kill_in_export(payload: dict[str, Any]) -> None:
    """SIGKILL to rank 0 when the weights of `best/` are written and its tokenizer is not."""
    _before(Preprocessor, "save", lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def kill_in_encode(payload: dict[str, Any]) -> None:
    """SIGKILL to this process when `pixelrag mine` begins to encode its shard `call`, from 1."""
    from pixelrag.train import mine

    encode, calls = mine.encode, itertools.count(1)

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        if next(calls) == payload["call"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(*args, **kwargs)

    mine.encode = counted


def no_pauses(payload: dict[str, Any]) -> None:
    """Requests that fail are tried again at once."""
    from pixelrag.evaluate.chat_api import ChatApi

    ChatApi.__init__.__kwdefaults__["pause"] = lambda _: None


def signal_self(payload: dict[str, Any]) -> None:
    """SIGTERM to this process, on rank `rank` alone, in the middle of batch `batch`."""
    if _rank() == payload["rank"]:
        _at_batch(payload["batch"], lambda task: os.kill(os.getpid(), signal.SIGTERM))


def signal_when_all_is_written(payload: dict[str, Any]) -> None:
    """SIGTERM to this process while the ranks part."""
    part = torch.distributed.destroy_process_group

    def asked(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        part(*args)

    torch.distributed.destroy_process_group = asked


def signal_while_it_waits(payload: dict[str, Any]) -> None:
    """SIGTERM to rank `rank` when step `step`, steps done, waits for its index."""
    from pixelrag.retrieval import switch

    def ask(self: Any, step: int) -> None:
        if step == payload["step"]:
            if _rank() == payload["rank"]:
                os.kill(os.getpid(), signal.SIGTERM)
            switch.stop_point()  # as where the generation is not ready yet

    _before(switch.Switch, "settle", ask)


def storm(payload: dict[str, Any]) -> None:
    """From the middle of batch `batch` on all signals to stop rain down for a second."""

    def rain() -> None:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            for signum in STOP_SIGNALS:
                os.kill(os.getpid(), signum)
            time.sleep(0.005)

    _at_batch(payload["batch"], lambda task: threading.Thread(target=rain, daemon=True).start())


def touch(payload: dict[str, Any]) -> None:
    """The file `path` appears in the middle of batch `batch`."""
    _at_batch(payload["batch"], lambda task: Path(payload["path"]).touch())


def hang(payload: dict[str, Any]) -> None:
    """The first batch takes ten minutes."""
    _at_batch(1, lambda task: time.sleep(600))


def signal_at_stop_point(payload: dict[str, Any]) -> None:
    """SIGTERM on rank `rank` at call `call`, from 1, of the `stop_point` that `module` uses."""
    module = importlib.import_module(payload["module"])
    stop_point, calls = module.stop_point, itertools.count(1)

    def counted() -> None:
        if next(calls) == payload["call"] and _rank() == payload.get("rank", 0):
            os.kill(os.getpid(), signal.SIGTERM)
        stop_point()

    module.stop_point = counted


def infinite_weight(payload: dict[str, Any]) -> None:
    """One weight of rank `rank` becomes infinite before batch `batch`."""

    @torch.no_grad()
    def spoil(task: Any) -> None:
        weights = [p for n, p in task.engine.named_trainable() if n.endswith("dense.weight")]
        weights[-1].view(-1)[0] = float("inf")

    if _rank() == payload["rank"]:
        _at_batch(payload["batch"], spoil)


def poisoned_row(payload: dict[str, Any]) -> None:
    """The embedding of the row whose sample id is `sample_id` becomes `value`, on its rank."""
    embed = contrastive.gradcache_step

    def step(engine: Any, queries: list, documents: list, positive: torch.Tensor, **rest: Any):
        row = step.row
        if row is None:
            return embed(engine, queries, documents, positive, **rest)
        forward, calls = engine._forward, 0

        def spoiled(role: str, **batch: Any) -> Any:
            nonlocal calls
            embedding, scale = forward(role, **batch)
            if role == "query":
                first, calls = calls, calls + len(embedding)
                if first <= row < calls:
                    embedding = embedding.clone()
                    embedding[row - first] = payload["value"]
            return embedding, scale

        engine._forward = spoiled
        return embed(engine, queries, documents, positive, **rest)

    def find(task: Any, batch: Any, **_: Any) -> None:
        ids = batch.query_ids if batch.num_real_queries else []
        step.row = ids.index(payload["sample_id"]) if payload["sample_id"] in ids else None

    contrastive.gradcache_step = step
    _before(Task, "accumulate", find)


def nan_gradient(payload: dict[str, Any]) -> None:
    """The loss is fine, a gradient of rank `rank` at batch `batch` is not a number."""

    def arm(task: Any) -> None:
        backward = task.engine.backward

        def spoil(loss: torch.Tensor, *, last: bool) -> None:
            backward(loss * float("nan") if last else loss, last=last)

        task.engine.backward = spoil

    if _rank() == payload["rank"]:
        _at_batch(payload["batch"], arm)


def lost_image(payload: dict[str, Any]) -> None:
    """The image `path` is gone once training has begun."""
    _at_batch(1, lambda task: Path(payload["path"]).unlink(missing_ok=True))


def broken_code(payload: dict[str, Any]) -> None:
    """A fault of pixelrag's own on rank `rank`, when it prepares batch `batch`."""
    seen = 0

    def fail(task: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == payload["batch"]:
            raise KeyError("a fault of ours")

    if _rank() == payload["rank"]:
        _before(Task, "next_batch", fail)


def embed_at_the_end(payload: dict[str, Any]) -> None:
    """No fault: before `last/` is written, the engine's own embeddings go to `file` (rank 0)."""
    import numpy as np

    from pixelrag.data.schema import Document
    from pixelrag.retrieval.encode import encode

    def embed(job: Any, *_: Any) -> None:
        task = job._task
        documents = [
            Document.of_image(d["image"]) if "image" in d else Document.of_text(d["text"])
            for d in payload["documents"]
        ]
        prepare = task._preprocessor.queries, task._preprocessor.documents
        items = {"query": payload["queries"], "document": documents}
        found = {
            role: encode(task.engine, role, rows, act, batch_size=2, length=lambda _: 0).numpy()
            for (role, rows), act in zip(items.items(), prepare, strict=True)
        }
        if _rank() == 0:
            np.savez(payload["file"], **found)

    _before(loop.Loop, "_finish", embed)


def answer_at_the_end(payload: dict[str, Any]) -> None:
    """No fault: what a RAG run's own models make of texts at its end goes to `file`."""
    from pixelrag.data.schema import Document

    def look(job: Any, *_: Any) -> None:
        engine, parts = job._task.engine, job._task._parts
        texts, passages = payload["questions"], job._task._data.passages
        chosen = [passages[row] for row in range(len(texts))]
        names = ["-"] * len(texts)
        reading = parts.generator.pairs(texts, chosen, payload["answers"], names)
        prompts = parts.generator.prompts(texts, chosen, names)
        ids = parts.generator.tokenizer
        with engine.inference():
            found = {
                "query": engine("query", **parts.queries.queries(texts))[0],
                "document": engine(
                    "document", **parts.documents.documents([Document.of_text(t) for t in texts])
                )[0],
                "log_probs": engine("reading", **reading)[0],
                "written": engine(
                    "write", max_new_tokens=6, end_token_id=ids.eos_token_id,
                    pad_token_id=ids.pad_token_id, **prompts,
                )[0],
            }  # fmt: skip
        torch.save(found | {"inputs": reading}, payload["file"])

    _before(loop.Loop, "_finish", look)


def full_record(payload: dict[str, Any]) -> None:
    """The disk has no room for any line of metrics.jsonl."""

    def refuse(*_: Any) -> None:
        raise CheckpointError("metrics.jsonl: cannot be written; the run stops here")

    MetricsWriter.write = lambda self, *rest: refuse() if _rank() == 0 else None


def slow_disk(payload: dict[str, Any]) -> None:
    """Writing a checkpoint's part takes `seconds` longer."""
    _before(saver.Saver, "_write_own", lambda *_: time.sleep(payload["seconds"]))


def broken_part(payload: dict[str, Any]) -> None:
    """On rank `rank` the part of the checkpoint of step `step` cannot be written.

    The other ranks are a little later, and write wherever the folder is.
    """

    def fail(self: Any, folder: Path, *_: Any) -> None:
        if folder.name != f".checkpoint-{payload['step']}.tmp":
            return
        if _rank() == payload["rank"]:
            raise CheckpointError("no space left for this part")
        time.sleep(1)
        folder.mkdir(exist_ok=True)

    _before(saver.Saver, "_write_own", fail)


def die_after(payload: dict[str, Any]) -> None:
    """Die, as by SIGKILL, after `seconds` of CPU time: rank `rank`, or every rank if it is None."""
    if payload["rank"] not in (None, _rank()):
        return
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, payload["seconds"])
