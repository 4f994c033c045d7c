"""A toy bi-encoder with a vision branch, its data, and a float64 reference of one process.

The reference shares no code with the package beyond the random generator: it runs whole-batch
autograd over a loss written out here, so that a fault in the package cannot hide in it. Options of
the loss are written out in `verify.naive`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from pixelrag.gradcache import split_batch
from pixelrag.losses.contrastive import Objective
from pixelrag.losses.temperature import LogitScale
from pixelrag.train.averaging import AveragedAdamW
from pixelrag.verify.naive import naive_loss

VOCABULARY, WIDTH, PATCH_WIDTH, EMBEDDING = 40, 12, 5, 7
LEARNING_RATE = 1e-2


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)  # odd sizes: shards come out unequal
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_BW: torch.Tensor) -> torch.Tensor:
        return hidden_BW + self.dropout(self.down(torch.tanh(self.up(self.norm(hidden_BW)))))


class ToyEncoder(nn.Module):
    """Mean of token vectors, plus the mean of each image's patches, through residual layers.

    With ``tied`` the token table also serves as an output layer.
    """

    def __init__(
        self, dropout: float = 0.0, *, checkpointing: bool = False, tied: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.visual = nn.Sequential(nn.Linear(PATCH_WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH))
        self.layers = nn.ModuleList([Block(dropout) for _ in range(2)])
        self.head = nn.Linear(WIDTH, EMBEDDING)
        self.vocabulary = nn.Linear(WIDTH, VOCABULARY, bias=False) if tied else None
        if tied:
            self.vocabulary.weight = self.tokens.weight
        self.checkpointing = checkpointing

    def forward(
        self,
        *,
        touch_vision: bool = False,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        num_images: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
    ) -> torch.Tensor:
        vectors_BLW = self.tokens(input_ids)
        mask_BL1 = attention_mask[..., None].to(vectors_BLW.dtype)
        hidden_BW = (vectors_BLW * mask_BL1).sum(1) / mask_BL1.sum(1)
        if pixel_values is not None:
            row_of_image = torch.arange(len(num_images)).repeat_interleave(num_images)
            size_of_image = image_grid_thw.prod(1)
            row_of_patch = row_of_image.repeat_interleave(size_of_image)
            share_P1 = (1.0 / size_of_image.repeat_interleave(size_of_image))[:, None]
            patches_PW = self.visual(pixel_values) * share_P1
            hidden_BW = hidden_BW.index_add(0, row_of_patch, patches_PW.to(hidden_BW.dtype))
        elif touch_vision:
            blank_PW = hidden_BW.new_zeros(1, PATCH_WIDTH)
            hidden_BW = hidden_BW + 0.0 * self.visual(blank_PW).sum()
        for layer in self.layers:
            if self.checkpointing:
                hidden_BW = torch.utils.checkpoint.checkpoint(layer, hidden_BW, use_reentrant=False)
            else:
                hidden_BW = layer(hidden_BW)
        emb_BD = self.head(hidden_BW)
        if self.vocabulary is not None:
            emb_BD = emb_BD + 0.1 * self.vocabulary(hidden_BW)[:, :EMBEDDING]
        return F.normalize(emb_BD.to(torch.promote_types(emb_BD.dtype, torch.float32)), dim=-1)


class ToyBiEncoder(nn.Module):
    """``models.biencoder.BiEncoder``, which would import transformers: seconds a process."""

    def __init__(self, encoder: ToyEncoder, bias: float | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.logit_scale = LogitScale(bias=bias)

    def forward(self, role: str, **inputs) -> tuple[torch.Tensor, torch.Tensor]:
        return self.encoder(**inputs), self.logit_scale()


def make_model(
    *,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    checkpointing: bool = False,
    tied: bool = False,
    frozen: Sequence[str] = (),
    bias: float | None = None,
) -> ToyBiEncoder:
    """The same weights for every dtype; parameters whose name starts as in ``frozen`` are fixed."""
    torch.manual_seed(11)
    encoder = ToyEncoder(dropout, checkpointing=checkpointing, tied=tied)
    model = ToyBiEncoder(encoder, bias).to(dtype)
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(frozen)):
            parameter.requires_grad_(False)
    return model


def units_of(model: ToyBiEncoder) -> list[nn.Module]:
    """What the sharding engines take as blocks."""
    return [model.encoder.visual, *model.encoder.layers]


def make_optimizer(
    named: list[tuple[str, nn.Parameter]], ema_decay: float | None = None
) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only, vectors at another rate: two parameter groups."""
    matrices = [p for _, p in named if p.dim() > 1]
    vectors = [p for _, p in named if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0, "lr": 3 * LEARNING_RATE},
    ]
    groups = [g for g in groups if g["params"]]
    if ema_decay is None:
        return torch.optim.AdamW(groups, lr=LEARNING_RATE)
    return AveragedAdamW([g | {"ema_decay": ema_decay} for g in groups], lr=LEARNING_RATE)


