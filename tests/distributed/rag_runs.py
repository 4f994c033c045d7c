"""Runs of the RAG job on tiny models, and what they logged and left behind."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from pixelrag.config.base import load
from pixelrag.config.rag import RagConfig
from pixelrag.distributed.collectives import from_main
from pixelrag.distributed.env import World

THINGS = (
    "fox", "dog", "engine", "file", "parser", "table", "figure", "query", "line", "word", "number",
    "string", "list", "name", "value", "page",
)  # fmt: skip
COLORS = ("brown", "lazy", "quick", "red", "blue", "green")


def make_material(folder: Path) -> None:
    """Passages, questions, and tiny models that read and answer them."""
    from pixelrag.models.tiny import save_tiny_bert
    from pixelrag.models.tiny_causal import save_tiny_causal
    from pixelrag.models.tiny_seq2seq import save_tiny_seq2seq

    passages = [
        {"id": f"p{i}", "title": thing, "text": f"the {thing} is {COLORS[i % 6]}"}
        for i, thing in enumerate(THINGS)
    ]
    questions = [
        {"question": f"what is the {t}", "answers": [COLORS[i % 6]], "passage_ids": [f"p{i}"]}
        for i, t in enumerate(THINGS)
    ]
    # Nine rows make a batch of eight and one of one: with two ranks, one of them has none.
    files = {"kb": passages, "train": questions[:9], "eval": questions[9:]}
    for name, rows in files.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    texts = [passage["text"] for passage in passages]
    for name, seed in (("questions", 1), ("passages", 2)):
        save_tiny_bert(folder / name, texts=texts, hidden_size=16, seed=seed)
    save_tiny_seq2seq(folder / "t5", "t5", texts=texts, hidden_size=16)
    save_tiny_causal(folder / "decoder", "qwen3", texts=texts, hidden_size=16)


def flags(folder: Path, output: Path) -> list[str]:
    """The command line of a short run on `make_material`'s files."""
    return [
        f"--output_dir={output}",
        f"--question_encoder.name_or_path={folder / 'questions'}",
        f"--generator.name_or_path={folder / 't5'}",
        f"--knowledge_base.source={folder / 'kb.jsonl'}",
        f"--data.train={folder / 'train.jsonl'}",
        f"--data.eval={folder / 'eval.jsonl'}",
        "--generator.target_max_length=6",
        "--retrieval.k=3",
        "--batch.document_chunk_size=3",
        "--optim.learning_rate=1e-3",
        "--optim.scheduler=constant",
        "--optim.warmup_ratio=0",
        "--optim.max_steps=4",
        "--index.factory=Flat",
        "--refresh.nice=0",
        "--logging.every_steps=1",
        "--engine.device=cpu",
    ]


def _hash(checkpoint: Path) -> str:
    """Of all parameters, whichever ranks wrote them."""
    from pixelrag.train.run_state import read_parts

    digest = hashlib.sha256()
    for name, tensor in sorted(read_parts(checkpoint, "model").items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def run(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Train; return the logged figures, the generations, and a hash of the final parameters.

    Args:
        world: this process's place.
        case: `folder` of the material, `name` of the run, further `flags`; `stop_at`, a step to end
            at and to go on from.
    """
    from pixelrag.train.rag import train

    folder = Path(case["folder"])
    output = folder / f"run-{case['name']}"
    from_main(lambda: shutil.rmtree(output, ignore_errors=True))
    size = f"--batch.per_device_batch_size={8 // world.world_size}"
    defaults = [*flags(folder, output), size]
    config, _ = load(RagConfig, [*defaults, *case.get("flags", [])])
    if "stop_at" in case:
        part = config.optim.model_copy(update={"max_steps": case["stop_at"]})
        train(config.model_copy(update={"optim": part}), world)
    train(config, world)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    names = ("train/loss", "train/grad_norm", "train/posterior_entropy", "index/age_steps")
    checkpoint = output / f"checkpoint-{steps[-1]['step']}"
    state = json.loads((checkpoint / "state.json").read_text())
    return {
        "steps": {name: [line[name] for line in steps] for name in names},
        "eval": next(line for line in reversed(lines) if "eval/recall@1" in line),
        "history": state["position"]["index"]["history"],
        "parameters": _hash(checkpoint),
        "exported": sorted(path.name for path in (output / "last").iterdir()),
    }
