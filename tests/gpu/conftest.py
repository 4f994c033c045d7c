"""One GPU, all three jobs: `python -m pytest -m gpu -rs`, in under five minutes.

Each test compares a run on the GPU with the same run in fp32 on the CPU. Where there is no CUDA,
the first case of each test runs on the CPU in place of the GPU, so that the tests themselves stay
whole; that is a rehearsal and says nothing about CUDA. Everything else is skipped, with its reason.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import distill_trials, rag_runs
from tests.train import nursery
from tests.train.material import image_rows, series, text_rows, write_jsonl

CUDA = torch.cuda.is_available()


def has(package: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(package) is not None


def gpus_of_faiss() -> int:
    """GPUs that the installed FAISS can use: 0 of faiss-cpu."""
    import faiss

    return faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else 0


def pytest_report_header() -> list[str]:
    if not CUDA:
        return ["gpu tests: no CUDA device; one case of each test is rehearsed on the CPU"]
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    optional = {"flash_attn": has("flash_attn"), "liger_kernel": has("liger_kernel")}
    optional["faiss-gpu"] = gpus_of_faiss() > 0
    there = ", ".join(f"{name} {'yes' if found else 'no'}" for name, found in optional.items())
    return [f"gpu tests: {torch.cuda.get_device_name()}, {versions}; {there}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


class Run:
    """A finished run: what it printed and the figures that it logged."""

    def __init__(self, output: Path, text: str) -> None:
        self.output = output
        self.text = text

    def series(self, name: str) -> list[float]:
        """One figure over the steps."""
        return series(self.output, name)


Train = Callable[..., Run]


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Runs `pixelrag JOB FLAGS` once for each name and device; returns its `Run`.

    With `then`, a run of that name goes on from its first checkpoint.
    """
    folder = tmp_path_factory.mktemp("gpu")
    known: dict[str, Run] = {}

    def _train(
        name: str, job: str, flags: Sequence[str], *, cuda: bool = True, then: Run | None = None
    ) -> Run:
        key = f"{name}-{'gpu' if cuda else 'cpu'}"
        if key not in known:
            output = folder / key
            if then is not None:
                later = shutil.ignore_patterns("checkpoint-[2-9]", "best", "last")
                shutil.copytree(then.output, output, ignore=later)
            arguments = [job, f"--output_dir={output}", *flags]
            arguments.append(f"--engine.device={'cuda' if cuda and CUDA else 'cpu'}")
            known[key] = Run(output, _on_gpu(arguments) if cuda and CUDA else _on_cpu(arguments))
        return known[key]

    return _train


def _on_cpu(arguments: list[str]) -> str:
    return nursery.run(arguments).check().outputs[0]


def _on_gpu(arguments: list[str]) -> str:
    env = os.environ | {"PYTHONPATH": str(nursery.ROOT), "OMP_NUM_THREADS": "4"}
    command = [sys.executable, "-m", "pixelrag", *arguments]
    ended = subprocess.run(
        command, env=env, timeout=240, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny models and data, one for each job."""
    from pixelrag.models.tiny import save_tiny_qwen3_vl

    folder = tmp_path_factory.mktemp("material")
    tiles = folder / "contrastive"
    tiles.mkdir()
    save_tiny_qwen3_vl(tiles / "model", hidden_size=64, num_layers=2)
    pairs = zip(image_rows(tiles / "tiles", 8), text_rows(8), strict=True)
    write_jsonl(tiles / "train.jsonl", [row for pair in pairs for row in pair])
    for name, make in (("distill", distill_trials.make_material), ("rag", rag_runs.make_material)):
        (folder / name).mkdir()
        make(folder / name)
    return {name: folder / name for name in ("contrastive", "distill", "rag")}


def cases(*values: Any) -> list[Any]:
    """Parameters of a test, of which only the first is rehearsed without CUDA."""
    mark = pytest.mark.skipif(not CUDA, reason="no CUDA device")
    return [pytest.param(value, marks=[mark] if i else []) for i, value in enumerate(values)]
