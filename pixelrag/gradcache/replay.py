"""Chunks forward without a graph, and again with one: the two passes around a loss on outputs.

The exactness rests on the chain rule: a loss L that is computed from small outputs o_1 .. o_n has
the parameter gradient sum_i (dL/do_i)^T do_i/dw. The first pass yields all o_i in the memory of one
chunk; the second runs each chunk anew, with the random numbers of its first run, and goes backward
from <o_i, dL/do_i>. The engine reduces over ranks in the very last backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pixelrag.distributed.rng import RandContext
from pixelrag.engine.base import Engine
from pixelrag.gradcache.schedule import Chunk, Side


@dataclass(slots=True)
class Pass:
    """What is kept of one chunk between the passes.

    Attributes:
        side: the role that it belongs to.
        chunk: its inputs.
        counts: False for a call that only keeps the ranks' calls alike.
        random: the random state before its first run.
        output: what it gave, [rows, ...], without a graph.
        gradient: of the loss by the output; None = zero.
    """

    side: Side
    chunk: Chunk
    counts: bool
    random: RandContext
    output: torch.Tensor
    gradient: torch.Tensor | None = field(default=None)


def forward_without_graph(engine: Engine, sides: Sequence[Side]) -> tuple[list[Pass], torch.Tensor]:
    """Run every chunk of every side; also return the log scale (and bias), detached.

    Args:
        engine: its module answers ``engine(role, touch_vision=..., **chunk)`` with
            ``(output, log_scale)``, the output's rows being the chunk's.
        sides: as all ranks agreed, see `schedule`.
    """
    passes: list[Pass] = []
    log_scale = None
    with torch.no_grad():
        for side in sides:
            for chunk, counts in side.calls():
                random = RandContext(engine.device)
                # A padding call must leave no trace, not even in the random stream.
                with contextlib.nullcontext() if counts else random.replay():
                    output, log_scale = _forward(engine, side, chunk)
                passes.append(Pass(side, chunk, counts, random, output.detach()))
    return passes, log_scale.detach().clone()


def _forward(engine: Engine, side: Side, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    # Only the chunk in use lies on the device: the pixels of a whole batch may not fit there.
    inputs = {key: value.to(engine.device, non_blocking=True) for key, value in chunk.items()}
    return engine(side.role, touch_vision=side.must_touch(chunk), **inputs)


def collect(passes: Sequence[Pass], side: Side) -> torch.Tensor:
    """Join one side's outputs [rows, W] into a leaf; filler rows of padding calls stay out.

    Outputs of unlike width (log-probabilities of targets of unlike length) are filled with zeros.
    """
    outputs = [p.output for p in passes if p.side is side and p.counts]
    width = max(output.shape[1] for output in outputs)
    padded = [torch.nn.functional.pad(o, (0, width - o.shape[1])) for o in outputs]
    return torch.cat(padded).requires_grad_()


def hand_back(passes: Sequence[Pass], side: Side, gradient: torch.Tensor | None) -> None:
    """Give each chunk its part of what `collect` joined."""
    offset = 0
    for kept in passes:
        if kept.side is not side or not kept.counts or gradient is None:
            continue
        rows, width = kept.output.shape
        kept.gradient = gradient[offset : offset + rows, :width]
        offset += rows


def replay(
    engine: Engine, passes: Sequence[Pass], scale_gradient: torch.Tensor, *, last: bool
) -> None:
    """Run every chunk again and accumulate the gradients.

    Args:
        engine: as in the first pass.
        passes: with the gradients handed back; what they keep is let go on the way.
        scale_gradient: [1] or [2], of the loss by the log scale (and bias).
        last: whether the engine shall reduce in the last backward.
    """
    for position, kept in enumerate(passes):
        is_final = position == len(passes) - 1
        with kept.random.replay():
            output, log_scale = _forward(engine, kept.side, kept.chunk)
            if kept.gradient is None:
                surrogate = (output * 0.0).sum()
            else:
                surrogate = (output * kept.gradient).sum()
            # The scale's gradient is known already; it rides on one chunk.
            share = scale_gradient if is_final else torch.zeros_like(scale_gradient)
            surrogate = surrogate + (log_scale * share).sum()
            engine.backward(surrogate, last=last and is_final)
        kept.output = kept.gradient = None
