"""A step of GradCache by several implementations: tokenise, forward, loss, replay, clip, AdamW.

pixelrag               PairCollator, split_batch, gradcache_step over the ddp engine, engine.step
pixelrag-padded        the same with model.unpadded false
pixelrag-unsorted      the same, padded, without the collator's sorting by length
sentence-transformers  SentenceTransformer.preprocess, CachedMultipleNegativesRankingLoss
gradcache              the package of that name; it has no encoder, so it runs ours
gradcache-trimmed      the same with split_batch in place of its own splitting, which keeps padding

All compute in fp32 with dropout on, clip alike and step AdamW.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from pixelrag.bench.cases import Ready, Skipped
from pixelrag.bench.models import MAX_NORM, adamw
from pixelrag.bench.rows import Case
from pixelrag.bench.texts import PAIRS
from pixelrag.config.bench import PeersConfig
from pixelrag.config.parts import ModelConfig
from pixelrag.data.schema import Document, PairRow
from pixelrag.engine import Engine, build_engine
from pixelrag.errors import EngineError
from pixelrag.gradcache import gradcache_step, split_batch
from pixelrag.models import Preprocessor, load_embedder
from pixelrag.models.biencoder import BiEncoder
from pixelrag.models.source import resolve_source
from pixelrag.train.batches import PairCollator

SCALE = 1 / 0.07
# Two fp32 implementations differ by rounding: sums in another order, norms with an epsilon.
SAME_WORK = 1e-4
NEEDS = {
    "sentence-transformers": "sentence_transformers",
    "gradcache": "gradcache",
    "gradcache-trimmed": "gradcache",
}


@dataclass(frozen=True, slots=True)
class Workload:
    """What every candidate gets."""

    queries: list[str]
    documents: list[str]
    chunk: int
    max_length: int
    model: str
    device: torch.device


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
    update: Callable[[], object]

    def step(self) -> None:
        """One whole step."""
        self.gradient()
        self.update()


def groups(config: PeersConfig) -> list[list[Case]]:
    """All of them."""
    return [[{"candidate": name} for name in CANDIDATES]]


def prepare(
    config: PeersConfig, cases: Sequence[Case], device: torch.device
) -> list[Ready | Skipped]:
    """Load all candidates, and see that they do the same work."""
    sizes = config.gradcache
    texts = PAIRS[sizes.texts](sizes.batch)
    work = Workload(*texts, sizes.chunk, sizes.max_length, sizes.model, device)
    names = [str(case["candidate"]) for case in cases]
    candidates = {name: CANDIDATES[name](work) for name in names}
    found = compare_gradients(candidates)
    tokens = num_tokens(work)
    return [Ready(candidates[name].step, tokens, figures=found[name].copy) for name in names]


def compare_gradients(candidates: Mapping[str, Candidate]) -> dict[str, dict[str, float]]:
    """Loss and encoder gradient of each with dropout off; gradients are cleared again.

    Returns:
        By name: ``loss``, and ``gradient_error``, the relative L2 distance of the encoder's
        gradient from the first candidate's.

    Raises:
        EngineError: a candidate does not compute what the first does.
    """
    found: dict[str, dict[str, float]] = {}
    reference: list[torch.Tensor] = []
    first = next(iter(candidates))
    for name, candidate in candidates.items():
        candidate.module.eval()
        loss = candidate.gradient()
        gradients = _encoder_gradients(candidate.module)
        candidate.module.train()
        candidate.update()
        reference = reference or gradients
        if [g.shape for g in gradients] != [g.shape for g in reference]:
            raise EngineError(f"{name} trains other parameters than {first}")
        pairs = list(zip(gradients, reference, strict=True))
        wrong = sum(((got - wanted).double() ** 2).sum() for got, wanted in pairs)
        whole = sum((wanted.double() ** 2).sum() for _, wanted in pairs)
        error = math.sqrt(float(wrong / whole))
        found[name] = {"loss": loss, "gradient_error": error}
        if not error <= SAME_WORK:
            raise EngineError(
                f"{name}: the encoder's gradient differs from {first}'s by {error:.1e} (relative), "
                f"expected at most {SAME_WORK:g}: not the same work"
            )
    return found


def _encoder_gradients(module: nn.Module) -> list[torch.Tensor]:
    """Copies in registration order, which all wrappers keep; without the temperature's."""
    return [
        p.grad.detach().clone() for p in module.parameters() if p.grad is not None and p.numel() > 1
    ]


def load_biencoder(
    work: Workload, *, unpadded: bool | Literal["auto"] = "auto"
) -> tuple[BiEncoder, Preprocessor]:
    """The model as the contrastive job holds it, in training mode, dropout on."""
    config = ModelConfig(
        name_or_path=work.model,
        query_max_length=work.max_length,
        document_max_length=work.max_length,
        unpadded=unpadded,
    )
    embedder, preprocessor = load_embedder(config)
    return BiEncoder(embedder).train().to(work.device), preprocessor


