"""Rows as tokens, each with whether it is learnt from.

What is learnt from and what is not are tokenized apart. So no token lies across a border, and a
prompt's tokens are those that the model will see when it is asked to go on. Tokenizers that put a
space before every text (SentencePiece in Llama 2's fashion) allow no such cut; there the whole is
tokenized, and a row in which a token lies across a border is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from pixelrag.config.distill_parts import TEMPLATE_DATE
from pixelrag.data.chat import Chat, Completion, PlainText, TextRow
from pixelrag.data.chat_template import ChatTemplate
from pixelrag.data.schema import RowError
from pixelrag.errors import ModelError

Supervise = Literal["assistant", "last_assistant", "all"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenized row.

    Attributes:
        ids: [T] int32.
        supervised: [T] bool, the tokens that are learnt from.
    """

    ids: NDArray[np.int32]
    supervised: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Stretches of text, learnt from or not, and tokens to put around them."""

    texts: list[str]
    supervised: list[bool]
    start: list[int]
    end: list[int]


class TextEncoder:
    """Turns rows into tokens.

    Args:
        tokenizer: a fast tokenizer.
        supervise: "assistant" learns from every answer of a chat, "last_assistant" from the last
            one, "all" from every token, the prompt's too.
        chat_template: text of a template to use instead of the tokenizer's.
        template_variables: given to the template in every chat.
        template_date: day, YYYY-MM-DD, that the template is told is today.

    Raises:
        ModelError: the tokenizer is no fast one, or has no end-of-text token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        supervise: Supervise = "assistant",
        chat_template: str | None = None,
        template_variables: dict[str, object] | None = None,
        template_date: str = TEMPLATE_DATE,
    ) -> None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.is_fast:
            raise ModelError(f"The tokenizer {name} has no fast version, which packing needs")
        if tokenizer.eos_token_id is None:
            raise ModelError(f"The tokenizer {name} has no end-of-text token (eos_token)")
        self._tokenizer = tokenizer
        self._supervise = supervise
        self._template_options = chat_template, template_variables, template_date
        self._template: ChatTemplate | None = None
        self._can_cut = _can_cut(tokenizer)
        self._bos = _leading_token(tokenizer)
        self._eos = int(tokenizer.eos_token_id)

    def encode(self, rows: Sequence[TextRow]) -> list[Tokens | RowError]:
        """Tokenize rows; many at a time are faster.

        Returns:
            For each row its tokens, or why there are none; the errors name no place.

        Raises:
            ModelError: a chat came and the tokenizer has no usable chat template.
        """
        parts: list[_Parts | RowError] = []
        for row in rows:
            try:
                parts.append(self._parts(row))
            except RowError as error:
                parts.append(error)
        good = [part for part in parts if isinstance(part, _Parts)]
        encoded = iter(self._encode_cut(good) if self._can_cut else self._encode_whole(good))
        return [next(encoded) if isinstance(part, _Parts) else part for part in parts]

    def _parts(self, row: TextRow) -> _Parts:
        whole = self._supervise == "all"
        if isinstance(row, PlainText):
            return _Parts([row.text], [True], self._bos, [self._eos])
        if isinstance(row, Completion):
            return _Parts([row.prompt, row.completion], [whole, True], self._bos, [self._eos])
        return self._chat_parts(row, whole)

    def _chat_parts(self, chat: Chat, whole: bool) -> _Parts:
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer, *self._template_options)
        text, spans = self._template.spans(chat)
        if self._supervise == "last_assistant":
            spans = spans[-1:]
        texts, supervised, position = [], [], 0
        for start, stop in spans:
            texts += [text[position:start], text[start:stop]]
            supervised += [whole, True]
            position = stop
        return _Parts([*texts, text[position:]], [*supervised, whole], [], [])

    def _encode_cut(self, rows: list[_Parts]) -> list[Tokens]:
        texts = [text for row in rows for text in row.texts]
        encoded = iter(self._ids(texts))
        return [
            _joined(row, [(next(encoded), supervised) for supervised in row.supervised])
            for row in rows
        ]

    def _encode_whole(self, rows: list[_Parts]) -> list[Tokens | RowError]:
        if not rows:
            return []
        texts = ["".join(row.texts) for row in rows]
        encoding = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        result: list[Tokens | RowError] = []
        for row, text, ids, offsets in zip(
            rows, texts, encoding["input_ids"], encoding["offset_mapping"], strict=True
        ):
            ends = np.cumsum([len(part) for part in row.texts])
            starts, stops = np.asarray(offsets, np.int64).reshape(-1, 2).T
            # A token's leading white space belongs with the word behind it, as the model will
            # write the two at once.
            lead = [
                len(text[a:b]) - len(text[a:b].lstrip()) for a, b in zip(starts, stops, strict=True)
            ]
            first = np.searchsorted(ends, np.minimum(starts + lead, stops - 1), side="right")
            last = np.searchsorted(ends, np.maximum(stops - 1, starts), side="right")
            supervised = np.asarray(row.supervised)
            across = np.flatnonzero(supervised[first] != supervised[last])
            if len(across):
                a, b = int(starts[across[0]]), int(stops[across[0]])
                reason = f"the token {text[a:b]!r} lies across the border of what is learnt from"
                result.append(RowError("", [reason]))
                continue
            stretches = [
                ([token], bool(flag)) for token, flag in zip(ids, supervised[last], strict=True)
            ]
            result.append(_joined(row, stretches))
        return result

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoding = self._tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return encoding["input_ids"]


def _joined(row: _Parts, stretches: list[tuple[list[int], bool]]) -> Tokens:
    # The first token has nothing to be predicted from; the last one, the end, is to be learnt.
    stretches = [(row.start, False), *stretches, (row.end, True)]
    ids = np.concatenate([np.asarray(ids, np.int32) for ids, _ in stretches])
    supervised = np.repeat([flag for _, flag in stretches], [len(ids) for ids, _ in stretches])
    return Tokens(ids, supervised)


def _can_cut(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether texts tokenized apart read like one text again when put together."""
    parts = ["word", "word", " word", "\n", "word"]
    ids = [tokenizer.encode(part, add_special_tokens=False) for part in parts]
    text = tokenizer.decode([token for part in ids for token in part])
    return text == "".join(parts)


def _leading_token(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that the tokenizer itself puts before every text, if any."""
    plain = tokenizer.encode("word", add_special_tokens=False)
    full = tokenizer.encode("word")
    at = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    return full[:at]
