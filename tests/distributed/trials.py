"""One trial: a few optimizer steps on an engine, measured against the float64 reference."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pixelrag.distributed.env import World
from pixelrag.engine import Engine, build_engine
from pixelrag.gradcache import gradcache_step, split_batch
from pixelrag.gradcache.chunking import Chunking
from pixelrag.gradcache.keep import Keeper
from pixelrag.gradcache.step import Pairs
from pixelrag.losses.contrastive import Objective
from tests.distributed.toy import (
    RankBatch,
    Reference,
    ToyBiEncoder,
    make_model,
    make_optimizer,
    make_rank_batch,
    make_row,
    norm_ratio,
    relative_error,
    units_of,
)

DEFAULTS: dict[str, Any] = {
    "engine": "ddp",
    "grad_sync": "auto",
    "params": "auto",
    "precision": "fp32",
    "dtype": "float32",
    "offload": False,
    "dropout": 0.0,
    "checkpointing": False,
    "tied": False,
    "frozen": [],  # starts of parameter names
    "zero": None,  # a user's zero_optimization settings
    "units": True,  # hand blocks to the engine
    "rows": None,  # rows of each rank; None: 6 on one rank, else 3, 2, 1 by rank
    "filler": None,  # this rank brings a row that does not count
    "chunk_size": 2,
    "chunk_tokens": None,  # cut by tokens and patches instead
    "negatives": 2,
    "loss": None,  # fields of an `Objective`; None: plain InfoNCE
    "positives": 1,  # the most a row may have
    "content": False,  # documents may pass for equal
    "guide": False,  # another model has a say in what is no negative
    "exchange": "all_gather",
    "fixed_documents": False,  # documents keep the embeddings of the model before training
    "replay": "all",  # as `batch.replay`, or how many leading forwards keep their graph
    "images": "varied",
    "steps": 4,
    "max_norm": 0.5,
    "accumulate": 1,
    "gradients": True,  # the engine can show gradients before the step
    "ema_decay": None,  # keep moving averages of the weights
}


MODES = [
    ("deferred", "resident"),
    ("deferred", "sharded"),
    ("per_chunk", "resident"),
    ("per_chunk", "sharded"),
]


def every_mode(*engines: str) -> dict[str, dict[str, str]]:
    """Cases of every way in which these engines can run, by name."""
    return {
        f"{engine}-{grad_sync}-{params}": {
            "engine": engine,
            "grad_sync": grad_sync,
            "params": params,
        }
        for engine in engines
        for grad_sync, params in MODES
        if params == "resident" or engine in ("zero3", "fsdp2")
    }


def assert_exact(results: list[dict[str, Any]], bar: float = 1e-5) -> None:
    """Every error that a trial measured is within ``bar``; ranks agree bit for bit.

    Weights get ten times the bar in fp32: AdamW divides each gradient by its own size, so rounding
    of the smallest ones is as large a part of the way as rounding of the largest (measured:
    2e-5 of the way on every engine alike). In float64 nothing is added.
    """
    weights = 10 * bar if bar > 1e-7 else bar
    for rank, result in enumerate(results):
        errors = {key: value for key, value in result.items() if key != "probe"}
        assert "norm" in errors
        misses = {
            key: value
            for key, value in errors.items()
            if not value <= (weights if "weights" in key or "average" in key else bar)
        }
        assert not misses, f"rank {rank}: {misses} beyond {bar}; all: {errors}"
        assert result["probe"] == results[0]["probe"], f"rank {rank} has other weights than rank 0"


def build(case: dict[str, Any], model: torch.nn.Module, world: World) -> Engine:
    """The engine a case asks for, around ``model``."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        if case["zero"] is not None:
            json.dump({"zero_optimization": case["zero"]}, file)
            file.flush()
        return build_engine(
            model,
            partial(make_optimizer, ema_decay=case["ema_decay"]),
            name=case["engine"],
            device=world.device,
            blocks=units_of(model) if case["units"] else (),
            precision=case["precision"],
            grad_sync=case["grad_sync"],
            params=case["params"],
            offload_optimizer=case["offload"],
            deepspeed=None if case["zero"] is None else file.name,
        )


def model_for(case: dict[str, Any]) -> ToyBiEncoder:
    """The model a case asks for."""
    options = {key: case[key] for key in ("dropout", "checkpointing", "tied", "frozen")}
    bias = -3.0 if objective_of(case).name == "siglip" else None
    return make_model(dtype=getattr(torch, case["dtype"]), bias=bias, **options)


def objective_of(case: dict[str, Any]) -> Objective:
    """The loss a case asks for."""
    return Objective(**case["loss"] or {})


