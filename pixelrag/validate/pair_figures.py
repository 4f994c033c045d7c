"""What a contrastive run would be: its batches, negatives, steps, lengths and time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import torch

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.parts import ModelConfig
from pixelrag.data.files import Part
from pixelrag.data.lengths import Sample, token_lengths, visual_lengths
from pixelrag.data.pairs import PairDataset
from pixelrag.data.schema import Document, PairRow
from pixelrag.distributed.env import World
from pixelrag.models.embedder import Embedder
from pixelrag.models.load import outline_embedder, read_preprocessor
from pixelrag.models.preprocess import Preprocessor
from pixelrag.models.tower_parts import part_of, unfreeze
from pixelrag.train.inputs import require_text
from pixelrag.train.pair_sampler import TrainingRows, build_sampler
from pixelrag.validate.duration import Hardware, duration
from pixelrag.validate.histogram import histogram

_PATCHES = 4  # that make a visual token
_AROUND = 32.0  # tokens of the template around an image, about


def read_model(config: ContrastiveConfig, rows: Sequence[PairRow]) -> tuple[Embedder, Preprocessor]:
    """The model's shapes and what makes its inputs; loads no weights.

    Raises:
        ModelError: it is not there, or lacks what `lora` or `model.unfrozen` ask for.
        DataError: it reads text alone, and a row has an image.
    """
    embedder = outline_embedder(config.model, config.lora)
    if config.model.unfrozen:
        unfreeze(embedder.backbone, config.model.unfrozen)
    preprocessor = read_preprocessor(config.model, embedder)
    if not preprocessor.has_vision:
        require_text(rows)
    if config.loss.mask_guide is not None:
        guide = ModelConfig(name_or_path=config.loss.mask_guide)
        if not read_preprocessor(guide, outline_embedder(guide)).has_vision:
            require_text(rows, "loss.mask_guide")
    return embedder, preprocessor


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Tokens of samples of queries, texts and images; `visual` without what goes around them."""

    queries: list[int]
    texts: list[int]
    visual: list[int]


@dataclass(frozen=True, slots=True)
class _Means:
    """Mean tokens of what a step sees; 0 where there is none."""

    query: float
    text: float
    visual: float

    @classmethod
    def of(cls, lengths: _Lengths, preprocessor: Preprocessor) -> _Means:
        def kept(values: list[int], limit: int | None) -> float:
            return mean(min(value, limit) for value in values) if values and limit else 0.0

        return cls(
            kept(lengths.queries, preprocessor.query_max_length),
            kept(lengths.texts, preprocessor.document_max_length),
            kept(lengths.visual, preprocessor.max_visual_tokens),
        )


def figures(
    config: ContrastiveConfig,
    rows: Mapping[Part, Sequence[PairDataset]],
    embedder: Embedder,
    preprocessor: Preprocessor,
    hardware: Hardware,
) -> Iterator[str]:
    """The lines that end a validation.

    Args:
        config: the job's.
        rows: usable rows of each path, by its part; those to train on must all be there.
        embedder, preprocessor: as `read_model` gave them.
        hardware: that the run is to be on.

    Raises:
        ConfigError, DataError: the data are too few for the batch or the weights.
    """
    world_size = hardware.world_size
    sets, texts = rows["train"], rows.get("text", [])
    training = TrainingRows(sets[0], [len(s) for s in sets], sum(len(s) for s in texts))
    world = World(0, world_size, 0, torch.device("cpu"))
    _, steps = build_sampler(config, training, world)
    batch, num_rows = config.batch, training.num_main
    global_rows = min(batch.rows(world_size), num_rows)
    accumulated = batch.gradient_accumulation_steps
    per_epoch = num_rows / (global_rows * accumulated)
    yield (
        f"a step: {batch.arithmetic(world_size)} = {global_rows * accumulated:,} rows, through the "
        f"model in chunks of {batch.chunks}"
    )
    every = [row for one in sets for row in one]
    documents = mean(len(row.documents) for row in every)
    negatives = global_rows * documents - mean(len(row.positives) for row in every)
    yield (
        f"a query is told from about {negatives:,.0f} negatives: the documents of {global_rows:,} "
        f"rows of all processes, {documents:.2f} each, without its own positives"
    )
    yield (
        f"{num_rows:,} rows, {per_epoch:,.1f} steps an epoch; {steps:,} steps, "
        f"{steps / per_epoch:,.2f} epochs"
    )
    samples = _sampled(every)
    lengths = _measured(samples, preprocessor)
    yield from _shown(samples, lengths, preprocessor)
    means = _Means.of(lengths, preprocessor)
    flops = _flops(config, embedder, means, documents, samples) * global_rows * accumulated
    seen = {"query": means.query, "document": means.text or _AROUND, "image": means.visual}
    yield duration(config, flops, steps, hardware, **seen)


