"""What rows are thought to cost, and that sharing them out by it changes no gradient."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from pixelrag.config.parts import ModelConfig
from pixelrag.data.costs import images_of, row_costs
from pixelrag.data.images import count_pixels
from pixelrag.data.sampler import GlobalBatchSampler
from pixelrag.data.schema import Document, PairRow
from pixelrag.models import load_embedder
from pixelrag.train.batches import PairCollator

LIMITS = {"query_max_length": 8, "document_max_length": 100, "max_visual_tokens": 10}


def test_texts_count_their_characters_and_images_their_pixels_up_to_the_limits(
    tiles: list[Path],
) -> None:
    texts = [Document.of_text("a" * 40), Document.of_text("b" * 4000)]
    images = [Document.of_image(tiles[0]), Document.of_image(tiles[3])]
    rows = [
        PairRow("q" * 16, (texts[0],), (texts[1],), "texts"),
        PairRow("q" * 400, (images[0],), (images[1], images[0]), "images"),
    ]
    pixels = count_pixels(images_of(rows))
    assert pixels == {tiles[0]: 64 * 96, tiles[3]: 128 * 160}
    costs = row_costs(rows, pixels, **LIMITS)
    assert costs.tolist() == [4 + 10 + 100 + 2 * 3, 8 + 2 * (6 + 10 + 6) + 2 * 4]
    assert row_costs(rows[1:], {}, **LIMITS).tolist() == [8 + 2 * 30 + 2 * 4]


def test_the_gradient_of_a_batch_does_not_depend_on_who_holds_which_row(
    tiny_models: dict[str, Path],
) -> None:
    embedder, preprocessor = load_embedder(
        ModelConfig(name_or_path=str(tiny_models["bert"])), dtype=torch.float64
    )
    words = np.random.default_rng(1).lognormal(2, 1, 16).astype(int) + 1
    rows = [
        PairRow(
            f"what is {i}",
            (Document.of_text(f"it is {i}" + " or so" * length),),
            tuple(Document.of_text(f"it is not {i}{n}") for n in range(i % 3)),
            str(i),
        )
        for i, length in enumerate(words.tolist())
    ]
    costs = row_costs(rows, {}, **LIMITS)
    collator = PairCollator(rows, preprocessor)

    def gradient(world_size: int, known: np.ndarray | None) -> torch.Tensor:
        """Of the loss over all ranks, each summing over its own queries."""
        embedder.zero_grad()
        samplers = [
            GlobalBatchSampler(16, 16, rank, world_size, costs=known) for rank in range(world_size)
        ]
        parts = [collator[sampler.local_batch(0)] for sampler in samplers]
        documents = [embedder(**part.documents) for part in parts]
        start, loss = 0, 0.0
        for part, own in zip(parts, documents, strict=True):
            logits_BN = 10 * embedder(**part.queries) @ torch.cat(documents).T
            answers_B = part.positive_BK[:, 0] + start
            loss = loss + F.cross_entropy(logits_BN, answers_B, reduction="sum") / 16
            start += len(own)
        loss.backward()
        return torch.cat([p.grad.flatten() for p in embedder.parameters()])

    expected = gradient(1, None)
    for world_size in (2, 4):
        got = gradient(world_size, costs)
        assert (got - expected).norm() / expected.norm() < 1e-10
