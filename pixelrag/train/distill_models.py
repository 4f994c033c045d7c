"""What teacher and student agree on before weights are loaded, and the teacher itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pixelrag.config.distill import DistillConfig
from pixelrag.distributed.env import World
from pixelrag.errors import ModelError
from pixelrag.models.causal_load import load_config, student_source, teacher_source
from pixelrag.models.teacher import TeacherSource, load_teacher
from pixelrag.models.vocabulary import read_vocabulary, shared_size
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
        raise NotImplementedError
    return Contract(size, student.fingerprint(size), attention_cost(student_config, teacher_config))


def open_teacher(config: DistillConfig, world: World, contract: Contract) -> TeacherSource:
    """The teacher that the configuration names; a collective."""
    return load_teacher(
        config.teacher,
        world,
        precision=config.engine.precision,
        whole_logits=config.loss.implementation == "logits",
    )


def _check_length(config: DistillConfig, model_config: object, name: str) -> None:
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and config.packing.length > limit:
        raise ModelError(
            f"packing.length {config.packing.length}: the {name} reads up to {limit} tokens; "
            f"set it to at most {limit}"
        )
