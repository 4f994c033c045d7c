"""A job's models without their weights, and a step's batch without its content."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from pixelrag.engine import Engine
from pixelrag.errors import ConfigError
from pixelrag.models.settings import position_limit
from pixelrag.plan.jobs import PlannedConfig
from pixelrag.train.optimizer import PartOf

_FLAGS = {
    "query": "query_tokens",
    "document": "document_tokens",
    "image": "image_tokens",
    "supervised": "supervised",
    "passages": "passages",
}
M = TypeVar("M", bound=nn.Module)
Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Lengths:
    """How much a step sees, in tokens where nothing else is said; None = as the attribute says.

    Attributes:
        query, document: of every row; None = as long as the configuration allows.
        image: that every document's image becomes; None = documents are texts.
        supervised: share of a packed row's tokens that are learnt from; None = all.
        passages: of the knowledge base; None = its index is not planned.
    """

    query: int | None = None
    document: int | None = None
    image: int | None = None
    supervised: float | None = None
    passages: int | None = None

    def only(self, job: str, *known: str) -> None:
        """Refuse what a job does not have.

        Raises:
            ConfigError: any other length is given.
        """
        for field in fields(self):
            if getattr(self, field.name) is not None and field.name not in known:
                flag = _FLAGS[field.name]
                raise ConfigError(f"--{flag}: the {job} job has no such thing; leave it out")


class Workload(Protocol):
    """What the planner needs of a job.

    Attributes:
        container: everything that is trained.
        blocks: of it, to shard.
        vocab_sizes: columns of what counts as logits.
    """

    container: nn.Module
    blocks: Sequence[nn.Module]
    vocab_sizes: frozenset[int]

    @property
    def part_of(self) -> PartOf | None:
        """See `train.optimizer.adamw`; None = the job has no learning rates by part."""

    @property
    def frozen(self) -> Sequence[nn.Module]:
        """Models beside the container."""

    @property
    def index_bytes(self) -> Mapping[str, int]:
        """Of host memory that a rank uses for retrieval, by what for."""

    def begin(self) -> None:
        """Place models beside the container; before the engine is built."""

    def step(self, engine: Engine) -> None:
        """All of an optimizer step of this rank but the update."""

    @property
    def tokens(self) -> int:
        """Tokens of this rank in a step."""


def workload_of(config: PlannedConfig, lengths: Lengths, world_size: int) -> Workload:
    """The job's models and step; inside the simulation's fake mode."""
    from pixelrag.config.distill import DistillConfig
    from pixelrag.config.rag import RagConfig

    if isinstance(config, DistillConfig):
        from pixelrag.plan.distill import DistillWorkload

        return DistillWorkload(config, lengths, world_size)
    if isinstance(config, RagConfig):
        from pixelrag.plan.rag import RagWorkload

        return RagWorkload(config, lengths, world_size)
    from pixelrag.plan.contrastive import ContrastiveWorkload

    return ContrastiveWorkload(config, lengths, world_size)


def without_content(module: M, *, half_precision: bool) -> M:
    """The module with tensors of the surrounding fake mode in place of those on `meta`.

    Args:
        module: fp32, as it was outlined.
        half_precision: parameters that are not trained are in bf16.
    """
    made: dict[int, Any] = {}
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                if tensor is None or tensor.device.type != "meta":
                    continue
                if id(tensor) not in made:
                    is_parameter = isinstance(tensor, nn.Parameter)
                    narrow = half_precision and is_parameter and not tensor.requires_grad
                    dtype = torch.bfloat16 if narrow else tensor.dtype
                    fake = torch.zeros(tensor.shape, dtype=dtype, device="cpu")
                    if is_parameter:
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    # The original is kept: its address must not serve another tensor.
                    made[id(tensor)] = (fake, tensor)
                table[name] = made[id(tensor)][0]
    return module


def stays_put(module: nn.Module) -> nn.Module:
    """The module, deaf to `.to(device)`: it is where it is simulated."""
    vars(module)["to"] = lambda *_, **__: module
    return module


def capped(length: int, embedder: Any) -> int:
    """A length within what the model can tell apart by position."""
    return min(length, position_limit(embedder.base_model))


def texts(rows: int, length: int) -> Inputs:
    """Inputs of so many rows, all equally long."""
    ids = torch.ones(rows, length, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def with_images(rows_of_text: Inputs, config: Any, tokens: int) -> Inputs:
    """Put an image before each text.

    Args:
        rows_of_text: see `texts`.
        config: of a Qwen3-VL model.
        tokens: that an image becomes, about: a rectangle of at most so many.
    """
    vision = config.vision_config
    merge = vision.spatial_merge_size
    rows = max(1, math.isqrt(tokens))
    columns = tokens // rows
    num = len(rows_of_text["input_ids"])
    image_ids = torch.full((num, rows * columns), config.image_token_id)
    start = torch.full((num, 1), config.vision_start_token_id)
    end = torch.full((num, 1), config.vision_end_token_id)
    ids = torch.cat([start, image_ids, end, rows_of_text["input_ids"]], dim=1)
    patches = num * rows * columns * merge * merge
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.empty(patches, width),
        "image_grid_thw": torch.tensor([[1, rows * merge, columns * merge]]).repeat(num, 1),
        "num_images": torch.ones(num, dtype=torch.int64),
    }