@dataclass(frozen=True)
class Item:
    """One text, with its images' patches."""

    tokens: list[int]
    images: list[torch.Tensor]  # each [patches, PATCH_WIDTH] float64


@dataclass(frozen=True)
class Row:
    """One query, its positive document and any number of hard negatives."""

    query: Item
    documents: list[Item]


def make_row(
    step: int, index: int, *, negatives: int, query_images: bool, document_images: str
) -> Row:
    """Row ``index`` of the global batch of ``step``, the same whichever rank holds it.

    ``negatives`` is the most a row may have: row i has ``i % (negatives + 1)``.
    ``document_images`` is ``none``, ``all`` or ``some`` (0 to 2 a document).
    """
    generator = torch.Generator().manual_seed(7919 * step + index)

    def item(num_images: int) -> Item:
        length = int(torch.randint(2, 7, (), generator=generator))
        tokens = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        images = []
        for number in range(num_images):
            size = (1 + (index + number) % 3, PATCH_WIDTH)
            images.append(torch.randn(size, generator=generator, dtype=torch.float64))
        return Item(tokens, images)

    counts = {
        "none": lambda place: 0,
        "all": lambda place: 1,
        "some": lambda place: (index + place) % 3,
    }[document_images]
    documents = [item(counts(place)) for place in range(1 + index % (negatives + 1))]
    return Row(item(int(query_images)), documents)


