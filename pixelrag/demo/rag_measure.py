"""Measures RAG models with passages encoded and indexed by them, and shows the answers."""

from __future__ import annotations

from pathlib import Path

from pixelrag.config.base import load
from pixelrag.config.rag import RagConfig
from pixelrag.distributed.env import process_group
from pixelrag.evaluate.answer_page import write_answers
from pixelrag.evaluate.answer_rows import answer_rows
from pixelrag.train import rag


def measure(config_file: Path, output: Path, *, models: Path | None = None) -> dict[str, list]:
    """Evaluate on the held-out questions with a fresh index, in this process.

    Args:
        config_file: of the run.
        output: folder to work in, and for `answers.jsonl` and `answers.html`.
        models: folder that the run exported; None = the models that the configuration names.

    Returns:
        Of each measure (`em`, `f1`, `recall@1`, ...) the value of every question.
    """
    output.mkdir(parents=True, exist_ok=True)
    flags = ["--config", str(config_file), "--output_dir", str(output)]
    if models is not None:
        for part in ("question_encoder", "document_encoder", "generator"):
            flags += [f"--{part}.name_or_path", str(models / part)]
    config, _ = load(RagConfig, flags)
    with process_group("cpu", config.engine.timeout_seconds) as world:
        evaluation = rag.evaluate(config, world)
    rows = list(answer_rows(evaluation.answered, evaluation.passages))
    title = f"{len(rows)} held-out questions: {output.name}"
    write_answers(output, rows, evaluation.figures, title=title)
    return {name: values.tolist() for name, values in evaluation.per_question.items()}
