"""`pixelrag eval`: measures a model on the held-out rows of a configuration, without training.

A retriever is measured against its documents, a student against its teacher, a RAG model on its
answers and on what it found for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.distill import DistillConfig
from pixelrag.config.rag import RagConfig
from pixelrag.console import say
from pixelrag.distributed.collectives import from_main
from pixelrag.distributed.env import World
from pixelrag.distributed.together import together
from pixelrag.errors import CheckpointError, ConfigError
from pixelrag.evaluate.answer_page import write_answers
from pixelrag.evaluate.answer_rows import answer_rows
from pixelrag.evaluate.bootstrap import bootstrap_interval
from pixelrag.evaluate.compare import (
    Measured,
    as_json,
    compare_sets,
    measured_json,
    read_measured,
    tables,
)
from pixelrag.evaluate.gallery import gallery_page, gallery_rows
from pixelrag.evaluate.retriever import RetrieverEvaluation
from pixelrag.evaluate.runs import qrels_text, run_text
from pixelrag.evaluate.sample_sheet import WrittenSample, sample_sheet
from pixelrag.losses.temperature import scale_and_bias
from pixelrag.models.biencoder import BiEncoder
from pixelrag.models.source import resolve_source, saved_settings
from pixelrag.retrieval.durable import put_text
from pixelrag.train import distill, rag
from pixelrag.train.biencoder import build_biencoder, build_evaluator
from pixelrag.train.job import engine_for, world_of
from pixelrag.train.query_side import Towers, tower_of_model
from pixelrag.train.rag_eval import RagEvaluation
from pixelrag.train.text_file import require_writable

RUN_DEPTH = 100
# What only a retriever's evaluation can give.
_RETRIEVER_ONLY = ("baseline", "run_file", "qrels_file", "gallery")
_PAGES = ("gallery", "samples")
_NAMES_DOCUMENTS = ("run_file", "qrels_file", "gallery")


def main(config: ContrastiveConfig | DistillConfig | RagConfig, own: Mapping[str, str]) -> int:
    """Print the figures of the model on the held-out rows; returns the exit code.

    Args:
        config: a training configuration; what concerns training is not used.
        own: ``output``: a JSON file to write, with every query's metrics, for paired tests;
            ``samples``: of a student, an HTML page of what it writes;
            ``answers``: a folder to write a RAG model's answers to, with their passages; for
            retrievers ``run_file`` and ``qrels_file``, TREC files to write, ``gallery``, an HTML
            page of queries and what was found, and ``baseline``, what to compare with: a model, or
            what an earlier evaluation wrote to ``output``.

    Raises:
        ConfigError: no held-out rows, or a flag that asks for what the job does not have.
        CheckpointError: a file cannot be written.
    """
    _refuse(config, own)
    with world_of(config) as world:
        baseline = None
        if isinstance(config, ContrastiveConfig) and "baseline" in own:
            baseline = _baseline(config, own["baseline"], world)
        named = not own.keys().isdisjoint(_NAMES_DOCUMENTS)
        measured = _measure(config, world, named=named, writes="samples" in own)
        lines = _lines(measured)
        content = measured.content | {"data": list(config.data.eval or config.data.train)}
        if baseline is not None:
            compared = compare_sets(baseline, measured.sets)
            content |= {"baseline": own["baseline"], "comparison": as_json(compared)}
            lines += ["", f"baseline {own['baseline']}", *tables(compared)]
        if world.is_main:
            say("\n".join(lines))
        if "output" in own:
            from_main(lambda: _write(json.dumps(content), "output", own))
        found, answered = measured.retriever, measured.rag
        if found is not None and "run_file" in own:
            from_main(lambda: _write(run_text(found.run, "pixelrag"), "run_file", own))
        if found is not None and "qrels_file" in own:
            from_main(lambda: _write(qrels_text(found.qrels), "qrels_file", own))
        if found is not None and "gallery" in own:
            from_main(lambda: _write(_gallery(found), "gallery", own))
        if isinstance(config, DistillConfig) and "samples" in own:
            title = f"What {config.student.name_or_path} writes"
            sheet = sample_sheet(measured.samples, measured.figures, title=title)
            from_main(lambda: _write(sheet, "samples", own))
        if answered is not None and "answers" in own:
            from_main(lambda: _show(answered, Path(own["answers"])))
    return 0


@dataclass(frozen=True, slots=True)
class _Measured:
    """What an evaluation gave.

    Attributes:
        figures: by name.
        details: what else `--output` tells.
        sets: every query's figures, by the set of queries.
        values: what each figure is the mean of, by its name, where it is one.
        rag, retriever: the evaluation itself, of such a job.
        samples: what a student wrote.
    """

    figures: dict[str, float]
    details: dict[str, Any]
    sets: dict[str, Measured] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    rag: RagEvaluation | None = None
    retriever: RetrieverEvaluation | None = None
    samples: list[WrittenSample] = field(default_factory=list)

    @property
    def content(self) -> dict[str, Any]:
        """As `--output` has it."""
        return {**self.details, "figures": self.figures, "measured": measured_json(self.sets)}


def _refuse(config: ContrastiveConfig | DistillConfig | RagConfig, own: Mapping[str, str]) -> None:
    held_out: object = getattr(config.eval, "miniv8", None)
    if isinstance(config, DistillConfig):
        held_out = config.data.eval_samples
    if not config.data.eval and not held_out:
        raise ConfigError("data.eval: got no files; name the held-out rows to evaluate on")
    asked = [f"--{name}" for name in _RETRIEVER_ONLY if name in own]
    if asked and not isinstance(config, ContrastiveConfig):
        raise ConfigError(
            f"{', '.join(asked)}: only for retrievers; write --output of two models and compare "
            "the files with `pixelrag compare`"
        )
    ranks = isinstance(config, ContrastiveConfig) and config.eval.retrieval and config.data.eval
    if asked and not ranks:
        others = ["--baseline"] if held_out is not None else []
        if asked != others:
            raise ConfigError(
                f"{', '.join(asked)}: needs data.eval, and eval.retrieval true, to rank documents"
            )
    for name in _PAGES:
        if name in own and not own[name].endswith(".html"):
            raise ConfigError(f"--{name}: got {own[name]}, expected a name that ends in .html")
    if "samples" in own and not isinstance(config, DistillConfig):
        raise ConfigError("--samples: only a student writes samples; leave it out")
    if "answers" not in own:
        return
    if not isinstance(config, RagConfig):
        raise ConfigError("--answers: only a RAG model writes answers; leave it out")
    if not config.eval.answers:
        raise ConfigError(
            "--answers with eval.answers false: no answers are written; set eval.answers true, or "
            "leave --answers out"
        )
    require_writable(Path(own["answers"]), "--answers")


def _baseline(config: ContrastiveConfig, baseline: str, world: World) -> dict[str, Measured]:
    """The baseline's figures: read from a file, or measured as the model's own are."""
    path = Path(baseline)
    if path.suffix == ".json" and path.is_file():
        return from_main(lambda: read_measured(path))
    with together():
        resolve_source(baseline, setting="--baseline")
    model = config.model.model_copy(update={"name_or_path": baseline})
    # Its answers to questions would be compared with nothing.
    mute = dict.fromkeys(("reader_url", "reader_model", "grader_url", "grader_model"))
    changed = {"model": model, "eval": config.eval.model_copy(update=mute)}
    return evaluate(config.model_copy(update=changed), world).measured


def _measure(
    config: ContrastiveConfig | DistillConfig | RagConfig,
    world: World,
    *,
    named: bool,
    writes: bool,
) -> _Measured:
    details: dict[str, Any]
    if isinstance(config, RagConfig):
        answered = rag.evaluate(config, world)
        details = {
            "model": config.generator.name_or_path,
            "question_encoder": config.question_encoder.name_or_path,
            "answers": [item.to_json() for item in answered.answered],
        }
        queries = [item.question.sample_id for item in answered.answered]
        # What is known of some questions only has an interval, but no place in a paired test.
        whole = {k: v for k, v in answered.per_question.items() if len(v) == len(queries)}
        values = {f"eval/{name}": value for name, value in answered.per_question.items()}
        sets = {"eval": Measured(queries, whole)} if whole else {}
        return _Measured(answered.figures, details, sets, values, rag=answered)
    if isinstance(config, DistillConfig):
        details = {"model": config.student.name_or_path, "teacher": config.teacher.name_or_path}
        taught = distill.evaluate(config, world, writes=writes)
        return _Measured(taught.figures, details, samples=taught.samples)
    found = evaluate(config, world, run_depth=RUN_DEPTH if named else 0)
    details = {"model": config.model.name_or_path}
    if found.answers:
        details["answers"] = [answer.to_json() for answer in found.answers]
    values = {
        f"{name}/{figure}": np.asarray(value)
        for name, one in found.measured.items()
        for figure, value in one.per_query.items()
    }
    return _Measured(found.figures, details, found.measured, values, retriever=found)


def evaluate(config: ContrastiveConfig, world: World, *, run_depth: int = 0) -> RetrieverEvaluation:
    """Load the model and evaluate it; a collective. See `PairEvaluator` for ``run_depth``."""
    container, preprocessor = build_biencoder(config)
    evaluator = build_evaluator(config, world, preprocessor)
    scale, bias = _scale_and_bias(config, container)
    engine = engine_for(config, world, container, container.encoder.blocks())
    documents = tower_of_model(config, world)
    encoder = engine if documents is None else Towers(engine, documents)
    assert evaluator is not None  # see `_refuse`
    return evaluator(encoder, scale, bias, run_depth=run_depth)


def _scale_and_bias(
    config: ContrastiveConfig, container: BiEncoder
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the model was exported with; the configuration's, of a model that brings nothing."""
    scale, bias = scale_and_bias(container.logit_scale().detach())
    model = config.model
    if model.training_state is None:
        saved = saved_settings(resolve_source(model.adapter or model.name_or_path))
        if "temperature" in saved:
            scale = torch.full_like(scale, 1.0 / saved["temperature"])
        if bias is not None and "bias" in saved:
            bias = torch.full_like(bias, saved["bias"])
    return scale, bias


def _lines(measured: _Measured) -> list[str]:
    lines = []
    for name, value in measured.figures.items():
        line = f"{name:<16} {value:.4f}"
        if name in measured.values:
            interval = bootstrap_interval(measured.values[name], seed=0)
            line += f"   95 % interval {interval.low:.4f} to {interval.high:.4f}"
        lines.append(line)
    return lines


def _write(text: str, flag: str, own: Mapping[str, str]) -> None:
    path = Path(own[flag])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        put_text(path, text)
    except OSError as error:
        raise CheckpointError(f"--{flag} {path}: cannot be written: {error.strerror}") from error
    say(f"wrote {path}")


def _gallery(found: RetrieverEvaluation) -> str:
    rows = gallery_rows(found.run, found.qrels, found.documents, found.texts)
    return gallery_page(rows, found.figures, title="What was found")


def _show(evaluation: RagEvaluation, folder: Path) -> None:
    rows = list(answer_rows(evaluation.answered, evaluation.passages))
    title = f"{len(rows)} held-out questions"
    write_answers(folder, rows, evaluation.figures, title=title)
    say(f"wrote {folder}/answers.jsonl and {folder}/answers.html")