def _sampled(rows: Sequence[PairRow]) -> tuple[Sample[str], Sample[Document], Sample[Document]]:
    """Queries, texts and images."""
    queries: Sample[str] = Sample()
    texts: Sample[Document] = Sample()
    images: Sample[Document] = Sample()
    for row in rows:
        queries.add(row.query)
        for document in row.documents:
            (texts if document.image is None else images).add(document)
    return queries, texts, images


def _measured(samples: tuple[Sample, Sample, Sample], preprocessor: Preprocessor) -> _Lengths:
    queries, texts, images = (sample.items for sample in samples)

    def tokens(of: list[str], kind: str) -> list[int]:
        if not preprocessor.has_vision:
            prefix = getattr(preprocessor, f"{kind}_instruction")
            return token_lengths([prefix + text for text in of], preprocessor.tokenizer).values
        # What the chat template puts around a text.
        made = preprocessor.queries(["x"]) if kind == "query" else _documents(preprocessor)
        around = made["input_ids"].shape[1] - 1
        return [around + n for n in token_lengths(of, preprocessor.tokenizer).values]

    sides = [(document.image, document.key) for document in images]
    side = preprocessor.visual_side
    return _Lengths(
        tokens(queries, "query"),
        tokens([document.text for document in texts], "document") if texts else [],
        visual_lengths(sides, side).values if side else [],
    )


def _documents(preprocessor: Preprocessor) -> dict[str, torch.Tensor]:
    return preprocessor.documents([Document.of_text("x")])


def _shown(
    samples: tuple[Sample, Sample, Sample], lengths: _Lengths, preprocessor: Preprocessor
) -> Iterator[str]:
    queries, texts, images = samples
    yield from histogram(
        "queries", lengths.queries, preprocessor.query_max_length, "model.query_max_length",
        queries.seen,
    )  # fmt: skip
    if lengths.texts:
        yield from histogram(
            "documents of text", lengths.texts, preprocessor.document_max_length,
            "model.document_max_length", texts.seen,
        )  # fmt: skip
    most = preprocessor.max_visual_tokens
    if lengths.visual and most is not None:
        yield from histogram("images", lengths.visual, most, "model.max_visual_tokens", images.seen)


def _flops(
    config: ContrastiveConfig,
    embedder: Embedder,
    means: _Means,
    documents: float,
    samples: tuple[Sample, Sample, Sample],
) -> float:
    """Operations of training on a row: 2 a parameter and token, for each forward pass's worth.

    A backward pass is worth two, one where weights are frozen; GradCache adds a forward pass.
    """
    body = {"text": 0, "vision": 0, "merger": 0}
    inside = {id(p) for block in embedder.blocks() for p in block.parameters()}
    for name, parameter in embedder.backbone.named_parameters():
        if id(parameter) in inside:
            body[part_of(name)] += parameter.numel()
    passes = (2 if config.lora.enabled else 3) + (config.batch.replay != "none")
    _, texts, images = samples
    share = images.seen / max(1, images.seen + texts.seen)
    tokens, patches = means.query, 0.0
    if "document" in config.train:
        tokens += documents * (share * means.visual + (1 - share) * means.text)
        patches = documents * share * means.visual * _PATCHES
    return 2.0 * passes * (body["text"] * tokens + body["vision"] * patches)
