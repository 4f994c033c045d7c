"""What a distillation job reads: samples as tokens, and rows packed from them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pixelrag.config.distill import DistillConfig
from pixelrag.data.pack_plan import PackPlan, RowSettings
from pixelrag.data.text_data import load_texts
from pixelrag.data.text_encoder import TextEncoder
from pixelrag.data.token_store import TokenStore, hold_out
from pixelrag.distributed.collectives import from_main
from pixelrag.distributed.env import World
from pixelrag.distributed.together import together
from pixelrag.errors import DataError

logger = logging.getLogger("pixelrag")


@dataclass(frozen=True, slots=True)
class DistillData:
    """Rows to train on, and rows to evaluate on (None = nothing is held out)."""

    train: PackPlan
    held_out: PackPlan | None

    @property
    def isolates(self) -> bool:
        """Whether samples that share a row must not see each other, in training or evaluation."""
        plans = [plan.settings for plan in (self.train, self.held_out) if plan is not None]
        return any(plan.packed and plan.attention == "isolated" for plan in plans)


def open_data(
    config: DistillConfig,
    tokenizer: Any,
    world: World,
    *,
    vocab_size: int,
    attention_cost: float,
) -> DistillData:
    """Tokenize on rank 0, share the tokens, plan the rows on every rank; a collective.

    Args:
        config: the job's configuration.
        tokenizer: the student's.
        world: this process's place.
        vocab_size: tokens that both models know.
        attention_cost: of a pair of tokens, in that of a token; balances the ranks.

    Raises:
        DataError: data cannot be read, rows are bad, or hold tokens that only one model knows.
        ModelError: the tokenizer has no usable chat template.
    """
    store = _shared_store(config, config.data.train, tokenizer, world, "train")
    held_out_store = None
    if config.data.eval:
        held_out_store = _shared_store(config, config.data.eval, tokenizer, world, "eval")
    with together():
        for tokens in (store, held_out_store):
            if tokens is not None:
                check_tokens(tokens, vocab_size)
        data = plan_rows(config, tokenizer, attention_cost, store, held_out_store)
        logger.info("training on %s", data.train.report)
        logger.info(
            "%d rows of %d tokens, %.2f %% full", data.train.num_rows, config.packing.length,
            100 * data.train.fill,
        )  # fmt: skip
        if data.held_out is not None:
            logger.info("held out: %s", data.held_out.report)
        return data


def plan_rows(
    config: DistillConfig,
    tokenizer: Any,
    attention_cost: float,
    store: TokenStore,
    held_out_store: TokenStore | None = None,
) -> DistillData:
    """Plan the rows of tokenized samples.

    Args:
        config: the job's configuration.
        tokenizer: the student's.
        attention_cost: see `open_data`.
        store: samples of `data.train`.
        held_out_store: samples of `data.eval`, if there are any.

    Raises:
        DataError: nothing is left to train on.
    """
    samples = held_out_samples = None
    if config.data.eval_samples is not None:
        held_out_store = store
        samples, held_out_samples = hold_out(
            store, config.data.eval_samples, config.data.split_seed
        )
    settings = row_settings(config, tokenizer, attention_cost)
    train = PackPlan(store, settings, seed=config.seed, samples=samples)
    if held_out_store is None:
        return DistillData(train, None)
    if held_out_samples is None:
        held_out_samples = np.arange(len(held_out_store), dtype=np.int64)
    # Every sample by itself, whatever the training rows do: the figure then means the same in
    # every run.
    alone = replace(settings, attention="isolated", separator_id=None, mask_first_token=False)
    held_out = PackPlan(
        held_out_store,
        alone,
        seed=config.data.split_seed,
        samples=held_out_samples[: config.eval.max_samples],
    )
    return DistillData(train, held_out)


def row_settings(config: DistillConfig, tokenizer: Any, attention_cost: float) -> RowSettings:
    """How the configuration wants rows."""
    packing = config.packing
    separates = packing.separator == "on" or (
        packing.separator == "auto" and packing.attention == "concatenated"
    )
    return RowSettings(
        row_length=packing.length,
        packed=packing.enabled,
        attention=packing.attention,
        overlong=packing.overlong,
        separator_id=tokenizer.eos_token_id if separates else None,
        mask_first_token=packing.mask_first_token,
        attention_cost=attention_cost,
    )


def check_tokens(store: TokenStore, vocab_size: int) -> None:
    """Refuse tokens that only one of the models knows.

    Raises:
        DataError: names the first sample that holds one.
    """
    largest = int(store.ids.max(initial=0))
    if largest < vocab_size:
        return
    position = int(np.flatnonzero(store.ids >= vocab_size)[0])
    sample = int(np.searchsorted(store.offsets, position, side="right")) - 1
    raise DataError(
        f"{store.sample_id(sample)} holds token {int(store.ids[position])}, but the models share "
        f"the first {vocab_size} only (loss.vocab_size); leave such samples out"
    )


def _shared_store(
    config: DistillConfig, sources: list[str], tokenizer: Any, world: World, name: str
) -> TokenStore:
    """Samples tokenized by rank 0; other ranks map them from the run's folder."""
    made: dict[str, TokenStore] = {}

    def make() -> Path | None:
        store = _tokenize(config, sources, tokenizer, draw=name == "train")
        made["store"] = store
        if world.world_size == 1:
            return None
        folder = Path(config.output_dir) / "tokens" / f"{name}-{store.fingerprint[:16]}"
        if not folder.exists():
            store.save(folder)
        return folder

    folder = from_main(make)
    with together():
        if (store := made.get("store")) is not None:
            return store
        assert folder is not None  # rank 0 of several wrote it
        return TokenStore.load(folder)


def _tokenize(
    config: DistillConfig, sources: list[str], tokenizer: Any, *, draw: bool
) -> TokenStore:
    store, _ = load_texts(
        sources,
        text_encoder(config, tokenizer),
        bad_rows=config.data.bad_rows,
        **reading_options(config, draw=draw),
    )
    return store


def text_encoder(config: DistillConfig, tokenizer: Any) -> TextEncoder:
    """What makes tokens of the rows.

    Raises:
        DataError: `data.chat_template` cannot be read.
    """
    template, path = None, config.data.chat_template
    if path is not None:
        try:
            template = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.chat_template {path}: cannot be read ({error})") from error
    return TextEncoder(
        tokenizer,
        supervise=config.data.supervise,
        chat_template=template,
        template_date=config.data.template_date,
    )


def reading_options(config: DistillConfig, *, draw: bool) -> dict[str, Any]:
    """How rows are read; only those to train on are drawn and streamed."""
    data = config.data
    return {
        "split": data.split,
        "max_samples": data.max_samples if draw else None,
        "streaming": data.streaming and draw,
        "shuffle_seed": data.stream_shuffle_seed,
        "shuffle_buffer": data.stream_shuffle_buffer,
    }
