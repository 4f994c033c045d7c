"""The vocabulary contract: teacher and student must mean the same token by the same number.

Checked from tokenizer files and configurations alone, before any weights are loaded. A head often
has more rows than its tokenizer has tokens (Qwen3: 151,936 rows, 151,669 tokens); the rows that are
left over belong to no token and get neither probability nor gradient in the loss.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pixelrag.errors import ModelError
from pixelrag.models.causal_load import load_config, load_tokenizer
from pixelrag.models.source import ModelSource

logger = logging.getLogger("pixelrag")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens.

    Attributes:
        name: the model, for messages.
        ids: token -> id, of all tokens, added ones included.
        num_rows: rows of embedding and head.
    """

    name: str
    ids: Mapping[str, int]
    num_rows: int

    @property
    def size(self) -> int:
        """Real tokens: one more than the largest id."""
        return max(self.ids.values(), default=-1) + 1

    def fingerprint(self, size: int) -> str:
        """SHA-256 (hex) of the map from id to token over the first ``size`` ids."""
        digest = hashlib.sha256()
        for index, token in sorted((i, t) for t, i in self.ids.items() if i < size):
            digest.update(f"{index} {token}\n".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def read_vocabulary(
    source: ModelSource,
    *,
    tokenizer: Any = None,
    config: Any = None,
    trust_remote_code: bool = False,
) -> Vocabulary:
    """Read a model's tokens and the rows of its head; loads no weights.

    Args:
        source: the model.
        tokenizer, config: what is loaded of it already.
        trust_remote_code: run code of the model's folder.

    Raises:
        ModelError: files are missing, or there are more tokens than rows.
    """
    if tokenizer is None:
        tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    if config is None:
        config = load_config(source, trust_remote_code=trust_remote_code)
    found = Vocabulary(source.name, tokenizer.get_vocab(), config.get_text_config().vocab_size)
    if found.size > found.num_rows:
        token = max(found.ids, key=found.ids.__getitem__)
        raise ModelError(
            f"{source.name}: its tokenizer goes up to id {found.size - 1} ({token!r}), but the "
            f"model has {found.num_rows} vocabulary rows; is it the tokenizer of this model?"
        )
    return found


def shared_size(student: Vocabulary, teacher: Vocabulary, configured: int | None) -> int:
    """How many tokens, from id 0, the loss compares.

    Args:
        student, teacher: their vocabularies.
        configured: `loss.vocab_size`; None = all, and both must have as many.

    Raises:
        ModelError: a token within that range has another id, or none, in one of the models; or
            their numbers of tokens differ and nothing is configured; or more are configured than
            there are.
    """
    sizes = (
        f"student {student.name} has {student.size} tokens, teacher {teacher.name} {teacher.size}"
    )
    smaller = min(student.size, teacher.size)
    size = smaller if configured is None else configured
    if size > smaller:
        raise ModelError(
            f"loss.vocab_size: got {size}, but {sizes}; set it to at most {smaller}, or leave it "
            "out"
        )
    _compare(student, teacher, size)
    if configured is None and student.size != teacher.size:
        raise ModelError(
            f"vocabularies: {sizes}, the same up to id {smaller - 1}; the first that only one has "
            f"is {_first_after(student, teacher, smaller)}. Set loss.vocab_size to {smaller} to "
            "distil over the shared tokens, and make sure that the data hold no others"
        )
    padding = f"{student.num_rows - size} and {teacher.num_rows - size}"
    logger.info(
        "vocabulary: %d shared tokens; %s rows of student and teacher left out", size, padding
    )
    return size


def _compare(student: Vocabulary, teacher: Vocabulary, size: int) -> None:
    mine = {(index, token) for token, index in student.ids.items() if index < size}
    theirs = {(index, token) for token, index in teacher.ids.items() if index < size}
    if mine == theirs:
        return
    differing = mine ^ theirs
    index, token = min(differing)
    raise ModelError(
        f"vocabularies differ in {len(differing)} entries below id {size}. First: id {index} is "
        f"{_token_of(student, index)} in student {student.name} and {_token_of(teacher, index)} in "
        f"teacher {teacher.name}; {token!r} has id {_id_of(student, token)} in the student and "
        f"{_id_of(teacher, token)} in the teacher. Choose models of one family: the loss compares "
        "probabilities id by id"
    )


def _token_of(vocabulary: Vocabulary, index: int) -> str:
    tokens = sorted(token for token, i in vocabulary.ids.items() if i == index)
    return " or ".join(map(repr, tokens)) or "no token"


def _id_of(vocabulary: Vocabulary, token: str) -> str:
    return str(vocabulary.ids.get(token, "none"))


def _first_after(student: Vocabulary, teacher: Vocabulary, smaller: int) -> str:
    larger = student if student.size > teacher.size else teacher
    rest = [(index, token) for token, index in larger.ids.items() if index >= smaller]
    index, token = min(rest)
    return f"{token!r} (id {index})"
