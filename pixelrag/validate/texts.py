"""A distillation job: both models' small files, every row, what the run would cost. No weights."""

from __future__ import annotations

from collections.abc import Sequence

from pixelrag.config.distill import DistillConfig
from pixelrag.console import say
from pixelrag.data.text_data import read_texts
from pixelrag.data.text_encoder import TextEncoder
from pixelrag.data.token_store import TokenStore
from pixelrag.errors import DataError, PixelragError
from pixelrag.models.causal_load import load_tokenizer, student_source
from pixelrag.train.distill_budget import Budget, budget_of
from pixelrag.train.distill_data import (
    DistillData,
    check_tokens,
    plan_rows,
    reading_options,
    text_encoder,
)
from pixelrag.train.distill_models import agree_on_models, check_cache
from pixelrag.train.job import num_steps
from pixelrag.validate.duration import Hardware, duration
from pixelrag.validate.histogram import histogram


def check(config: DistillConfig, hardware: Hardware | None = None) -> int:
    """Print each fault and what the run would be; return 0, or the exit code of the first fault.

    Tokenizers and configurations of the models are read (from a hub, where they are named so), then
    every row is tokenized as training would do it.
    """
    try:
        source = student_source(config.student)
        tokenizer = load_tokenizer(source, trust_remote_code=config.student.trust_remote_code)
        contract = agree_on_models(config, tokenizer)
        encoder = text_encoder(config, tokenizer)
        budget = budget_of(config, contract.vocab_size)
    except PixelragError as error:
        say(str(error))
        say("the rows were not read: how they are tokenized depends on the models")
        return error.exit_code
    for line in budget.lines():
        say(line)
    stores, codes = zip(
        _read(config, config.data.train, encoder, draw=True),
        *([_read(config, config.data.eval, encoder, draw=False)] if config.data.eval else []),
        strict=True,
    )
    if any(codes):
        return next(filter(None, codes))
    try:
        for store in stores:
            check_tokens(store, contract.vocab_size)
        data = plan_rows(config, tokenizer, contract.attention_cost, *stores)
        if config.teacher.source in ("hidden_states", "cache"):
            check_cache(config, contract, data)
    except PixelragError as error:
        say(str(error))
        return error.exit_code
    for line in _run_in_figures(config, data, budget, hardware or Hardware()):
        say(line)
    return 0


def _read(
    config: DistillConfig, sources: Sequence[str], encoder: TextEncoder, *, draw: bool
) -> tuple[TokenStore | None, int]:
    """Tokenize; print every bad row and a summary.

    Returns:
        The tokens, and the exit code with which training would refuse to start; 0 = it would not.
    """
    try:
        store, report = read_texts(sources, encoder, **reading_options(config, draw=draw))
    except PixelragError as error:
        say(str(error))
        return None, error.exit_code
    for bad in report.bad:
        say(str(bad))
    share = report.num_supervised / max(report.num_tokens, 1)
    say(
        f"{', '.join(sources)}: {report.num_rows:,} rows, {report.num_bad_rows:,} bad; "
        f"{report.num_tokens:,} tokens, {share:.0%} of them learnt from"
    )
    refused = report.num_bad_rows and config.data.bad_rows == "error"
    return store, DataError.exit_code if refused or not report.num_samples else 0


def _run_in_figures(
    config: DistillConfig, data: DistillData, budget: Budget, hardware: Hardware
) -> list[str]:
    batch, plan, length = config.batch, data.train, config.packing.length
    world_size = hardware.world_size
    step_rows = batch.rows(world_size)
    steps_per_epoch = -(-plan.num_rows // step_rows)
    steps = num_steps(config, steps_per_epoch)
    rows = plan.epoch(0)
    lengths = plan.store.lengths
    lines = [
        f"lengths: {int(lengths.min()):,} to {int(lengths.max()):,} tokens, mean "
        f"{lengths.mean():,.0f}; {plan.report}",
        f"{plan.num_rows:,} rows of {length:,} tokens, {plan.fill:.2%} full; a step sees "
        f"{step_rows} of them ({batch.arithmetic(world_size)}); {steps:,} steps, "
        f"{steps / steps_per_epoch:.2f} epochs",
    ]
    squares = budget.squares(plan, rows)
    per_epoch = budget.operations(int(rows.tokens.sum()), squares, int(rows.supervised.sum()))
    lines.append(
        f"{per_epoch / rows.tokens.sum() / 1e9:,.2f} GFLOP a token, "
        f"{per_epoch * steps / steps_per_epoch / 1e15:,.3f} PFLOP in all"
    )
    if data.held_out is not None:
        lines.append(f"held out: {data.held_out.report}")
    a_step = int(rows.supervised.sum()) / steps_per_epoch
    lines.append(
        f"a step learns from about {a_step:,.0f} tokens, of {step_rows * length:,} in its rows; "
        f"{steps_per_epoch:,} steps an epoch"
    )
    lines += histogram("samples", lengths.tolist(), length, "packing.length")
    share = int(rows.supervised.sum()) / int(rows.tokens.sum())
    lengths_of = {"document": float(lengths.mean()), "supervised": share}
    loss = config.loss.model_copy(update={"vocab_size": budget.vocab_size})
    config = config.model_copy(update={"loss": loss})
    lines.append(duration(config, per_epoch / steps_per_epoch, steps, hardware, **lengths_of))
    return lines