def image_plan(images: str, rank: int, step: int, world_size: int) -> tuple[bool, str]:
    """Whether this rank's queries have images in this step, and which of its documents do."""
    if images != "varied":
        return False, images
    last_rank = rank == world_size - 1
    plans = [
        (False, "some" if rank == 0 else "none"),  # on one rank only
        (False, "none"),  # the vision branch goes unused
        (last_rank, "none"),  # in queries alone: the last chunk of the step does not use it
        (False, "all" if last_rank else "none"),  # in documents alone: nor does the first
    ]
    return plans[step % len(plans)]


def global_batch(case: dict[str, Any], step: int, world_size: int) -> list[RankBatch]:
    """Every rank's part; rows are numbered through the global batch."""
    sizes = case["rows"] or ([6] if world_size == 1 else [3 - rank for rank in range(world_size)])
    parts, first = [], 0
    for rank, size in enumerate(sizes):
        query_images, document_images = image_plan(case["images"], rank, step, world_size)
        rows = [
            make_row(
                step,
                index,
                negatives=case["negatives"],
                query_images=query_images,
                document_images=document_images,
            )
            for index in range(first, first + size)
        ]
        parts.append(make_rank_batch(rows, getattr(torch, case["dtype"]), case["positives"]))
        first += size
    return parts


def as_float64(parts: list[RankBatch]) -> list[RankBatch]:
    """The same batch for the reference (float32 values are exact in float64)."""

    def widen(inputs):
        return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}

    return [
        replace(part, queries=widen(part.queries), documents=widen(part.documents))
        for part in parts
    ]


def reference_for(case: dict[str, Any]) -> Reference:
    """A float64 reference that starts from the very weights of the case's model."""
    double = model_for(case | {"dtype": "float64", "checkpointing": False})
    double.load_state_dict(model_for(case).state_dict())
    return Reference(double)


def own_chunks(
    part: RankBatch, chunk_size: int, chunk_tokens: int | None = None
) -> tuple[list[dict], list[dict]]:
    """One rank's query and document chunks."""
    if chunk_tokens is not None:
        chunking = Chunking("auto", chunk_tokens)
        return chunking(part.queries), chunking(part.documents)
    return split_batch(part.queries, chunk_size), split_batch(part.documents, chunk_size)


def run_trial(world: World, overrides: dict[str, Any]) -> dict[str, Any]:
    """Train ``steps`` steps; return the errors against the reference (on rank 0) and a probe.

    Keys, each the worst over the steps: ``gradient`` (relative L2 error), ``norm_ratio``
    (|ratio - 1|), ``temperature`` (error of its gradient over the size of its terms), ``loss``
    and ``norm`` (relative); after the last step ``weights`` (error over the length of the way that
    the weights went), ``exp_avg`` and ``exp_avg_sq`` (relative). ``probe`` is every rank's own.
    """
    case = DEFAULTS | overrides
    unknown = overrides.keys() - DEFAULTS.keys()
    assert not unknown, unknown
    engine = build(case, model_for(case), world)
    reference = reference_for(case)
    worst: dict[str, float] = {}
    keeper = Keeper(case["replay"])
    tower = model_for(case | {"dtype": "float64"}).eval()
    tower.load_state_dict(model_for(case).state_dict())
    decay, means = case["ema_decay"], dict(reference.initial)
    for step in range(case["steps"]):
        found = one_step(engine, reference, case, step, world, keeper, tower)
        if decay is not None:
            now = reference.weights()
            means = {n: decay * mean + (1 - decay) * now[n] for n, mean in means.items()}
            found |= average_errors(engine, reference, case, means)
        worst = {key: max(value, worst.get(key, 0.0)) for key, value in found.items()}
    worst |= final_errors(engine, reference)
    return worst | {"probe": probe(engine, case)}


