"""Tiny models and images, each written once a session, and a rig for refreshes."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

if TYPE_CHECKING:
    from tests.unit.refresh_rig import Rig


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the tiny models: `bert`, `qwen3`, `qwen3_vl`, and `bert_dropout`."""
    from pixelrag.models.tiny import save_tiny_bert, save_tiny_qwen3, save_tiny_qwen3_vl

    root = tmp_path_factory.mktemp("models")
    return {
        "bert": save_tiny_bert(root / "bert"),
        "bert_dropout": save_tiny_bert(root / "bert_dropout", dropout=0.2),
        "qwen3": save_tiny_qwen3(root / "qwen3"),
        "qwen3_vl": save_tiny_qwen3_vl(root / "qwen3_vl"),
    }


@pytest.fixture(scope="session")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four images of unlike sizes (6, 8, 1 and 20 visual tokens)."""
    root = tmp_path_factory.mktemp("tiles")
    generator = np.random.default_rng(0)
    paths = []
    for index, (height, width) in enumerate([(64, 96), (130, 50), (32, 32), (128, 160)]):
        pixels = generator.integers(0, 255, (height, width, 3), dtype=np.uint8)
        paths.append(root / f"{index}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths


@pytest.fixture
def rig(tmp_path: Path) -> Iterator["Rig"]:
    """A run's index folder with one old generation; ends every process that a test has left."""
    from tests.unit.rag_stand_ins import make_generation
    from tests.unit.refresh_rig import Rig, processes_of, wait_until

    rig = Rig(tmp_path)
    make_generation(rig.generations.root, 1, step=0)
    yield rig
    for refresher in rig.refreshers:
        refresher.close()
    wait_until(lambda: not processes_of(tmp_path))
