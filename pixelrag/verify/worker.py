"""One rank's part of the matrix: build the engine, run the step, compare with the oracle."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path
from typing import Any

import torch

from pixelrag.distributed.collectives import exchange, from_main
from pixelrag.distributed.counting import CollectiveCounter
from pixelrag.distributed.env import World
from pixelrag.engine import Engine, build_engine
from pixelrag.gradcache import gradcache_step, split_batch
from pixelrag.gradcache.keep import Keeper
from pixelrag.losses.contrastive import Objective
from pixelrag.verify.cases import BARS, OPTIONS, Case, Outcome
from pixelrag.verify.inputs import batch_of_rank, load_biencoder
from pixelrag.verify.reference import Oracle, Reference, seed_rank

_TEMPERATURE = "logit_scale.log_scale"


def run_cases(world: World, payload: dict[str, Any]) -> list[dict]:
    """Run the cases of ``payload`` and return their outcomes as JSON objects; a collective.

    Rank 0 alone computes references and compares: what the others hold is the same bit for bit,
    or a problem.

    Args:
        world: this process's place.
        payload: ``folder`` (of ``inputs.write_inputs``), ``cases`` (fields of ``Case``), and the
            engine options ``grad_sync`` and ``params``.
    """
    folder = Path(payload["folder"])
    cases = [Case(**fields) for fields in payload["cases"]]
    oracle = Oracle(folder, world.world_size)
    outcomes, built, engine = [], None, None
    for case in cases:
        if built != (case.engine, *case.model):
            engine, preprocessor = _build(case, folder, world, payload)
            built = (case.engine, *case.model)
        assert engine is not None  # built above
        outcomes.append(_run(engine, case, folder, preprocessor, oracle, world))
    return [outcome.to_json() for outcome in outcomes]


def _build(case: Case, folder: Path, world: World, payload: dict[str, Any]):
    dtype = torch.float64 if case.precision == "fp64" else torch.float32
    container, preprocessor = load_biencoder(folder, case.training, case.dropout, dtype)
    engine = build_engine(
        container,
        # A rate of 0: the step clears gradients and leaves the weights for the next case.
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.0),
        name=case.engine,
        device=world.device,
        blocks=container.encoder.blocks(),
        grad_sync=payload.get("grad_sync", "auto"),
        params=payload.get("params", "auto"),
    )
    return engine, preprocessor


def _run(
    engine: Engine, case: Case, folder: Path, preprocessor: Any, oracle: Oracle, world: World
) -> Outcome:
    queries, documents, pairs = batch_of_rank(case, world.rank, folder, preprocessor)
    chunks = [
        [_to(chunk, world.device, case.precision) for chunk in split_batch(side, case.chunk_size)]
        for side in (queries, documents)
    ]
    counter, num_reductions = CollectiveCounter(), 0
    backward = engine.backward

    def counted(loss: torch.Tensor, *, last: bool) -> None:
        nonlocal num_reductions
        before = counter.gradient_reductions
        backward(loss, last=last)
        num_reductions += counter.gradient_reductions - before

    engine.backward = counted  # type: ignore[method-assign]  # for this run alone
    seed_rank(world.rank)
    try:
        with counter:
            options = case.loss == "options"
            result = gradcache_step(
                engine,
                chunks[0],
                chunks[1],
                pairs,
                objective=Objective(**OPTIONS) if options else None,
                exchange="ring" if options else "all_gather",
                keeper=Keeper(case.kept),
            )
    finally:
        del engine.backward
    gradients = {n: g.detach().cpu().double() for n, g in engine.gradients().items()}
    norm = engine.step(None)
    digest = zlib.crc32(struct.pack("2d", result.loss, norm))
    for name in sorted(gradients):
        digest = zlib.crc32(gradients[name].contiguous().numpy().tobytes(), digest)
    alike = len({row[0] for row in exchange([digest])}) == 1
    return from_main(
        lambda: _compare(
            case, oracle(case), gradients, result.loss, norm, alike,
            num_reductions, counter.calls.total(), sum(map(len, chunks)),
        )
    )  # fmt: skip


def _compare(
    case: Case,
    reference: Reference,
    gradients: dict[str, torch.Tensor],
    loss: float,
    norm: float,
    alike: bool,
    num_reductions: int,
    num_collectives: int,
    num_chunks: int,
) -> Outcome:
    expected = reference.gradients
    missing = sorted(set(expected) ^ set(gradients))
    if missing:
        raise AssertionError(f"parameters differ from the reference's: {missing[:3]}")
    norm_expected = _norm(expected.values())
    error = _norm(gradients[n] - expected[n] for n in expected) / norm_expected
    scale, scale_expected = gradients[_TEMPERATURE], expected[_TEMPERATURE]
    temperature_error = float((scale - scale_expected).norm()) / reference.temperature_terms
    loss_error = abs(loss - reference.loss) / abs(reference.loss)
    bar = BARS[case.precision]
    ratio = _norm(gradients.values()) / norm_expected
    problems = []
    for what, value in (
        ("gradient", error),
        ("norm ratio", abs(ratio - 1)),
        ("norm of step()", abs(norm / norm_expected - 1)),
        ("temperature gradient", temperature_error),
        ("loss", loss_error),
    ):
        if not value <= bar:  # also true for NaN
            problems.append(f"{what} off by {value:.1e}, allowed {bar:.0e}")
    if not alike:
        problems.append("ranks hold different gradients, losses or norms")
    return Outcome(
        case, error, ratio, temperature_error, loss_error,
        num_reductions, num_collectives, num_chunks, tuple(problems),
    )  # fmt: skip


def _norm(tensors) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def _to(chunk: dict, device: torch.device, precision: str) -> dict:
    dtype = torch.float64 if precision == "fp64" else torch.float32
    return {
        k: v.to(device, dtype) if v.is_floating_point() else v.to(device) for k, v in chunk.items()
    }