def average_errors(
    engine: Engine, reference: Reference, case: dict[str, Any], means: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Errors of averages, as stored, gathered and computed with, between two steps; a collective.

    Those of weights over the length of their way, that of embeddings as it is.
    """
    before = probe(engine, case)
    with engine.averaged():
        averaged, computed = engine.full_parameters(), probe(engine, case)
    assert before == probe(engine, case) != computed, "other weights than before"
    expected, _ = torch.func.functional_call(
        reference.model, means, ("query",), probe_batch(torch.float64)
    )
    errors = {"averaged embedding": float((torch.tensor(computed).double() - expected).norm())}
    stored = {n: entries["ema"] for n, entries in engine.optimizer_state().items()}
    if engine.rank == 0:
        initial = reference.initial
        way = {n: means[n] - initial[n] for n in stored}
        for what, found in (("averaged weights", averaged), ("stored averages", stored)):
            errors[what] = relative_error({n: found[n].double() - initial[n] for n in way}, way)
    return errors


def one_step(
    engine: Engine,
    reference: Reference,
    case: dict[str, Any],
    step: int,
    world: World,
    keeper: Keeper | None = None,
    tower: torch.nn.Module | None = None,
) -> dict[str, float]:
    """One optimizer step on both sides, of ``accumulate`` global batches."""
    losses, expected_losses = [], []
    count = case["accumulate"]
    for number in range(count):
        batch_index = step * count + number
        parts = global_batch(case, batch_index, world.world_size)
        seeds = [1000 * batch_index + rank for rank in range(world.world_size)]
        queries, documents = own_chunks(parts[world.rank], case["chunk_size"], case["chunk_tokens"])
        fixed = None
        if case["fixed_documents"]:
            with torch.no_grad():
                fixed = [tower("document", **part.documents)[0] for part in as_float64(parts)]
            documents = fixed[world.rank]
        torch.manual_seed(seeds[world.rank])
        result = gradcache_step(
            engine,
            queries,
            documents,
            Pairs(
                parts[world.rank].positive_BK,
                parts[world.rank].content_M if case["content"] else None,
                parts[world.rank].guide if case["guide"] else None,
            ),
            num_real_queries=0 if case["filler"] == world.rank else None,
            weight=1.0 / count,
            last=number == count - 1,
            objective=objective_of(case),
            exchange=case["exchange"],
            keeper=keeper,
        )
        chunk_size, use_seeds = (case["chunk_size"], seeds) if case["dropout"] else (None, None)
        is_counted = [rank != case["filler"] for rank in range(world.world_size)]
        counted = [part for part, counts in zip(parts, is_counted, strict=True) if counts]
        if fixed is not None:
            fixed = [rows for rows, counts in zip(fixed, is_counted, strict=True) if counts]
        objective = None if case["loss"] is None else objective_of(case)
        expected = reference.loss(
            as_float64(counted),
            chunk_size,
            use_seeds,
            objective,
            case["content"],
            case["guide"],
            fixed,
        )
        gradients = reference.backward(expected / count)
        losses.append(result.loss)
        expected_losses.append(expected.item())
    errors = {"loss": max(abs(a / b - 1) for a, b in zip(losses, expected_losses, strict=True))}
    if case["gradients"]:
        errors |= gradient_errors(
            engine.gradients(), gradients, reference.temperature_terms / count
        )
    norm, expected_norm = engine.step(case["max_norm"]), reference.step(case["max_norm"])
    return errors | {"norm": abs(norm / expected_norm - 1)}


def gradient_errors(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], temperature_terms: float
) -> dict[str, float]:
    """Errors of one step's gradients."""
    name = "logit_scale.log_scale"
    return {
        "gradient": relative_error(got, expected),
        "norm_ratio": abs(norm_ratio(got, expected) - 1),
        "temperature": abs(got[name].item() - expected[name].item()) / temperature_terms,
    }


def final_errors(engine: Engine, reference: Reference) -> dict[str, float]:
    """Errors of weights and optimizer state; a collective, the figures are rank 0's."""
    weights, state = engine.full_parameters(), engine.optimizer_state()
    if engine.rank != 0:
        assert weights == {}
        assert state == {}
        return {}
    expected = reference.weights()
    initial = reference.initial
    way = {n: w.double() - initial[n] for n, w in weights.items()}
    expected_way = {n: w - initial[n] for n, w in expected.items()}
    errors = {"weights": relative_error(way, expected_way)}
    expected_state = reference.state()
    for key in ("exp_avg", "exp_avg_sq"):
        errors[key] = relative_error(
            {n: entries[key] for n, entries in state.items()},
            {n: entries[key] for n, entries in expected_state.items()},
        )
    steps = {int(entries["step"]) for entries in state.values()}
    assert steps == {int(entries["step"]) for entries in expected_state.values()}
    return errors


def probe(engine: Engine, case: dict[str, Any]) -> list[list[float]]:
    """Embeddings of one fixed batch; equal bit for bit on ranks whose weights are."""
    with engine.inference():
        emb_BD, _ = engine("query", **probe_batch(getattr(torch, case["dtype"])))
    dist.barrier()
    return emb_BD.tolist()


def probe_batch(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Three queries with images."""
    row_options = {"negatives": 0, "query_images": True, "document_images": "all"}
    rows = [make_row(99, index, **row_options) for index in range(3)]
    return make_rank_batch(rows, dtype).queries
