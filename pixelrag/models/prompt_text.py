"""The tokens of one prompt and of one answer.

What is too long is cut in the passage, and in its title when nothing is left of the passage: never
in the question, never in the answer. A text that spells a special token is read as plain text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pixelrag.config.distill_parts import TEMPLATE_DATE
from pixelrag.data.template_render import dated
from pixelrag.errors import DataError, ModelError

SEQ2SEQ_TEMPLATE = "question: {question} title: {title} context: {passage}"
CHAT_TEMPLATE = (
    "Answer the question with the help of the passage.\n\n"
    "Passage: {title}\n{passage}\n\nQuestion: {question}\nAnswer in a few words."
)
CAUSAL_TEMPLATE = CHAT_TEMPLATE.replace("Answer in a few words.", "Answer:")

_PLACES = re.compile(r"\{(question|title|passage)\}")
IMAGE_PAD, _IMAGE_START, _IMAGE_END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
# Stands for the user's message while the chat template is rendered.
_MESSAGE = "\ue000"


class PromptText:
    """Tokenizes prompts and answers. Picklable.

    Args:
        tokenizer: a fast Hugging Face tokenizer with an end token.
        is_seq2seq: for an encoder-decoder.
        template: with `{question}` and `{passage}` once, `{title}` if wished; None = the default of
            the kind.
        in_chat: put a decoder's prompt into the tokenizer's chat template.
        prompt_max_length: tokens of a prompt with one passage.
        target_max_length: tokens of an answer, its end included.

    Attributes:
        starts_with_bos: whether every answer begins with the same special token (BART's `<s>`).

    Raises:
        ModelError: no end token, or a chat template that does not show the user's message.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        is_seq2seq: bool,
        template: str | None,
        in_chat: bool,
        prompt_max_length: int,
        target_max_length: int,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ModelError("the generator's tokenizer has no end token; answers could not end")
        self.tokenizer = tokenizer
        self.is_seq2seq = is_seq2seq
        self.in_chat = in_chat
        self.prompt_max_length = prompt_max_length
        self.target_max_length = target_max_length
        default = CHAT_TEMPLATE if in_chat else CAUSAL_TEMPLATE
        self.template = template or (SEQ2SEQ_TEMPLATE if is_seq2seq else default)
        self._before, self._after = _around_message(tokenizer) if in_chat else ("", "")
        # An answer goes on where the prompt ends, with a space where none stands there.
        ends_open = in_chat or is_seq2seq or self.template[-1:].isspace()
        self._gap = "" if ends_open else " "
        self._added = sorted(tokenizer.get_added_vocab())
        with_ends, plain = tokenizer("a")["input_ids"], self._plain("a")
        start = next(i for i in range(len(with_ends)) if with_ends[i:][: len(plain)] == plain)
        self._first, self._last = with_ends[:start], with_ends[start + len(plain) :]
        self.starts_with_bos = is_seq2seq and bool(self._first)

    def target(self, text: str, name: str) -> list[int]:
        """An answer's tokens, the end token last.

        Raises:
            DataError: more than `target_max_length`; names the sample.
        """
        if self.is_seq2seq:
            ids = self._ids(text_target=text, split_special_tokens=True)
        else:
            ids = self._plain(self._gap + text)
        if not ids or ids[-1] != self.tokenizer.eos_token_id:
            ids.append(self.tokenizer.eos_token_id)
        if len(ids) > self.target_max_length:
            raise DataError(
                f"{name}: the answer {text[:40]!r} has {len(ids)} tokens, its end included, but "
                f"generator.target_max_length is {self.target_max_length}; raise it, or leave the "
                "row out: answers are never cut"
            )
        return ids

    def prompt(self, question: str, title: str, text: str, name: str) -> list[int]:
        """A prompt's tokens, the passage (and only then the title) cut until they fit.

        Raises:
            DataError: the question alone does not fit; names the sample.
        """
        return self._cut(question, title, text, name)[0]

    def marked_prompt(
        self, question: str, title: str, text: str, name: str
    ) -> tuple[list[int], list[int]]:
        """`prompt`, and 1 for each of its tokens that holds a part of the passage or its title."""
        ids, title, text = self._cut(question, title, text, name)
        values = {"question": question, "title": title, "passage": text}
        pieces, places = _filled(self.template, values), _PLACES.findall(self.template)
        owns = [i % 2 == 1 and places[i // 2] != "question" for i in range(len(pieces))]
        if self._spells_special(values):
            inside = [self._plain(p) if i % 2 else self._special(p) for i, p in enumerate(pieces)]
            mask = [int(own) for tokens, own in zip(inside, owns, strict=True) for _ in tokens]
            front = len(self._special(self._before) if self.in_chat else self._first)
            return ids, [0] * front + mask + [0] * (len(ids) - front - len(mask))
        starts = itertools.accumulate(map(len, pieces), initial=len(self._before))
        spans = [(a, a + len(p)) for a, p, own in zip(starts, pieces, owns, strict=False) if own]
        offsets = self.tokenizer(
            self._before + "".join(pieces) + self._after,
            add_special_tokens=not self.in_chat,
            return_offsets_mapping=True,
            verbose=False,
        )["offset_mapping"]
        return ids, [int(any(a < end and start < b for a, b in spans)) for start, end in offsets]

    def _cut(self, question: str, title: str, text: str, name: str) -> tuple[list[int], str, str]:
        ids = self._encode(question, title, text)
        most = self.prompt_max_length
        while len(ids) > most and (text or title):
            # Cutting may move the borders of tokens; what is still too much goes in another turn.
            if text:
                text = self._shortened(text, len(ids) - most)
            else:
                title = self._shortened(title, len(ids) - most)
            ids = self._encode(question, title, text)
        if len(ids) > most:
            raise DataError(
                f"{name}: the question {question[:40]!r} takes {len(ids)} tokens with the template "
                f"and no passage, but generator.prompt_max_length is {most}; raise it"
            )
        return ids, title, text

    def image_prompt(
        self, question: str, title: str, image: object, num_tokens: int, name: str
    ) -> list[int]:
        """A prompt's tokens with an image of `num_tokens` in the passage's place.

        Raises:
            DataError: it does not fit: an image is never cut; names the sample and the image.
        """
        values = {"question": question, "title": title, "passage": ""}
        head, tail = self.template.split("{passage}")
        ids = self._wrapped(
            [
                *self._plain("".join(_filled(head, values))),
                *self._special(_IMAGE_START + IMAGE_PAD * num_tokens + _IMAGE_END),
                *self._plain("".join(_filled(tail, values))),
            ]
        )
        if len(ids) > self.prompt_max_length:
            raise DataError(
                f"{name}: passage {image} becomes {num_tokens} visual tokens and "
                f"{len(ids) - num_tokens} of the prompt, but generator.prompt_max_length is "
                f"{self.prompt_max_length}; raise it, or lower generator.max_visual_tokens"
            )
        return ids

    def _shortened(self, text: str, count: int) -> str:
        """The text without its last `count` tokens, and shorter in any case."""
        offsets = self.tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            split_special_tokens=True,
            verbose=False,
        )["offset_mapping"]
        kept = offsets[:-count] if count < len(offsets) else []
        shorter = text[: kept[-1][1]] if kept else ""
        # Several tokens may share a letter.
        return shorter if len(shorter) < len(text) else text[:-1]

    def _encode(self, question: str, title: str, text: str) -> list[int]:
        values = {"question": question, "title": title, "passage": text}
        pieces = _filled(self.template, values)
        if not self._spells_special(values):
            whole = self._before + "".join(pieces) + self._after
            return list(self._ids(whole, add_special_tokens=not self.in_chat))
        inside = [self._plain(p) if i % 2 else self._special(p) for i, p in enumerate(pieces)]
        return self._wrapped([token for ids in inside for token in ids])

    def _spells_special(self, values: Mapping[str, str]) -> bool:
        return any(token in value for value in values.values() for token in self._added)

    def _wrapped(self, ids: list[int]) -> list[int]:
        """A message's tokens with what goes around them."""
        if not self.in_chat:
            return [*self._first, *ids, *self._last]
        return [*self._special(self._before), *ids, *self._special(self._after)]

    def _plain(self, text: str) -> list[int]:
        return self._ids(text, add_special_tokens=False, split_special_tokens=True)

    def _special(self, text: str) -> list[int]:
        return self._ids(text, add_special_tokens=False)

    def _ids(self, *texts: str, **options: Any) -> list[int]:
        # Not verbose: what is too long for the model is cut here.
        return list(self.tokenizer(*texts, **options, verbose=False)["input_ids"])


def _filled(template: str, values: Mapping[str, str]) -> list[str]:
    """The template's own text and, at odd positions, the values of its places, in turn.

    Other braces, and those in the values, are plain text.
    """
    return [values[p] if i % 2 else p for i, p in enumerate(_PLACES.split(template))]


def _around_message(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before and behind a user's message, up to the answer."""
    day = datetime.fromisoformat(TEMPLATE_DATE)
    try:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MESSAGE}],
            chat_template=dated(tokenizer.get_chat_template(), day),
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:
        # Templates may raise anything.
        raise ModelError(
            f"the generator's chat template does not render: {error}; set generator.chat off"
        ) from error
    before, found, after = rendered.partition(_MESSAGE)
    if not found:
        raise ModelError(
            "the generator's chat template does not show the user's message; set generator.chat off"
        )
    return before, after
