"""GradCache here against other implementations of it, on the same model, texts, batch and chunk.

    python -m benchmarks.peers --batch 256 --chunk 16
    python -m benchmarks.peers --texts long-tail --max-length 256

A step is: tokenise texts, forward without graph, loss, replay, clip, AdamW. Candidates:

pixelrag               PairCollator, split_batch, gradcache_step over the ddp engine, engine.step
pixelrag-padded        the same with model.unpadded false
pixelrag-unsorted      the same, padded, without the collator's sorting by length
sentence-transformers  SentenceTransformer.preprocess, CachedMultipleNegativesRankingLoss
gradcache              the package of that name (pip install --no-deps gradcache), where installed
gradcache-trimmed      the same with split_batch in place of its own splitting

All of them compute in fp32 with dropout on, clip at 1 and step AdamW. First every candidate's loss
and gradient are compared with dropout off, so that all are known to do the same work. Times come
from one process with the candidates in turns; memory from a fresh process for each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from benchmarks import common
from pixelrag.distributed.env import process_group
from pixelrag.gradcache import gradcache_step, split_batch
from pixelrag.models.source import resolve_source
from pixelrag.train.batches import PairCollator

SCALE = 1 / 0.07
OURS = "pixelrag"
# Two fp32 implementations differ by rounding: sums in another order, norms with an epsilon.
SAME_WORK = 1e-4


@dataclass(frozen=True, slots=True)
class Workload:
    """What every candidate gets."""

    queries: list[str]
    documents: list[str]
    chunk: int
    max_length: int
    model: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation, loaded.

    Attributes:
        module: what trains.
        gradient: computes the loss of the workload, leaves gradients in ``.grad``, returns it.
        update: clips, steps, clears the gradients.
    """

    module: nn.Module
    gradient: Callable[[], float]
    update: Callable[[], None]

    def step(self) -> None:
        """One whole step."""
        self.gradient()
        self.update()


def pixelrag_candidate(work: Workload, *, unpadded: bool | Literal["auto"] = "auto") -> Candidate:
    """This project's path as the contrastive job runs it, on one process."""
    module, preprocessor = common.load_biencoder(work.max_length, work.model, unpadded=unpadded)
    engine = common.ddp_engine(module)
    collator = PairCollator(common.pair_rows(work.queries, work.documents), preprocessor)
    indices = list(range(len(work.queries)))

    def gradient() -> float:
        batch = collator[indices]
        queries, documents = (
            split_batch(side, work.chunk) for side in (batch.queries, batch.documents)
        )
        return gradcache_step(engine, queries, documents, batch.positive_BK[:, 0]).loss

    return Candidate(module, gradient, lambda: engine.step(common.MAX_NORM))


def unsorted_candidate(work: Workload) -> Candidate:
    """The same with rows in the order of the batch, which is how the others chunk them."""
    module, preprocessor = common.load_biencoder(work.max_length, work.model, unpadded=False)
    engine = common.ddp_engine(module)
    positive_B = torch.arange(len(work.queries))

    def gradient() -> float:
        queries = split_batch(preprocessor.queries(work.queries), work.chunk)
        inputs = preprocessor.documents(common.as_documents(work.documents))
        return gradcache_step(engine, queries, split_batch(inputs, work.chunk), positive_B).loss

    return Candidate(module, gradient, lambda: engine.step(common.MAX_NORM))


