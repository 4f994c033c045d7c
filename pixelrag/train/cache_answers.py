"""`pixelrag cache-states` and `pixelrag cache-logits`: a live teacher's answers, written to disk.

Every sample of the configuration's data is asked for, held out or not, each seen by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pixelrag.config.distill import DistillConfig
from pixelrag.data.balance import share_out
from pixelrag.data.pack_plan import PackPlan
from pixelrag.data.packed_batch import PackedCollator
from pixelrag.distributed.collectives import from_main
from pixelrag.distributed.env import World
from pixelrag.distributed.together import together
from pixelrag.errors import ConfigError, ProvenanceError
from pixelrag.models.answer_cache import HEAD, MANIFEST, Kind, Manifest
from pixelrag.models.answer_writer import AnswerWriter, join_ranks
from pixelrag.models.causal_load import load_tokenizer, student_source
from pixelrag.models.state_codec import Codec, codec_of
from pixelrag.models.teacher import LiveTeacher
from pixelrag.train import owner
from pixelrag.train.distill_batch import Lesson
from pixelrag.train.distill_data import open_data
from pixelrag.train.distill_models import Contract, agree_on_models, open_teacher
from pixelrag.train.job import sole_writer, world_of

logger = logging.getLogger("pixelrag")


def main(config: DistillConfig, own: Mapping[str, str], kind: Kind) -> int:
    """Write a cache; returns the exit code.

    Args:
        config: as for training; `teacher.source` must be live.
        own: `output`, the folder to make; `codec` (hidden states) or `k` (top-k).
        kind: what to keep.

    Raises:
        ConfigError: an argument is missing or out of its range.
        ProvenanceError: the folder is there already.
    """
    output, codec, k = _arguments(config, own, kind)
    with world_of(config) as world, sole_writer(output, world, "--output"):
        write(config, world, output, kind=kind, codec=codec, k=k)
    return 0


def _arguments(
    config: DistillConfig, own: Mapping[str, str], kind: Kind
) -> tuple[Path, Codec | Literal[""], int]:
    if config.teacher.source != "live":
        raise ConfigError(f"teacher.source: got {config.teacher.source}, expected live")
    if config.packing.attention != "isolated":
        raise ConfigError(
            f"packing.attention: got {config.packing.attention}, expected isolated: a cache holds "
            "each sample seen by itself"
        )
    if not own.get("output"):
        raise ConfigError("--output: got nothing, expected the folder to write")
    if kind == "hidden_states":
        return Path(own["output"]), codec_of(own), 0
    text = own.get("k", "64")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--k: got {text!r}, expected an integer of 1 or more")
    return Path(own["output"]), "", int(text)


def write(
    config: DistillConfig,
    world: World,
    output: Path,
    *,
    kind: Kind,
    codec: Codec | Literal[""] = "",
    k: int = 0,
) -> Manifest:
    """Write a cache inside an existing process group; a collective.

    Raises:
        ProvenanceError: the folder is there already and is no unfinished cache.
    """
    with together():
        source = student_source(config.student)
        tokenizer = load_tokenizer(source, trust_remote_code=config.student.trust_remote_code)
    contract = from_main(lambda: agree_on_models(config, tokenizer))
    data = open_data(
        config, tokenizer, world,
        vocab_size=contract.vocab_size, attention_cost=contract.attention_cost,
    )  # fmt: skip
    from_main(lambda: _make_folder(output))
    teacher = open_teacher(config, world, contract, data)
    assert isinstance(teacher, LiveTeacher)  # see `_arguments`
    teacher.self_test(contract.vocab_size, isolated=True)
    # Whole data sets: what is held out of them may change.
    stores = {plan.store.fingerprint: plan.store for plan in (data.train, data.held_out) if plan}
    plans = [PackPlan(store, data.train.settings, seed=config.seed) for store in stores.values()]
    manifest = _manifest(config, contract, teacher, kind, codec, k, tuple(stores))
    writer = AnswerWriter(output, manifest, teacher, world.rank)
    for plan in plans:
        collate = PackedCollator(plan, tokenizer.pad_token_id)
        shares = share_out(
            plan.epoch(0).costs, world.world_size, config.batch.per_device_batch_size
        )
        # Empty shares too: a sharded teacher's forward is a collective.
        for rows in shares[world.rank]:
            writer.add(Lesson.of(collate(0, rows)).request())
    with together():
        writer.finish()
    manifest = from_main(lambda: join_ranks(output, manifest, world.world_size))
    logger.info(
        "%s: %d documents, %d supervised tokens", output, manifest.num_documents,
        manifest.num_tokens,
    )  # fmt: skip
    return manifest


def _make_folder(output: Path) -> None:
    if (output / MANIFEST).exists():
        raise ProvenanceError(
            f"{output} holds a cache already; remove it, or choose another folder"
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
        leftovers = [*output.glob("part-*.safetensors"), *output.glob("index*.safetensors")]
        if set(output.iterdir()) - {*leftovers, output / HEAD, output / owner.FILE}:
            raise ProvenanceError(f"{output} holds other files; choose another folder")
        for path in leftovers:
            path.unlink()
    except OSError as error:
        raise ProvenanceError(f"{output}: cannot be written ({error.strerror or error})") from error


def _manifest(
    config: DistillConfig,
    contract: Contract,
    teacher: LiveTeacher,
    kind: Kind,
    codec: Codec | Literal[""],
    k: int,
    data: tuple[str, ...],
) -> Manifest:
    head = teacher.head
    return Manifest(
        kind=kind,
        teacher=config.teacher.name_or_path or "",
        dtype=str(teacher.model.dtype).removeprefix("torch."),
        vocab_size=contract.vocab_size,
        vocabulary=contract.vocabulary,
        max_length=config.packing.length,
        overlong=config.packing.overlong,
        data=data,
        num_documents=0,
        num_tokens=0,
        codec=codec,
        k=min(k, contract.vocab_size),
        temperature=config.loss.temperature if kind == "top_k" else 0.0,
        logit_scale=head.logit_scale,
        soft_cap=head.soft_cap,
    )
