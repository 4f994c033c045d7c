"""Makes of a checkpoint, best/ or last/ what other tools load. Needs no GPU.

The model is held in memory once, in float32: its base is loaded, the checkpoint's tensors are
copied into it from the mapped file, adapters are merged in place, weights are written in shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from pixelrag.config.base import JobConfig, load
from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.distill import DistillConfig
from pixelrag.config.jobs import config_class, job_of
from pixelrag.config.parts import ModelConfig
from pixelrag.config.rag import RagConfig
from pixelrag.distributed.env import process_group, read_ranks
from pixelrag.errors import CheckpointError, ConfigError
from pixelrag.export.causal import export_causal
from pixelrag.export.folder import MAX_SHARD_SIZE
from pixelrag.export.hf import export_embedder
from pixelrag.export.model_card import RunFacts, model_card
from pixelrag.export.rag import export_rag
from pixelrag.losses.temperature import scale_and_bias, scale_from_log
from pixelrag.models import Embedder, Preprocessor, load_embedder
from pixelrag.models.causal_load import load_student, load_tokenizer, student_source
from pixelrag.models.source import ADAPTER_FILE, SETTINGS_FILE, resolve_source, saved_settings
from pixelrag.models.tower_parts import trains_beside_adapters
from pixelrag.train.biencoder import build_biencoder
from pixelrag.train.checkpoint import verify_dir
from pixelrag.train.export_facts import run_of
from pixelrag.train.job import show_log, worded_disk_errors
from pixelrag.train.rag_data import RagParts, build_parts, document_encoder_config
from pixelrag.train.run_state import load_parameters


@dataclass(frozen=True, slots=True)
class Trained:
    """A retriever as a run left it, adapters not merged."""

    embedder: Embedder
    preprocessor: Preprocessor
    temperature: float
    bias: float | None  # of siglip
    ema_decay: float | None  # of the moving average that the weights are
    base: str
    document_encoder: str | None  # where queries alone were trained


def export(
    checkpoint: Path,
    form: str,
    output: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> None:
    """Write a checkpoint in another form.

    Args:
        checkpoint: checkpoint-<step>, best or last of a run's folder.
        form: hf, adapter, merged or sentence-transformers.
        output: folder to write.
        dtype: of the written weights.
        max_shard_size: larger weights are several files and an index.

    Raises:
        CheckpointError: not a folder that can be exported, or altered; or ``output`` holds
            something else.
        ConfigError: the form does not fit what was trained.
    """
    if read_ranks()[1] > 1:
        raise ConfigError("pixelrag export runs on one process; start it without a launcher")
    if output.resolve() == checkpoint.resolve():
        raise ConfigError(f"--output {output}: is the checkpoint itself; choose another folder")
    show_log(0)
    with process_group("cpu"), worded_disk_errors(output):
        _export(checkpoint, form, output, dtype, max_shard_size)


def _export(
    checkpoint: Path, form: str, output: Path, dtype: torch.dtype, max_shard_size: str
) -> None:
    if (checkpoint / "state.json").is_file():
        verify_dir(checkpoint)
        argv = ["--config", str(checkpoint / "config.yaml")]
        config, _ = load(config_class(job_of(argv)), argv)
        if not isinstance(config, ContrastiveConfig):
            _export_generator(checkpoint, config, form, output, dtype, max_shard_size)
            return
        trained = _of_checkpoint(checkpoint, config)
    elif (checkpoint / SETTINGS_FILE).is_file():
        trained = _of_export(checkpoint)
    else:
        raise CheckpointError(
            f"{checkpoint}: neither a checkpoint (state.json) nor an export of a run "
            f"({SETTINGS_FILE}); name checkpoint-<step>, best or last of the run's folder"
        )
    _export_retriever(trained, run_of(checkpoint), form, output, dtype, max_shard_size)


def _export_retriever(
    trained: Trained,
    run: RunFacts,
    form: str,
    output: Path,
    dtype: torch.dtype,
    max_shard_size: str,
) -> None:
    embedder = trained.embedder
    adapted = isinstance(embedder.backbone, PeftModel)
    if form == "hf" and adapted:
        raise ConfigError(
            f"--to hf: {run.checkpoint} holds adapters; take --to merged for the whole model, or "
            "--to adapter for them alone"
        )
    if form == "adapter" and adapted and trains_beside_adapters(embedder.backbone):
        raise ConfigError(
            f"--to adapter: {run.checkpoint} holds weights trained beside the adapters "
            "(model.unfrozen), which an adapter's files cannot; take --to merged"
        )
    if form in ("adapter", "merged") and not adapted:
        raise ConfigError(f"--to {form}: {run.checkpoint} holds no adapters; take --to hf")
    if adapted and form != "adapter":
        assert isinstance(embedder.backbone, PeftModel)
        embedder.backbone = embedder.backbone.merge_and_unload()
    with torch.no_grad():
        for parameter in embedder.parameters():  # one by one: never two copies of the whole
            parameter.data = parameter.data.to(dtype)
    card = model_card(
        output.name,
        "hf" if form == "merged" else form,
        resolve_source(trained.base),
        run,
        has_vision=trained.preprocessor.has_vision,
        ema_decay=trained.ema_decay,
        document_encoder=trained.document_encoder,
    )
    export_embedder(
        embedder,
        trained.preprocessor,
        embedder.state_dict(),
        output,
        temperature=trained.temperature,
        bias=trained.bias,
        ema_decay=trained.ema_decay,
        document_encoder=trained.document_encoder,
        dtype=dtype,
        max_shard_size=max_shard_size,
        card=card,
    )


def _of_checkpoint(checkpoint: Path, config: ContrastiveConfig) -> Trained:
    """The model of a `checkpoint-<step>`."""
    engine = config.engine.model_copy(update={"precision": "fp32"})
    model = config.model.model_copy(update={"attention": "auto"})
    container, preprocessor = build_biencoder(
        config.model_copy(update={"engine": engine, "model": model})
    )
    decay = config.ema.decay
    load_parameters(checkpoint, container, "model" if decay is None else "ema")
    scale, bias = scale_and_bias(container.logit_scale().detach())
    return Trained(
        container.encoder,
        preprocessor,
        1.0 / float(scale),
        None if bias is None else float(bias),
        decay,
        _base_of(config.model),
        config.document_model,
    )


def _of_export(folder: Path) -> Trained:
    """The model of a `best/` or `last/`, with the lengths and bounds that it was trained with."""
    source = resolve_source(str(folder))
    settings = saved_settings(source)
    if "pooling" not in settings:
        raise ConfigError(
            f"{folder} is a {settings.get('kind', 'model')} that from_pretrained loads as it is; "
            "nothing is left to export"
        )
    names = ("query_max_length", "document_max_length", "max_visual_tokens")
    given = {name: settings[name] for name in names if settings.get(name) is not None}
    adapter = source.json(ADAPTER_FILE)
    model = ModelConfig(name_or_path=str(folder), **given)
    embedder, preprocessor = load_embedder(model, as_saved=True)
    base = adapter["base_model_name_or_path"] if adapter else run_of(folder).base or str(folder)
    bias, decay = settings.get("bias"), settings.get("ema_decay")
    return Trained(
        embedder, preprocessor, settings["temperature"], bias, decay, base,
        settings.get("document_encoder"),
    )  # fmt: skip


def _base_of(model: ModelConfig) -> str:
    """What the training started from; below an adapter that it went on with, its base."""
    adapter = resolve_source(model.name_or_path).json(ADAPTER_FILE)
    return adapter["base_model_name_or_path"] if adapter else model.name_or_path


def _export_generator(
    checkpoint: Path,
    config: JobConfig,
    form: str,
    output: Path,
    dtype: torch.dtype,
    max_shard_size: str,
) -> None:
    """A distilled student, or all parts of a RAG model; adapters are merged."""
    if form != "hf":
        raise ConfigError(f"--to {form}: only for retrievers; take --to hf, adapters are merged")
    engine = config.engine.model_copy(update={"precision": "fp32"})
    if isinstance(config, DistillConfig):
        student = load_student(config.student, config.lora, seed=config.seed)
        decay = config.ema.decay
        kind = "model" if decay is None else "ema"
        load_parameters(checkpoint, torch.nn.ModuleDict({"student": student}), kind)
        tokenizer = load_tokenizer(
            student_source(config.student), trust_remote_code=config.student.trust_remote_code
        )
        base, run = student_source(config.student), run_of(checkpoint)
        card = model_card(output.name, "causal", base, run, has_vision=False)
        export_causal(
            student, tokenizer, student.state_dict(), output,
            dtype=dtype, ema_decay=decay, max_shard_size=max_shard_size, card=card,
        )  # fmt: skip
        return
    assert isinstance(config, RagConfig)
    parts = build_parts(config.model_copy(update={"engine": engine}))
    load_parameters(checkpoint, parts.container)
    for encoder in (parts.container.question_encoder, parts.container.document_encoder):
        if encoder is not None and isinstance(encoder.backbone, PeftModel):
            encoder.backbone = encoder.backbone.merge_and_unload()
    state: dict[str, Any] = parts.container.state_dict()
    export_rag(
        parts.container, parts.queries, parts.documents, parts.generator, state, output,
        temperature=1.0 / float(scale_from_log(state["logit_scale.log_scale"])),
        dtype=dtype, encoder_dtype=dtype, max_shard_size=max_shard_size,
        cards=_cards(config, parts, run_of(checkpoint), output.name),
    )  # fmt: skip


def _cards(config: RagConfig, parts: RagParts, run: RunFacts, name: str) -> dict[str, str]:
    """The card of each part."""
    generator, writer = config.generator, parts.container.generator
    writes = "reader" if writer.has_vision else "seq2seq" if writer.is_seq2seq else "causal"
    described = {
        "question_encoder": ("hf", resolve_source(config.question_encoder.name_or_path)),
        "document_encoder": ("hf", resolve_source(document_encoder_config(config).name_or_path)),
        "generator": (
            writes, resolve_source(generator.name_or_path, gguf_file=generator.gguf_file)
        ),
    }  # fmt: skip
    return {
        part: model_card(f"{name}/{part}", form, base, run, has_vision=False)
        for part, (form, base) in described.items()
    }