def collate(items: Sequence[Item], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Model inputs of a batch, right-padded; patches of all images one after the other."""
    longest = max(len(item.tokens) for item in items)
    ids = torch.zeros(len(items), longest, dtype=torch.int64)
    mask = torch.zeros(len(items), longest, dtype=torch.int64)
    for row, item in enumerate(items):
        ids[row, : len(item.tokens)] = torch.tensor(item.tokens)
        mask[row, : len(item.tokens)] = 1
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "num_images": torch.tensor([len(item.images) for item in items]),
    }
    images = [image for item in items for image in item.images]
    if images:
        batch["pixel_values"] = torch.cat(images).to(dtype)
        batch["image_grid_thw"] = torch.tensor([[1, 1, len(image)] for image in images])
    return batch


@dataclass(frozen=True)
class RankBatch:
    """One rank's part of a global batch; documents of equal ``content_M`` pass for equal.

    ``guide`` holds float64 embeddings of queries and documents by another model.
    """

    queries: dict[str, torch.Tensor]
    documents: dict[str, torch.Tensor]
    positive_BK: torch.Tensor
    content_M: torch.Tensor
    guide: tuple[torch.Tensor, torch.Tensor]

    @property
    def positive_B(self) -> torch.Tensor:
        """The first positive of each query."""
        return self.positive_BK[:, 0]


def make_rank_batch(rows: Sequence[Row], dtype: torch.dtype, positives: int = 1) -> RankBatch:
    """Collate rows; documents lie row by row, at most ``positives`` positives first."""
    sizes_B1 = torch.tensor([len(row.documents) for row in rows])[:, None]
    place_K = torch.arange(positives)
    place_BK = sizes_B1.cumsum(0) - sizes_B1 + place_K
    documents = [document for row in rows for document in row.documents]
    return RankBatch(
        collate([row.query for row in rows], dtype),
        collate(documents, dtype),
        place_BK.where(place_K < sizes_B1, -1),
        torch.tensor([sum(document.tokens) % 11 for document in documents]),
        (_by_guide([row.query for row in rows]), _by_guide(documents)),
    )


def _by_guide(items: Sequence[Item]) -> torch.Tensor:
    sums_M1 = torch.tensor([[sum(item.tokens)] for item in items], dtype=torch.float64)
    return (sums_M1 * torch.arange(1, 4)).sin()


class Reference:
    """Float64 training of the whole global batch in one process, by plain autograd."""

    def __init__(self, start: nn.Module, optimizer=make_optimizer) -> None:
        """``start`` is a float64 model with the weights to start from."""
        self.model = start
        self.named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = optimizer(self.named)
        # The temperature's gradient is a sum of shares of both signs, which may cancel to nearly
        # nothing; its rounding goes with the sum of their sizes, which is collected here.
        self.temperature_terms = 0.0
        self.initial = {n: tensor.clone() for n, tensor in self.weights().items()}

    def loss(
        self,
        parts: Sequence[RankBatch],
        chunk_size: int | None = None,
        seeds: Sequence[int] | None = None,
        objective: Objective | None = None,
        content: bool = False,
        guide: bool = False,
        fixed: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The loss of all ranks' rows, by default InfoNCE.

        With ``chunk_size`` and ``seeds`` the forwards run chunk by chunk, each rank from its own
        seed, so that dropout masks are those that GradCache draws. ``fixed`` embeddings stand
        in for documents.
        """
        queries, documents, positives, offset = [], [], [], 0
        for rank, part in enumerate(parts):
            if seeds is not None:
                torch.manual_seed(seeds[rank])
            for role, inputs, found in (
                ("query", part.queries, queries),
                ("document", part.documents, documents),
            ):
                if role == "document" and fixed is not None:
                    found.append(fixed[rank])
                    continue
                size = chunk_size or len(inputs["input_ids"])
                for chunk in split_batch(inputs, size):
                    emb_BD, log_scale = self.model(role, **chunk)
                    found.append(emb_BD)
            positives += [[p + offset for p in r if p >= 0] for r in part.positive_BK.tolist()]
            offset += len(part.documents["input_ids"])
        scale = log_scale[:1].clamp(0.0, math.log(100.0)).exp()
        query_BD, document_ND = torch.cat(queries), torch.cat(documents)
        logits_BN = scale * query_BD @ document_ND.T
        positive_B1 = torch.tensor([found[:1] for found in positives])
        with torch.no_grad():
            mean_B = (logits_BN.softmax(1) * logits_BN).sum(1)
            shares_B = mean_B - logits_BN.gather(1, positive_B1)[:, 0]
            self.temperature_terms += float(shares_B.abs().mean())
        if objective is not None:
            contents = torch.cat([part.content_M for part in parts]).tolist()
            guides = [torch.cat(side) for side in zip(*(part.guide for part in parts), strict=True)]
            return naive_loss(
                objective, query_BD, document_ND, positives, scale, log_scale[1:],
                content=contents if content else None,
                guide_BN=guides[0] @ guides[1].T if guide else None,
            )  # fmt: skip
        return (logits_BN.logsumexp(1) - logits_BN.gather(1, positive_B1)[:, 0]).mean()

    def backward(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """Gradients of all trained parameters; zero where none was used."""
        loss.backward()
        for _, parameter in self.named:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return {name: parameter.grad.clone() for name, parameter in self.named}

    def step(self, max_norm: float | None) -> float:
        """Clip, update, clear; return the norm before clipping.

        Torch and DeepSpeed both scale by max_norm / (norm + 1e-6), which float64 can see.
        """
        parameters = [p for _, p in self.named]
        norm = torch.cat([p.grad.reshape(-1) for p in parameters]).norm()
        if max_norm is not None and norm > max_norm:
            for parameter in parameters:
                parameter.grad.mul_(max_norm / (norm + 1e-6))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.temperature_terms = 0.0
        return float(norm)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Optimizer state by parameter name."""
        return {name: self.optimizer.state[parameter] for name, parameter in self.named}

    def weights(self) -> dict[str, torch.Tensor]:
        """All parameters by name; a tied one under each of its names."""
        return self.model.state_dict()


def relative_error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative L2 error over all tensors of ``expected``; a missing or odd-shaped one raises."""
    assert got.keys() >= expected.keys(), sorted(expected.keys() - got.keys())
    square, total = 0.0, 0.0
    for name, want in expected.items():
        assert got[name].shape == want.shape, (name, got[name].shape, want.shape)
        square += float((got[name].double() - want.double()).square().sum())
        total += float(want.double().square().sum())
    return math.sqrt(square / total)


def norm_ratio(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of ``got`` over that of ``expected``."""
    squares = [
        sum(float(tensors[name].double().square().sum()) for name in expected)
        for tensors in (got, expected)
    ]
    return math.sqrt(squares[0] / squares[1])
