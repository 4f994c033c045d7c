"""Models and batches of the matrix: tiny, deterministic, built offline from real architectures.

The model is a Qwen3-VL with random weights (rotary attention, deepstack, uneven image grids); its
LoRA adapters start from random numbers, since the usual zeros would hide half of the gradient.
Ranks hold different numbers of rows, so the last chunks, and the gathered tensors, are uneven.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import nn

from pixelrag.config.contrastive import RetrieverConfig
from pixelrag.config.parts import LoraConfig
from pixelrag.data.content import content_of
from pixelrag.data.schema import Document
from pixelrag.gradcache.step import Pairs
from pixelrag.models.biencoder import BiEncoder
from pixelrag.models.load import load_embedder
from pixelrag.models.preprocess import Preprocessor
from pixelrag.models.tiny import save_tiny_qwen3_vl
from pixelrag.verify.cases import Case

_WORDS = ("index", "page", "table", "memory", "tile", "query", "answer", "vector", "scale", "rank")
_IMAGE_SIZES = ((32, 32), (64, 32), (64, 64), (32, 96), (96, 64))
_ROWS = (3, 2, 3, 1)  # by rank, repeating
_TEMPERATURE = 0.2
# Adapters and weights that train; `Case.training` names them.
_TRAINING = {
    "full": (LoraConfig(), None),
    "lora": (LoraConfig(enabled=True, r=4, alpha=8, vision="all"), None),
    "dora": (
        LoraConfig(
            enabled=True, r=4, alpha=8, vision="attention", vision_r=3, merger=True,
            dora=True, rslora=True,
        ),
        None,
    ),
    "lora and unfrozen": (LoraConfig(enabled=True, r=4, alpha=8), ["vision", "merger"]),
}  # fmt: skip


def write_inputs(folder: Path) -> None:
    """Write the tiny models (with and without dropout) and a few images into ``folder``."""
    from PIL import Image

    for dropout in (False, True):
        save_tiny_qwen3_vl(
            model_folder(folder, dropout), num_layers=2, dropout=0.2 if dropout else 0.0
        )
    generator = torch.Generator().manual_seed(3)
    for index, (width, height) in enumerate(_IMAGE_SIZES):
        noise = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(folder / f"image{index}.png")


def model_folder(folder: Path, dropout: bool) -> Path:
    """Where ``write_inputs`` put a model."""
    return folder / ("model-dropout" if dropout else "model")


def load_biencoder(
    folder: Path, training: str, dropout: bool, dtype: torch.dtype, *, unpadded: bool = True
) -> tuple[BiEncoder, Preprocessor]:
    """Load the container of a case; equal arguments give equal numbers in any dtype.

    Args:
        folder: as given to ``write_inputs``.
        training: ``full``, ``lora`` (vision tower included), ``dora`` (rsLoRA and the merger too)
            or ``lora and unfrozen`` (adapters on the text part, vision tower and merger whole).
        dropout: attention dropout 0.2, and LoRA dropout 0.2.
        dtype: float32, or float64 for the reference.
        unpadded: compute no padding.
    """
    lora, unfrozen = _TRAINING[training]
    lora = lora.model_copy(update={"dropout": 0.2 if dropout else 0.0})
    name = str(model_folder(folder, dropout))
    model = RetrieverConfig(name_or_path=name, unfrozen=unfrozen, unpadded=unpadded)
    embedder, preprocessor = load_embedder(model, lora, dtype=dtype)
    _randomise_adapters(embedder)
    container = BiEncoder(embedder, temperature=_TEMPERATURE)
    container.logit_scale.to(dtype)
    if dtype == torch.float64:
        # ln(1/t) in float64 would differ from the float32 engines' starting point.
        container.logit_scale.log_scale.data = container.logit_scale.log_scale.data.float().double()
    return container.train(), preprocessor


def _randomise_adapters(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(11)
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            values = torch.randn(parameter.shape, generator=generator) * 0.1
            if "lora_magnitude_vector" in name:  # a length, which starts as the weight's own
                values = parameter.data * (1 + values)
            parameter.data = values.to(parameter.dtype)


def rows_of_rank(rank: int) -> int:
    """How many queries a rank holds."""
    return _ROWS[rank % len(_ROWS)]


def batch_of_rank(
    case: Case, rank: int, folder: Path, preprocessor: Preprocessor
) -> tuple[dict, dict, Pairs]:
    """Return queries, documents and what is known of them; any process can build any rank's."""
    rng = random.Random(f"{rank}/{case.negatives}/{case.modality}")
    queries, positives = [], []
    documents: list[Document] = []
    with_images = case.modality == "images" or (case.modality != "text" and rank == 0)
    for _ in range(rows_of_rank(rank)):
        queries.append(_words(rng, 1, 6))
        count = {"0": 0, "2": 2, "ragged": rng.randint(0, 2)}[case.negatives]
        # With the loss's options a query's first negative is a second positive.
        second = len(documents) + 1 if count and case.loss == "options" else -1
        positives.append([len(documents), second])
        documents += [_document(rng, folder, with_images) for _ in range(1 + count)]
    return (
        preprocessor.queries(queries),
        preprocessor.documents(documents),
        Pairs(
            torch.tensor(positives),
            torch.tensor(list(map(content_of, documents))) if case.loss == "options" else None,
        ),
    )


def _words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(least, most)))


def _document(rng: random.Random, folder: Path, with_images: bool) -> Document:
    # A few text documents among the images: some chunks of an image batch have none.
    if with_images and rng.random() < 0.8:
        return Document.of_image(folder / f"image{rng.randrange(len(_IMAGE_SIZES))}.png")
    return Document.of_text(_words(rng, 2, 10))
