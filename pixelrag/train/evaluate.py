"""`pixelrag eval`: measures a model on the held-out rows of a configuration, without training.

A retriever is measured against its documents, a student against its teacher, a RAG model on its
answers and on what it found for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.distill import DistillConfig
from pixelrag.config.rag import RagConfig
from pixelrag.console import say
from pixelrag.distributed.collectives import from_main
from pixelrag.distributed.env import World
from pixelrag.errors import CheckpointError, ConfigError
from pixelrag.evaluate.bootstrap import bootstrap_interval
from pixelrag.evaluate.pairs import PairEvaluation
from pixelrag.train import distill, rag
from pixelrag.train.contrastive import build_biencoder, build_evaluator
from pixelrag.train.job import engine_for, world_of


def main(config: ContrastiveConfig | DistillConfig | RagConfig, own: Mapping[str, str]) -> int:
    """Print the figures of the model on the held-out rows; returns the exit code.

    Args:
        config: a training configuration; what concerns training is not used.
        own: ``output``: a JSON file to write, with every query's metrics, for paired tests.

    Raises:
        ConfigError: no held-out rows.
        CheckpointError: the output file cannot be written.
    """
    taught = isinstance(config, DistillConfig)
    if not config.data.eval and not (taught and config.data.eval_samples):
        raise ConfigError("data.eval: got no files; name the held-out rows to evaluate on")
    with world_of(config) as world:
        if isinstance(config, RagConfig):
            answered = rag.evaluate(config, world)
            figures, model = answered.figures, config.generator.name_or_path
            per_query = {name: v.tolist() for name, v in answered.per_question.items()}
            details = {
                "question_encoder": config.question_encoder.name_or_path,
                "per_query": per_query,
                "answers": [item.to_json() for item in answered.answered],
            }
            lines = _lines(figures, answered.per_question)
        elif taught:
            figures = distill.evaluate(config, world)
            model, details = config.student.name_or_path, {"teacher": config.teacher.name_or_path}
            lines = [f"{name:<16} {value:.4f}" for name, value in figures.items()]
        else:
            evaluation = evaluate(config, world)
            figures, model = evaluation.figures, config.model.name_or_path
            per_query = {name: values.tolist() for name, values in evaluation.per_query.items()}
            details, lines = {"per_query": per_query}, _lines(figures, evaluation.per_query)
        if world.is_main:
            say("\n".join(lines))
        if "output" in own:
            data = list(config.data.eval or config.data.train)
            content = {"model": model, "data": data, "figures": figures, **details}
            from_main(lambda: _write(content, Path(own["output"])))
    return 0


def evaluate(config: ContrastiveConfig, world: World) -> PairEvaluation:
    """Load the model and evaluate it; a collective."""
    container, preprocessor = build_biencoder(config)
    evaluator = build_evaluator(config, world, preprocessor)
    engine = engine_for(config, world, container, container.encoder.blocks())
    return evaluator(engine, 1.0 / config.loss.temperature)


def _lines(figures: Mapping[str, float], per_query: Mapping[str, np.ndarray]) -> list[str]:
    lines = []
    for name, value in figures.items():
        line = f"{name:<16} {value:.4f}"
        values = per_query.get(name.removeprefix("eval/"))
        if values is not None:
            interval = bootstrap_interval(values, seed=0)
            line += f"   95 % interval {interval.low:.4f} to {interval.high:.4f}"
        lines.append(line)
    return lines


def _write(content: Mapping[str, Any], path: Path) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"--output {path}: cannot be written: {error.strerror}") from error