def sentence_transformers_candidate(work: Workload) -> Candidate:
    """sentence-transformers' cached loss on its own model class, as its trainer calls them."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
    )

    model = SentenceTransformer(resolve_source(work.model).location, device="cpu").train()
    model.max_seq_length = work.max_length
    loss = CachedMultipleNegativesRankingLoss(model, scale=SCALE, mini_batch_size=work.chunk)

    def gradient() -> float:
        features = [model.preprocess(work.queries), model.preprocess(work.documents)]
        value = loss(features, None)
        value.backward()
        return value.item()

    return Candidate(model, gradient, _plain_update(model))


def gradcache_candidate(work: Workload, split: Callable | None = None) -> Candidate:
    """The GradCache package over our encoder (it has none): its caching and its loss.

    Its own splitting keeps the whole batch's padding in every chunk; ``split`` replaces it.
    """
    grad_cache = import_gradcache()
    module, preprocessor = common.load_biencoder(work.max_length, work.model, unpadded=False)
    contrastive = grad_cache.SimpleContrastiveLoss()
    cache = grad_cache.GradCache(
        models=[module.encoder, module.encoder],
        chunk_sizes=work.chunk,
        loss_fn=lambda query_BD, document_BD: contrastive(query_BD * SCALE, document_BD),
        split_input_fn=split,
    )

    def gradient() -> float:
        inputs = preprocessor.documents(common.as_documents(work.documents))
        return cache(preprocessor.queries(work.queries), inputs).item()

    return Candidate(module, gradient, _plain_update(module.encoder))


def trimmed_gradcache_candidate(work: Workload) -> Candidate:
    """The GradCache package with our splitting, which trims padding that a chunk does not need."""
    return gradcache_candidate(work, split_batch)


def import_gradcache() -> types.SimpleNamespace:
    """The package's two classes.

    Release 0.0.1 imports its own modules by the name ``grad_cache``, which its wheel does not
    install; both names are made to mean the same package.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    import gradcache

    sys.modules.setdefault("grad_cache", gradcache)
    import gradcache.context_managers

    sys.modules.setdefault("grad_cache.context_managers", gradcache.context_managers)
    from gradcache.grad_cache import GradCache
    from gradcache.loss import SimpleContrastiveLoss

    return types.SimpleNamespace(GradCache=GradCache, SimpleContrastiveLoss=SimpleContrastiveLoss)


def _plain_update(module: nn.Module) -> Callable[[], None]:
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    optimizer = common.adamw(named)
    parameters = [p for _, p in named]

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, common.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


CANDIDATES: dict[str, Callable[[Workload], Candidate]] = {
    OURS: pixelrag_candidate,
    "pixelrag-padded": partial(pixelrag_candidate, unpadded=False),
    "pixelrag-unsorted": unsorted_candidate,
    "sentence-transformers": sentence_transformers_candidate,
    "gradcache": gradcache_candidate,
    "gradcache-trimmed": trimmed_gradcache_candidate,
}
# Where texts come from, by the name of a function of `common`.
TEXTS = {"code-search": "code_search_pairs", "long-tail": "long_tail_pairs"}
_NEEDS = {
    "sentence-transformers": "sentence_transformers",
    "gradcache": "gradcache",
    "gradcache-trimmed": "gradcache",
}


def token_lengths(work: Workload) -> dict[str, dict[str, float]]:
    """Mean, median and longest text of each side, in tokens, as the model reads them."""
    _, preprocessor = common.load_biencoder(work.max_length, work.model)
    sides = {
        "queries": preprocessor.queries(work.queries),
        "documents": preprocessor.documents(common.as_documents(work.documents)),
    }
    found = {}
    for name, inputs in sides.items():
        length_B = inputs["attention_mask"].sum(1).float()
        found[name] = {
            "mean": round(length_B.mean().item(), 1),
            "median": length_B.median().item(),
            "longest": length_B.max().item(),
        }
    return found


def installed() -> list[str]:
    """Candidates that can run here, ours first."""
    return [
        name
        for name in CANDIDATES
        if name not in _NEEDS or importlib.util.find_spec(_NEEDS[name]) is not None
    ]


def compare_gradients(candidates: dict[str, Candidate]) -> dict[str, dict[str, float]]:
    """Loss and encoder gradient of each with dropout off; gradients are cleared again.

    Returns:
        By name: ``loss``, and ``gradient_error``, the relative L2 distance of the encoder's
        gradient from the first candidate's.

    Raises:
        AssertionError: a candidate does not compute what the first does.
    """
    found: dict[str, dict[str, float]] = {}
    reference: list[torch.Tensor] = []
    for name, candidate in candidates.items():
        candidate.module.eval()
        loss = candidate.gradient()
        gradients = _encoder_gradients(candidate.module)
        candidate.module.train()
        candidate.update()
        reference = reference or gradients
        if [g.shape for g in gradients] != [g.shape for g in reference]:
            raise AssertionError(f"{name} trains other parameters than {next(iter(candidates))}")
        pairs = list(zip(gradients, reference, strict=True))
        wrong = sum(((got - wanted).double() ** 2).sum() for got, wanted in pairs)
        whole = sum((wanted.double() ** 2).sum() for _, wanted in pairs)
        error = (wrong / whole).sqrt().item()
        found[name] = {"loss": loss, "gradient_error": error}
        if not error <= SAME_WORK:
            raise AssertionError(
                f"{name}: the encoder's gradient differs from {next(iter(candidates))}'s by "
                f"{error:.1e} (relative), expected at most {SAME_WORK:g}: not the same work"
            )
    return found


