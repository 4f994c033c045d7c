"""Rendering chats, and which of a tokenizer's tokens are control tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from pixelrag.config.distill_parts import TEMPLATE_DATE
from pixelrag.data.chat import Chat
from pixelrag.data.schema import RowError
from pixelrag.errors import ModelError

Span = tuple[int, int]
"""Character positions, start and stop, in a rendered chat."""

_MARKED = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")
_DIRECTIVE = re.compile(r"%[-_0^#EO]*[A-Za-z]")
_PERCENT = "\ue0c0"
_THOUGHT_MARKS = {"<think>", "</think>"}


class Renderer:
    """A tokenizer's chat template.

    Args:
        tokenizer: has the template.
        template: another one to use instead of the tokenizer's.
        variables: given to the template in every chat, such as `enable_thinking`.
        date: day, YYYY-MM-DD, that `strftime_now` tells a template, which would otherwise write
            the day of its rendering into the chat.

    Attributes:
        name: the tokenizer's, for messages.
        control: pattern of the control tokens that no message may contain.
        closing: pattern of what can end a turn: a control token, and the end of text if that
            stands directly behind it.

    Raises:
        ModelError: there is no template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        date: str = TEMPLATE_DATE,
    ) -> None:
        self.name = tokenizer.name_or_path or type(tokenizer).__name__
        if template is None and not tokenizer.chat_template:
            raise ModelError(
                f"The tokenizer {self.name} has no chat template; name one in data.chat_template, "
                "or give rows of prompt and completion, or of text"
            )
        self._tokenizer = tokenizer
        self._template = template
        self._variables = dict(variables or {})
        self._day = datetime.fromisoformat(date)
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= set(tokenizer.all_special_tokens)
        self.control = re.compile(any_of(special - _THOUGHT_MARKS))
        end = any_of({tokenizer.eos_token})
        self.closing = f"(?:{any_of(special - {tokenizer.bos_token})}{end}?)"

    def render(self, chat: Chat, **variables: Any) -> str:
        """The chat as text.

        Raises:
            RowError: the template refuses it.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                list(chat.messages),
                tools=list(chat.tools) or None,
                chat_template=self._template_for(chat.tools),
                tokenize=False,
                **self._variables | dict(chat.template_kwargs) | variables,
            )
            assert isinstance(text, str)  # tokenize=False
            return text
        except Exception as error:
            # A template is a program of its own: what it raises is what it has to say.
            raise RowError("", [f"the chat template refuses it: {error}"]) from error

    def attempt(self, chat: Chat, **variables: Any) -> str | None:
        """The chat as text, or None where the template refuses a chat that is not a row's own."""
        try:
            return self.render(chat, **variables) if chat.messages else None
        except RowError:
            return None

    def is_marked(self, tools: Sequence[dict[str, Any]]) -> bool:
        """Whether the template for such chats marks answers with `{% generation %}`."""
        return _MARKED.search(self._template_for(tools)) is not None

    def render_marked(self, chat: Chat) -> tuple[str, list[Span]]:
        """The chat as text, and the spans that the template marks.

        Raises:
            RowError: the template refuses it.
        """
        # The tokenizer's own method tells token positions, in which a token that lies across the
        # border counts as the assistant's.
        variables = dict(self._tokenizer.special_tokens_map) | self._variables
        try:
            rendered: Any = render_jinja_template(  # (texts, spans), though it says str
                conversations=[list(chat.messages)],
                tools=list(chat.tools) or None,
                chat_template=self._template_for(chat.tools),
                return_assistant_tokens_mask=True,
                **variables | dict(chat.template_kwargs),
            )
        except Exception as error:
            raise RowError("", [f"the chat template refuses it: {error}"]) from error
        texts, spans = rendered
        return texts[0], spans[0]

    def _template_for(self, tools: Sequence[dict[str, Any]]) -> str:
        template = self._tokenizer.get_chat_template(self._template, list(tools) or None)
        return dated(template, self._day)


def dated(template: str, day: datetime) -> str:
    """The template with its calls of `strftime_now` answered for a day, not by the clock.

    Args:
        template: a chat template.
        day: what the calls tell.
    """
    if "strftime_now" not in template:
        return template
    # Values given to a template are plain data, so none can take the function's place; a macro of
    # its name does.
    swaps = [("%%", _PERCENT)]
    swaps += [(part, day.strftime(part)) for part in sorted(set(_DIRECTIVE.findall(template)))]
    swaps += [(_PERCENT, "%")]
    filters = "".join(f" | replace({json.dumps(a)}, {json.dumps(b)})" for a, b in swaps)
    # Its line break goes with it (transformers renders with trim_blocks), so that what follows
    # stands where it stood, at the beginning of a line.
    return (
        f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{template}"
    )


def any_of(words: Iterable[str | None]) -> str:
    """A pattern for any of the words, the longest first; one that never matches for none."""
    ordered = sorted((word for word in words if word), key=lambda word: (-len(word), word))
    return f"(?:{'|'.join(map(re.escape, ordered))})" if ordered else r"(?!)"


def quote(text: str) -> str:
    """A text's beginning, for messages."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