def num_tokens(work: Workload) -> int:
    """Real tokens of a batch, queries and documents."""
    _, preprocessor = load_biencoder(work)
    sides = preprocessor.queries(work.queries), preprocessor.documents(_as_documents(work))
    return sum(int(side["attention_mask"].sum()) for side in sides)


def _as_documents(work: Workload) -> list[Document]:
    return [Document.of_text(text) for text in work.documents]


def _engine(module: BiEncoder, work: Workload) -> Engine:
    return build_engine(module, adamw, device=work.device)


def pixelrag(work: Workload, *, unpadded: bool | Literal["auto"] = "auto") -> Candidate:
    """This project's path as the contrastive job runs it, on one process."""
    module, preprocessor = load_biencoder(work, unpadded=unpadded)
    engine = _engine(module, work)
    rows = [
        PairRow(query, (document,), (), f"row {index}")
        for index, (query, document) in enumerate(
            zip(work.queries, _as_documents(work), strict=True)
        )
    ]
    collator = PairCollator(rows, preprocessor)
    indices = list(range(len(rows)))

    def gradient() -> float:
        batch = collator[indices]
        queries, documents = (
            split_batch(side, work.chunk) for side in (batch.queries, batch.documents)
        )
        return gradcache_step(engine, queries, documents, batch.positive_BK[:, 0]).loss

    return Candidate(module, gradient, lambda: engine.step(MAX_NORM))


def unsorted(work: Workload) -> Candidate:
    """The same with rows in the order of the batch, which is how the others chunk them."""
    module, preprocessor = load_biencoder(work, unpadded=False)
    engine = _engine(module, work)
    positive_B = torch.arange(len(work.queries))

    def gradient() -> float:
        queries = split_batch(preprocessor.queries(work.queries), work.chunk)
        inputs = preprocessor.documents(_as_documents(work))
        return gradcache_step(engine, queries, split_batch(inputs, work.chunk), positive_B).loss

    return Candidate(module, gradient, lambda: engine.step(MAX_NORM))


def sentence_transformers(work: Workload) -> Candidate:
    """sentence-transformers' cached loss on its own model class, as its trainer calls them."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
    )

    model = SentenceTransformer(resolve_source(work.model).location, device=str(work.device))
    model.train().max_seq_length = work.max_length
    loss = CachedMultipleNegativesRankingLoss(model, scale=SCALE, mini_batch_size=work.chunk)

    def gradient() -> float:
        sides = [model.preprocess(work.queries), model.preprocess(work.documents)]
        features = [
            {k: v.to(work.device) if isinstance(v, torch.Tensor) else v for k, v in side.items()}
            for side in sides
        ]
        value = loss(features, None)
        value.backward()
        return value.item()

    return Candidate(model, gradient, _plain_update(model))


def gradcache(work: Workload, split: Callable[..., Any] | None = None) -> Candidate:
    """The package's caching and loss over our encoder; ``split`` replaces its splitting."""
    package = import_gradcache()
    module, preprocessor = load_biencoder(work, unpadded=False)
    contrastive = package.SimpleContrastiveLoss()
    cache = package.GradCache(
        models=[module.encoder, module.encoder],
        chunk_sizes=work.chunk,
        loss_fn=lambda query_BD, document_BD: contrastive(query_BD * SCALE, document_BD),
        split_input_fn=split,
    )

    def gradient() -> float:
        sides = preprocessor.queries(work.queries), preprocessor.documents(_as_documents(work))
        inputs = [{k: v.to(work.device) for k, v in side.items()} for side in sides]
        return cache(*inputs).item()

    return Candidate(module, gradient, _plain_update(module.encoder))


def import_gradcache() -> types.SimpleNamespace:
    """The package's two classes.

    Release 0.0.1 imports its own modules by the name ``grad_cache``, which its wheel does not
    install; both names are made to mean the same package.
    """
    import gradcache as package

    sys.modules.setdefault("grad_cache", package)
    import gradcache.context_managers as managers

    sys.modules.setdefault("grad_cache.context_managers", managers)
    from gradcache.grad_cache import GradCache
    from gradcache.loss import SimpleContrastiveLoss

    return types.SimpleNamespace(GradCache=GradCache, SimpleContrastiveLoss=SimpleContrastiveLoss)


def _plain_update(module: nn.Module) -> Callable[[], None]:
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    optimizer = adamw(named)
    parameters = [p for _, p in named]

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


CANDIDATES: dict[str, Callable[[Workload], Candidate]] = {
    "pixelrag": pixelrag,
    "pixelrag-padded": partial(pixelrag, unpadded=False),
    "pixelrag-unsorted": unsorted,
    "sentence-transformers": sentence_transformers,
    "gradcache": gradcache,
    "gradcache-trimmed": partial(gradcache, split=split_batch),
}
