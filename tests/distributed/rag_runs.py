"""Runs of the RAG job on tiny models, and what they logged and left behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from pixelrag.config.base import load
from pixelrag.config.rag import RagConfig
from pixelrag.distributed.collectives import from_main
from pixelrag.distributed.env import World
from pixelrag.errors import PixelragError

THINGS = (
    "fox", "dog", "engine", "file", "parser", "table", "figure", "query", "line", "word", "number",
    "string", "list", "name", "value", "page",
)  # fmt: skip
COLORS = ("brown", "lazy", "quick", "red", "blue", "green")


def make_material(folder: Path) -> None:
    """Passages, questions, and tiny models that read and answer them."""
    from PIL import Image

    from pixelrag.models.tiny import save_tiny_bert, save_tiny_qwen3_vl
    from pixelrag.models.tiny_causal import save_tiny_causal
    from pixelrag.models.tiny_seq2seq import save_tiny_seq2seq

    passages = [
        {"id": f"p{i}", "title": thing, "text": f"the {thing} is {COLORS[i % 6]}"}
        for i, thing in enumerate(THINGS)
    ]
    questions = [
        {
            "question": f"what is the {thing}",
            "answers": [COLORS[i % 6], f"it is {COLORS[i % 6]}"],
            "passage_ids": [f"p{i}"],
        }
        for i, thing in enumerate(THINGS)
    ]
    Image.effect_noise((48, 32), 90).convert("RGB").save(folder / "tile.png")
    mixed = [{"id": "tile", "title": "", "chunk_path": "tile.png"}, *passages]
    # Nine rows make a batch of eight and one of one: with two ranks, one of them has none.
    files = {"kb": passages, "train": questions[:9], "eval": questions[9:], "mixed": mixed}
    for name, rows in files.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    texts = [passage["text"] for passage in passages]
    for name, seed in (("questions", 1), ("passages", 2)):
        save_tiny_bert(folder / name, texts=texts, hidden_size=16, seed=seed)
    save_tiny_seq2seq(folder / "t5", "t5", texts=texts, hidden_size=16)
    save_tiny_causal(folder / "decoder", "qwen3", texts=texts, hidden_size=16)
    save_tiny_qwen3_vl(folder / "vision", texts=texts, hidden_size=16, vision_size=16)
    _save_constant_dpr(folder, texts)


def _save_constant_dpr(folder: Path, texts: list[str]) -> None:
    """DPR encoders to which all texts are alike."""
    from transformers import DPRConfig, DPRContextEncoder, DPRQuestionEncoder

    from pixelrag.models.tiny_tokenizer import wordpiece_tokenizer

    tokenizer = wordpiece_tokenizer(texts)
    config = DPRConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    for name, kind in (("dpr_question", DPRQuestionEncoder), ("dpr_passage", DPRContextEncoder)):
        model = kind(config)
        for key, weight in model.named_parameters():
            if "word_embeddings" in key or "position_embeddings" in key:
                weight.data[:] = weight.data[5]
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


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


def config_of(world: World, case: dict[str, Any]) -> RagConfig:
    """The configuration of a case; see `run`."""
    folder = Path(case["folder"])
    defaults = flags(folder, folder / f"run-{case['name']}")
    size = f"--batch.per_device_batch_size={8 // world.world_size}"
    return load(RagConfig, [*defaults, size, *case.get("flags", [])])[0]


def run(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Train; return the logged figures, the generations, and a hash of the final parameters.

    Args:
        world: this process's place.
        case: `folder` of the material, `name` of the run, further `flags`; `stop_at`, a
            step to end at and to go on from; `raises`: return the error instead; `there`: a run
            in whose folder to begin.
    """
    if "then" in case:
        return globals()[case["then"]](world, case)
    from pixelrag.train.rag import train

    config = config_of(world, case)
    output = Path(config.output_dir)
    if "there" not in case:
        from_main(lambda: shutil.rmtree(output, ignore_errors=True))
    if "stop_at" in case:
        part = config.optim.model_copy(update={"max_steps": case["stop_at"]})
        train(config.model_copy(update={"optim": part}), world)
    with _warnings() as warnings:
        try:
            train(config, world)
        except PixelragError as error:
            if "raises" not in case:
                raise
            return {"raised": f"{type(error).__name__}: {error}"}
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    names = (
        "train/loss", "train/grad_norm", "train/posterior_entropy", "index/age_steps",
        "index/drift", "index/generation",
    )  # fmt: skip
    checkpoint = output / f"checkpoint-{steps[-1]['step']}"
    state = json.loads((checkpoint / "state.json").read_text())
    exported = sorted(path.name for path in (output / "last").iterdir())
    return {
        "steps": {name: [line.get(name) for line in steps] for name in names},
        "eval": next(line for line in reversed(lines) if "eval/recall@1" in line),
        "history": state["position"]["index"]["history"],
        "parameters": sorted(_digests(checkpoint)),
        "exported": exported,
        "exported_as_trained": _digests(output / "last") <= _digests(checkpoint),
        "changed": [name for name in exported if _changed(config, name)] if world.is_main else [],
        "generations": sorted(path.name for path in (output / "index").glob("gen-*")),
        "warnings": warnings,
    }


def _digests(folder: Path) -> set[str]:
    """Of all tensors below a folder, whatever they are called."""
    tensors = [t for path in folder.rglob("model*.safetensors") for t in load_file(path).values()]
    assert tensors
    return {hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for t in tensors}


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("pixelrag")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def _changed(config: RagConfig, name: str) -> bool:
    """Whether an exported part differs from what it was, in any bit."""
    from pixelrag.config.rag_models import EncoderConfig, GeneratorConfig
    from pixelrag.models import load_embedder
    from pixelrag.models.generator_load import load_generator

    is_generator = name == "generator"
    load_it, section = (
        (load_generator, GeneratorConfig) if is_generator else (load_embedder, EncoderConfig)
    )
    folders = getattr(config, name).name_or_path, Path(config.output_dir) / "last" / name
    states = [load_it(section(name_or_path=str(path)))[0].state_dict() for path in folders]
    return any(not states[0][key].equal(value) for key, value in states[1].items())


class _Found:
    """Finds the tile for the first half of the questions, and texts alone for the others."""

    def __call__(self, engine, generation, questions, own, k):
        from pixelrag.train.rag_retrieve import Retrieved

        half = len(questions) // 2
        rows = [[0, 1] if i < half else [2, 3, 4] for i in range(own.start, own.stop)]
        return Retrieved(rows, [[0.5, 0.4, 0.3][: len(r)] for r in rows], 1.0, False, None)


def written(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Answers of a sharded vision model whose tiles are all on one rank."""
    from pixelrag.train.job import engine_for
    from pixelrag.train.rag_data import build_parts, open_data
    from pixelrag.train.rag_eval import RagEvaluator

    config = config_of(world, case)
    data = open_data(config)
    parts = build_parts(config)
    engine = engine_for(config, world, parts.container, parts.container.blocks())
    evaluator = RagEvaluator(config, data.passages, parts, data.held_out, _Found())
    told = evaluator(engine, SimpleNamespace(generation=None))
    return {"answers": [answer.answer for answer in told.answered]}
