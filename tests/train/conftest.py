"""Models and data files that the training tests share, and one server to fork runs from."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train import nursery
from tests.train.material import command, image_rows, merged, text_rows, write_jsonl


@pytest.fixture(scope="session")
def shelf() -> Iterator[Path]:
    """A folder with models and data.

    `bert`, `bert_dropout`, `qwen3_vl`: models. `train.jsonl` (26 rows), `eval.jsonl` (9),
    `mixed.jsonl` (13 rows with texts and pictures), `mixed_eval.jsonl` (7).
    """
    from pixelrag.models.tiny import save_tiny_bert, save_tiny_qwen3_vl

    folder = Path(tempfile.mkdtemp(prefix="pixelrag-shelf-"))
    try:
        texts = [text for row in text_rows(60) for text in (row["query"], row["passage"])]
        save_tiny_bert(folder / "bert", texts=texts, vocab_size=300)
        save_tiny_bert(folder / "bert_dropout", texts=texts, vocab_size=300, dropout=0.1)
        save_tiny_qwen3_vl(folder / "qwen3_vl", num_layers=2)
        write_jsonl(folder / "train.jsonl", text_rows(26))
        write_jsonl(folder / "eval.jsonl", text_rows(9, first=40))
        pictures = image_rows(folder / "tiles", 12)
        mixed = [r for pair in zip(pictures[:7], text_rows(6), strict=False) for r in pair]
        write_jsonl(folder / "mixed.jsonl", [*mixed, pictures[6]])
        write_jsonl(folder / "mixed_eval.jsonl", [*pictures[7:], *text_rows(2, first=40)])
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def base(shelf: Path) -> dict[str, Any]:
    """A configuration of a few tiny steps; `output_dir` is the test's to name."""
    return {
        "model": {"name_or_path": str(shelf / "bert")},
        "data": {"train": str(shelf / "train.jsonl")},
        "batch": {"per_device_batch_size": 8, "chunk_size": 3},
        "optim": {"learning_rate": 1e-3, "max_steps": 4, "warmup_steps": 1},
        "engine": {"device": "cpu", "timeout_seconds": 60},
        "logging": {"every_steps": 1},
    }


@pytest.fixture
def settings(shelf) -> dict[str, Any]:
    """Dropout on, two batches a step, an epoch that ends in the middle of a step."""
    return {
        "model": {"name_or_path": str(shelf / "bert_dropout")},
        "data": {"eval": str(shelf / "eval.jsonl")},
        "batch": {"per_device_batch_size": 4, "gradient_accumulation_steps": 2},
        "optim": {"max_steps": 6, "warmup_steps": 2},
        "eval": {"every_steps": 2},
        # Where a run is killed right behind a checkpoint, that checkpoint must be there.
        "checkpoint": {"every_steps": 3, "best_metric": "eval/loss", "async_save": False},
        "logging": {"every_steps": 2},
    }


@pytest.fixture
def start(tmp_path, base, settings):
    """Starts the settings' run in a folder of that name."""

    def _start(name: str, *overrides: dict, **options: Any) -> nursery.Job:
        config = merged(base, settings, *overrides, {"output_dir": str(tmp_path / name)})
        return nursery.start(command(tmp_path, config), **options)

    return _start


@pytest.fixture(scope="session")
def classroom() -> Iterator[Path]:
    """A folder with a `teacher`, students `tied` and `untied`, and `chats.jsonl` (48 rows)."""
    from tests.distributed.distill_trials import make_material

    folder = Path(tempfile.mkdtemp(prefix="pixelrag-classroom-"))
    try:
        make_material(folder)
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def lesson(classroom: Path, tmp_path: Path) -> dict[str, Any]:
    """The configuration of a few tiny steps of distillation, of 4 rows in 2 micro-batches."""
    return {
        "output_dir": str(tmp_path / "run"),
        "student": {"name_or_path": str(classroom / "tied")},
        "teacher": {"name_or_path": str(classroom / "teacher")},
        "data": {"train": str(classroom / "chats.jsonl"), "eval_samples": 8},
        "packing": {"length": 96},
        "loss": {"chunk_size": 7},
        "batch": {"per_device_batch_size": 2, "gradient_accumulation_steps": 2},
        "optim": {"learning_rate": 1e-3, "max_steps": 3, "warmup_steps": 1},
        "engine": {"device": "cpu", "timeout_seconds": 60},
        "logging": {"every_steps": 1},
    }


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    """A folder with a knowledge base, questions and the models of `rag_runs.make_material`."""
    from tests.distributed.rag_runs import make_material

    folder = tmp_path_factory.mktemp("library")
    make_material(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def server() -> None:
    nursery.start_server()
