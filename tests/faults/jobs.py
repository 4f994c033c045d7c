"""The three jobs on tiny models, as command lines: what the fault tests and the soak run."""

from __future__ import annotations

from pathlib import Path

from tests.distributed import distill_trials, rag_runs
from tests.train.material import text_rows, write_jsonl

JOBS = ("contrastive", "distill", "rag")


def make_material(folder: Path, job: str) -> None:
    """Models and data of a job, into a folder of its own."""
    folder.mkdir(parents=True)
    if job == "distill":
        distill_trials.make_material(folder)
    elif job == "rag":
        rag_runs.make_material(folder)
    else:
        from pixelrag.models.tiny import save_tiny_bert

        texts = [text for row in text_rows(60) for text in (row["query"], row["passage"])]
        save_tiny_bert(folder / "bert", texts=texts, vocab_size=300, dropout=0.1)
        write_jsonl(folder / "train.jsonl", text_rows(26))
        write_jsonl(folder / "eval.jsonl", text_rows(9, first=40))


def arguments(folder: Path, job: str, output: Path, *flags: str) -> list[str]:
    """A run on two ranks with two batches a step where the job has them, and held-out rows."""
    own = {
        "contrastive": [
            f"--model.name_or_path={folder / 'bert'}",
            f"--data.train={folder / 'train.jsonl'}",
            f"--data.eval={folder / 'eval.jsonl'}",
            "--batch.per_device_batch_size=4",
            "--batch.chunk_size=3",
            "--batch.gradient_accumulation_steps=2",
        ],
        "distill": [
            f"--student.name_or_path={folder / 'tied'}",
            f"--teacher.name_or_path={folder / 'teacher'}",
            f"--data.train={folder / 'chats.jsonl'}",
            "--data.eval_samples=8",
            "--packing.length=96",
            "--loss.chunk_size=7",
            "--batch.per_device_batch_size=1",
            "--batch.gradient_accumulation_steps=2",
        ],
        "rag": [
            *rag_runs.flags(folder, output)[1:],
            "--batch.per_device_batch_size=4",
            "--refresh.every_steps=3",
            "--refresh.deterministic_lag=1",
        ],
    }[job]
    every = [
        f"--output_dir={output}",
        "--engine.device=cpu",
        "--optim.learning_rate=1e-3",
        "--logging.every_steps=1",
    ]
    return [job, *own, *every, *flags]
