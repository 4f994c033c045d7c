"""`pixelrag eval`: measures a model on the held-out rows of a configuration, without training."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.distributed.collectives import from_main
from pixelrag.distributed.env import World, process_group, read_ranks
from pixelrag.errors import CheckpointError, ConfigError
from pixelrag.evaluate.bootstrap import bootstrap_interval
from pixelrag.evaluate.pairs import PairEvaluation
from pixelrag.train.contrastive import build_biencoder, build_evaluator
from pixelrag.train.job import engine_for, show_log


def main(config: ContrastiveConfig, own: Mapping[str, str]) -> int:
    """Print the figures of ``model.name_or_path`` on ``data.eval``; returns the exit code.

    Args:
        config: a training configuration; what concerns training is not used.
        own: ``output``: a JSON file to write, with every query's metrics, for paired tests.

    Raises:
        ConfigError: no held-out rows.
        CheckpointError: the output file cannot be written.
    """
    if not config.data.eval:
        raise ConfigError("data.eval: got no files; name the held-out rows to evaluate on")
    show_log(read_ranks()[0])
    with process_group(config.engine.device, config.engine.timeout_seconds) as world:
        evaluation = evaluate(config, world)
        if world.is_main:
            _print(evaluation)
        if "output" in own:
            from_main(lambda: _write(evaluation, config, Path(own["output"])))
    return 0


def evaluate(config: ContrastiveConfig, world: World) -> PairEvaluation:
    """Load the model and evaluate it; a collective."""
    container, preprocessor = build_biencoder(config)
    evaluator = build_evaluator(config, world, preprocessor)
    engine = engine_for(config, world, container, container.encoder.blocks())
    return evaluator(engine, 1.0 / config.loss.temperature)


def _print(evaluation: PairEvaluation) -> None:
    for name, value in evaluation.figures.items():
        line = f"{name:<16} {value:.4f}"
        values = evaluation.per_query.get(name.removeprefix("eval/"))
        if values is not None:
            interval = bootstrap_interval(values, seed=0)
            line += f"   95 % interval {interval.low:.4f} to {interval.high:.4f}"
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _write(evaluation: PairEvaluation, config: ContrastiveConfig, path: Path) -> None:
    content = {
        "model": config.model.name_or_path,
        "data": list(config.data.eval),
        "figures": evaluation.figures,
        "per_query": {name: values.tolist() for name, values in evaluation.per_query.items()},
    }
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"--output {path}: cannot be written: {error.strerror}") from error
