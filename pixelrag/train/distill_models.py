"""What teacher and student agree on before weights are loaded, and the teacher itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from pixelrag.config.distill import DistillConfig
from pixelrag.distributed.env import World
from pixelrag.distributed.together import together
from pixelrag.errors import ModelError, ProvenanceError
from pixelrag.models.answer_cache import CachedTeacher, Manifest
from pixelrag.models.causal_load import load_config, student_source, teacher_source
from pixelrag.models.teacher import TeacherSource, load_teacher
from pixelrag.models.teacher_channel import Greeting, RemoteTeacher
from pixelrag.models.vocabulary import Vocabulary, read_vocabulary, shared_size
from pixelrag.train.distill_data import DistillData
from pixelrag.train.flops import attention_cost


@dataclass(frozen=True, slots=True)
class Contract:
    """Agreed from small files alone.

    Attributes:
        vocab_size: tokens that the loss compares.
        vocabulary: fingerprint of these tokens.
        attention_cost: of a pair of tokens, in that of a token.
    """

    vocab_size: int
    vocabulary: str
    attention_cost: float


def agree_on_models(config: DistillConfig, tokenizer: Any) -> Contract:
    """Check vocabularies and lengths; reads tokenizers and configurations, no weights.

    Args:
        config: the job's configuration.
        tokenizer: the student's.

    Raises:
        ModelError: the models' tokens differ, or a row is longer than a model reads.
    """
    source = student_source(config.student)
    trust = config.student.trust_remote_code
    student_config = load_config(source, trust_remote_code=trust)
    student = read_vocabulary(source, tokenizer=tokenizer, config=student_config)
    _check_length(config, student_config, "student")
    teacher_config = None
    if config.teacher.source == "live":
        other = teacher_source(config.teacher)
        trust = config.teacher.trust_remote_code
        if (other.location, other.gguf_file) == (source.location, source.gguf_file):
            teacher, teacher_config = student, student_config
        else:
            teacher_config = load_config(other, trust_remote_code=trust)
            teacher = read_vocabulary(other, config=teacher_config, trust_remote_code=trust)
        _check_length(config, teacher_config, "teacher")
        size = shared_size(student, teacher, config.loss.vocab_size)
    else:
        size = _size_of_answers(config, student)
    return Contract(size, student.fingerprint(size), attention_cost(student_config, teacher_config))


def _size_of_answers(config: DistillConfig, student: Vocabulary) -> int:
    """Real tokens of answers whose teacher does not run here; their vocabulary is compared."""
    path = config.teacher.path
    assert path is not None  # of every source but the live one
    greeting: Greeting | Manifest
    if config.teacher.source == "remote":
        with RemoteTeacher(path, torch.device("cpu")) as remote:
            greeting = remote.greeting
    else:
        greeting = Manifest.read(Path(path))
    size = greeting.vocab_size if config.loss.vocab_size is None else config.loss.vocab_size
    if size != greeting.vocab_size or (config.loss.vocab_size is None and student.size != size):
        raise ModelError(
            f"vocabulary: the student {student.name} has {student.size} tokens, loss.vocab_size "
            f"is {config.loss.vocab_size or 'not set'}, and the answers of {greeting.teacher} at "
            f"{path} are over {greeting.vocab_size}; they must be as many"
        )
    if student.fingerprint(size) != greeting.vocabulary:
        raise ModelError(
            f"vocabulary: below id {size}, the student {student.name} has other tokens than the "
            f"teacher {greeting.teacher} whose answers lie at {path}; choose models of one family"
        )
    return size


def open_teacher(
    config: DistillConfig, world: World, contract: Contract, data: DistillData
) -> TeacherSource:
    """The teacher that the configuration names; a collective.

    Raises:
        ModelError: a live teacher does not load.
        ProvenanceError: a cache or a remote teacher is of something else.
    """
    teacher = config.teacher
    if teacher.source == "live":
        return load_teacher(
            teacher,
            world,
            precision=config.engine.precision,
            whole_logits=config.loss.implementation == "logits",
        )
    assert teacher.path is not None
    with together():
        if teacher.source == "remote":
            remote = RemoteTeacher(teacher.path, world.device)
            if data.isolates and not remote.greeting.isolated:
                raise ProvenanceError(
                    f"the teacher at {teacher.path} was started for concatenated rows and has not "
                    "been tried with isolated ones, which training or evaluation needs; start it "
                    "with packing.attention isolated"
                )
            wanted = teacher.name_or_path
            if wanted not in (None, remote.greeting.teacher):
                remote.close()
                raise ProvenanceError(
                    f"the teacher at {teacher.path} is {remote.greeting.teacher}, but "
                    f"teacher.name_or_path is {wanted}; start that one, or leave the name out"
                )
            return remote
        check_cache(config, contract, data)
        return CachedTeacher(Path(teacher.path), world.device)


def check_cache(config: DistillConfig, contract: Contract, data: DistillData) -> None:
    """Compare what a cache was written of with what it is asked for.

    Raises:
        ProvenanceError: it is of something else, or cannot be read.
    """
    assert config.teacher.path is not None
    folder, source = Path(config.teacher.path), config.teacher.source
    plans = [plan for plan in (data.train, data.held_out) if plan is not None]
    expected: dict[str, Any] = {
        "kind": "top_k" if source == "cache" else "hidden_states",
        "vocab_size": contract.vocab_size,
        "vocabulary": contract.vocabulary,
        "max_length": config.packing.length,
        "overlong": config.packing.overlong,
        "data": tuple(plan.store.fingerprint for plan in plans),
    }
    if source == "cache":
        expected["temperature"] = config.loss.temperature
    if config.teacher.name_or_path is not None:
        expected["teacher"] = config.teacher.name_or_path
    Manifest.read(folder).check(folder, expected)


def _check_length(config: DistillConfig, model_config: PreTrainedConfig, name: str) -> None:
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and config.packing.length > limit:
        raise ModelError(
            f"packing.length {config.packing.length}: the {name} reads up to {limit} tokens; "
            f"set it to at most {limit}"
        )