def _encoder_gradients(module: nn.Module) -> list[torch.Tensor]:
    """Copies in registration order, which all wrappers keep; without the temperature's."""
    return [
        p.grad.detach().clone() for p in module.parameters() if p.grad is not None and p.numel() > 1
    ]


def measure_memory(name: str, work: Workload, *, steps: int) -> dict[str, Any]:
    """Peak of this process over ``steps`` steps, above what it held when it was ready to begin."""
    candidate = CANDIDATES[name](work)
    base = common.resident_mib()
    common.reset_peak()
    for _ in range(steps):
        candidate.step()
    peak = common.peak_mib()
    return {
        "kind": "memory",
        "candidate": name,
        "base_mib": round(base),
        "peak_mib": round(peak),
        "above_base_mib": round(peak - base),
    }


def measure_time(
    names: Sequence[str], work: Workload, *, rounds: int, warmup: int
) -> list[dict[str, Any]]:
    """Times of all candidates in turns, and the ratio of ours to each."""
    candidates = {name: CANDIDATES[name](work) for name in names}
    same = compare_gradients(candidates)
    taken = common.interleaved(
        {name: candidate.step for name, candidate in candidates.items()},
        rounds=rounds,
        warmup=warmup,
    )
    return [
        {
            "kind": "time",
            "candidate": name,
            "seconds": common.spread(took.wall),
            "cpu_seconds": common.spread(took.cpu),
            "rows_per_second": common.spread([len(work.queries) / s for s in took.wall]),
            "ours_over_this": common.ratios(taken[OURS], took),
            "rounds": rounds,
            **same[name],
        }
        for name, took in taken.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison and write it down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    parser.add_argument("--batch", type=int, default=256, help="rows of a batch")
    parser.add_argument("--texts", choices=list(TEXTS), default="code-search", help="what to embed")
    parser.add_argument("--chunk", type=int, default=16, help="rows of a chunk")
    parser.add_argument("--max-length", type=int, default=128, help="tokens of a text, at most")
    parser.add_argument("--rounds", type=int, default=10, help="measured steps of each")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--model", default=common.MODEL, help="as model.name_or_path")
    parser.add_argument("--only", nargs="+", choices=list(CANDIDATES), help="candidates to run")
    parser.add_argument("--output", type=Path, help="JSONL file to write")
    parser.add_argument("--memory-of", choices=list(CANDIDATES), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    queries, documents = getattr(common, TEXTS[arguments.texts])(arguments.batch)
    work = Workload(queries, documents, arguments.chunk, arguments.max_length, arguments.model)
    with process_group("cpu"):
        if arguments.memory_of:
            print(json.dumps(measure_memory(arguments.memory_of, work, steps=arguments.rounds)))
            return
        _compare(arguments, work)


def _compare(arguments: argparse.Namespace, work: Workload) -> None:
    names = installed()
    if arguments.only:
        absent = [name for name in arguments.only if name not in names]
        if absent:
            raise SystemExit(f"not installed here: {', '.join(absent)}")
        names = [name for name in names if name == OURS or name in arguments.only]
    settings = {
        name: getattr(arguments, name)
        for name in ("texts", "batch", "chunk", "max_length", "threads")
    }
    results = common.Results(
        arguments.output, arguments.threads, ["benchmarks.peers", *sys.argv[1:]]
    )
    results.add({"kind": "workload", **settings, "tokens": token_lengths(work)})
    for name in sorted(set(CANDIDATES) - set(names)):
        results.add(
            {"kind": "left out", "candidate": name, "why": "not installed or not asked for"}
        )
    for row in measure_time(names, work, rounds=arguments.rounds, warmup=arguments.warmup):
        results.add(row)
    options = [("rounds", 3), ("model", arguments.model), *settings.items()]
    flags = [part for key, value in options for part in (f"--{key.replace('_', '-')}", value)]
    for name in names:
        results.add(common.fresh_process("benchmarks.peers", ["--memory-of", name, *flags]))


if __name__ == "__main__":
    main()
