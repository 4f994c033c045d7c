"""Chunks forward without a graph, and again with one: the two passes around a loss on outputs.

The exactness rests on the chain rule: a loss L that is computed from small outputs o_1 .. o_n has
the parameter gradient sum_i (dL/do_i)^T do_i/dw. The first pass yields all o_i in the memory of one
chunk; the second runs each chunk anew, with the random numbers of its first run, and goes backward
from <o_i, dL/do_i>. Where memory allows, leading chunks keep the graph of their first run instead;
see `keep`. The engine reduces over ranks in the very last backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from pixelrag.distributed.rng import RandContext
from pixelrag.engine.base import Engine
from pixelrag.gradcache.keep import Keeper
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
        graph: output and log scale with their graph, where that is kept.
        gradient: of the loss by the output; None = zero.
    """

    side: Side
    chunk: Chunk
    counts: bool
    random: RandContext
    output: torch.Tensor
    graph: tuple[torch.Tensor, torch.Tensor] | None = None
    gradient: torch.Tensor | None = field(default=None)


def first_pass(
    engine: Engine, sides: Sequence[Side], *, num_kept: int = 0
) -> tuple[list[Pass], torch.Tensor]:
    """Run every chunk of every side; also return the log scale (and bias), detached.

    Args:
        engine: its module answers ``engine(role, touch_vision=..., **chunk)`` with
            ``(output, log_scale)``, the output's rows being the chunk's.
        sides: as all ranks agreed, see `schedule`.
        num_kept: leading forwards whose graphs are kept; all ranks say the same.
    """
    passes: list[Pass] = []
    log_scale = None
    for side in sides:
        for chunk, counts in side.calls():
            is_kept = len(passes) < num_kept
            random = RandContext(engine.device)
            # A padding call must leave no trace, not even in the random stream.
            with (
                torch.set_grad_enabled(is_kept),
                contextlib.nullcontext() if counts else random.replay(),
            ):
                output, log_scale = _forward(engine, side, chunk)
            graph = (output, log_scale) if is_kept else None
            passes.append(Pass(side, chunk, counts, random, output.detach(), graph))
    assert log_scale is not None  # every side calls at least once
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


def second_pass(
    engine: Engine,
    passes: Sequence[Pass],
    scale_gradient: torch.Tensor,
    *,
    last: bool,
    keeper: Keeper | None = None,
) -> None:
    """Run every chunk whose graph was not kept again, and accumulate the gradients of all.

    Args:
        engine: as in the first pass.
        passes: with the gradients handed back; what they keep is let go on the way.
        scale_gradient: [1] or [2], of the loss by the log scale (and bias).
        last: whether the engine shall reduce in the last backward.
        keeper: weighs the graphs that are built; None = they are not weighed.
    """
    keeper = keeper or Keeper()
    for position, kept in enumerate(passes):
        is_final = position == len(passes) - 1
        with contextlib.nullcontext() if kept.graph else kept.random.replay():
            output, log_scale = kept.graph or keeper.weigh(
                engine, kept.side, kept.chunk, partial(_forward, engine, kept.side, kept.chunk)
            )
            if kept.gradient is None:
                surrogate = (output * 0.0).sum()
            else:
                surrogate = (output * kept.gradient).sum()
            # The scale's gradient is known already; it rides on one chunk.
            share = scale_gradient if is_final else torch.zeros_like(scale_gradient)
            surrogate = surrogate + (log_scale * share).sum()
            engine.backward(surrogate, last=last and is_final)
        kept.gradient = kept.graph = None
        del kept.output, output, log_scale, surrogate
