"""Measures RAG models with passages encoded and indexed by them, and shows the answers."""

from __future__ import annotations

from pathlib import Path

from pixelrag.config.base import load
from pixelrag.config.rag import RagConfig
from pixelrag.data.passages import load_passages
from pixelrag.distributed.env import process_group
from pixelrag.evaluate.answer_page import answer_page, answer_rows, answers_jsonl
from pixelrag.train import rag
from pixelrag.train.text_file import replace_text


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
    passages = load_passages(config.knowledge_base.source, split="none")
    rows = list(answer_rows(evaluation.answered, passages))
    replace_text(output / "answers.jsonl", answers_jsonl(rows))
    title = f"{len(rows)} held-out questions: {output.name}"
    replace_text(output / "answers.html", answer_page(rows, evaluation.figures, title=title))
    return {name: values.tolist() for name, values in evaluation.per_question.items()}
