"""A vision pass that counts for nothing, so that every chunk runs the same submodules.

Where parameters are sharded, each submodule's forward is a collective: a rank whose chunk has no
image would leave the others waiting, or swap weights with them (`deepspeedai/DeepSpeed#7170`,
`verl-project/verl#3734`). Such a rank sends one merge block of blank patches through the vision
tower, at the very place where the model would process its images: after the token embeddings, in
front of the first decoder layer. Gradients of the tower are then exactly zero, not missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class _Tie(torch.autograd.Function):
    """Passes `x` on untouched; in the backward the other inputs get zeros.

    Adding `0 * y.sum()` would do the same, but turn `x` into NaN where `y` overflows.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.like = [(y.shape, y.dtype, y.device) for y in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if wanted else None
            for (shape, dtype, device), wanted in zip(ctx.like, needed, strict=True)
        ]
        return grad, *zeros


class VisionTouch:
    """Forward pre-hook of a Qwen3-VL language model; acts only while `armed`.

    Args:
        visual: the vision tower, called as the model itself calls it.
        patch_values: numbers in one flattened patch (channels x frames x height x width).
        merge_size: patches on a side that become one token.
    """

    def __init__(self, visual: nn.Module, patch_values: int, merge_size: int) -> None:
        self.visual: Any = visual  # a tower of transformers', with attributes of its own
        self.patch_values = patch_values
        self.merge_size = merge_size
        self.armed = False

    def __call__(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        if not self.armed:
            return None
        embeds_BTD = kwargs["inputs_embeds"]
        outputs = self.run(embeds_BTD.device)
        return args, kwargs | {"inputs_embeds": _Tie.apply(embeds_BTD, *outputs)}

    def run(self, device: torch.device) -> list[torch.Tensor]:
        """All outputs of the tower (tokens and deepstack features) for one blank block."""
        side = self.merge_size
        patches = torch.zeros(side * side, self.patch_values, device=device)
        grid = torch.tensor([[1, side, side]], device=device)
        cuda = [device] if device.type == "cuda" else []
        # Adapter dropout draws numbers here; the chunk must go on as if it had not.
        with torch.random.fork_rng(devices=cuda):
            out = self.visual(patches.type(self.visual.dtype), grid_thw=grid, return_dict=True)
        return [out.pooler_output, *out.deepstack_features]


@contextlib.contextmanager
def armed(touch: VisionTouch | None, on: bool) -> Iterator[None]:
    """The hook acts in the body, if it is there and ``on``."""
    if touch is None:
        yield
        return
    touch.armed = on
    try:
        yield
    finally:
        touch.armed = False
