"""What the contrastive job and the commands around it build of a configuration."""

from __future__ import annotations

import torch

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.contrastive_loss import LossConfig
from pixelrag.distributed.env import World
from pixelrag.distributed.together import together
from pixelrag.errors import ConfigError
from pixelrag.evaluate.pairs import PairEvaluator
from pixelrag.evaluate.retriever import RetrieverEvaluator
from pixelrag.evaluate.tiles import TileEvaluator
from pixelrag.losses.contrastive import Objective
from pixelrag.models import Preprocessor, load_embedder
from pixelrag.models.biencoder import BiEncoder
from pixelrag.models.embedder import Embedder
from pixelrag.models.training_state import load_training_state
from pixelrag.train.guide import Guide, open_guide
from pixelrag.train.inputs import HeldOut, open_held_out, require_text


def objective_of(loss: LossConfig) -> Objective:
    """What the configuration asks to minimise."""
    weights = loss.matryoshka_weights or [1.0] * len(loss.matryoshka_dims)
    return Objective(
        name=loss.name,
        hardness_alpha=loss.hardness_alpha,
        label_smoothing=loss.label_smoothing,
        bidirectional=loss.bidirectional,
        matryoshka=tuple(zip(loss.matryoshka_dims, weights, strict=True)),
        mask_margin=loss.mask_margin,
        tile_size=None if loss.tile_size == "auto" else loss.tile_size,
    )


def build_biencoder(config: ContrastiveConfig) -> tuple[BiEncoder, Preprocessor]:
    """Load the encoder and put the temperature beside it, on the CPU."""
    bf16 = config.engine.precision == "bf16"
    # A frozen base needs no fp32 master; whatever is trained has one.
    frozen = config.lora.enabled or config.model.unfrozen is not None
    dtype = torch.bfloat16 if bf16 and frozen else torch.float32
    with together():
        embedder, preprocessor = load_embedder(
            config.model, config.lora, dtype=dtype, half_precision=bf16, seed=config.seed
        )
    longest = max(config.loss.matryoshka_dims, default=0)
    if longest > embedder.embedding_dim:
        raise ConfigError(
            f"loss.matryoshka_dims: got {longest}, and the embeddings of "
            f"{config.model.name_or_path} have {embedder.embedding_dim} dimensions"
        )
    container = container_of(config, embedder)
    if config.model.training_state is not None:
        with together():
            load_training_state(config.model.training_state, container)
    return container, preprocessor


def container_of(config: ContrastiveConfig, embedder: Embedder) -> BiEncoder:
    """Everything that is trained, in one module."""
    return BiEncoder(
        embedder,
        temperature=config.loss.initial_temperature,
        learnable_temperature=config.loss.learnable_temperature,
        bias=config.loss.initial_bias,
    )


def build_evaluator(
    config: ContrastiveConfig, world: World, preprocessor: Preprocessor
) -> RetrieverEvaluator | None:
    """Open what is held out; None where the configuration names nothing. A collective."""
    held_out = open_held_out(config)
    guide = None if held_out is None else open_guide(config, world)
    return evaluator_of(config, held_out, preprocessor, guide)


def evaluator_of(
    config: ContrastiveConfig,
    held_out: HeldOut | None,
    preprocessor: Preprocessor,
    guide: Guide | None,
) -> RetrieverEvaluator | None:
    """Join what is held out, a model's preprocessor and a guide; a collective."""
    if held_out is None:
        return None
    size = config.eval.batch_size
    pairs = tiles = None
    with together():
        if held_out.rows:
            if not preprocessor.has_vision:
                require_text(held_out.rows)
            if guide is not None:
                guide.require_readable(held_out.rows)
            pairs = PairEvaluator(
                held_out.rows,
                preprocessor,
                corpus=held_out.corpus,
                batch_size=size,
                retrieval=config.eval.retrieval,
                objective=objective_of(config.loss),
                mask_same_content=config.loss.mask_same_content,
                guide=None if guide is None else (guide, guide.preprocessor),
            )
        if held_out.tiles is not None:
            tiles = TileEvaluator(held_out.tiles, preprocessor, batch_size=size)
    return RetrieverEvaluator(pairs, tiles, config.eval)
