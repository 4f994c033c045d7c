"""A chat as text, and where in it the assistant speaks.

Some chat templates mark it themselves, with `{% generation %}`; then their word is taken. For any
other template see `pixelrag.data.answer_spans`.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from pixelrag.config.distill_parts import TEMPLATE_DATE
from pixelrag.data.answer_spans import AnswerFinder, reasoning_text, shown_text
from pixelrag.data.chat import Chat
from pixelrag.data.schema import RowError
from pixelrag.data.template_render import Renderer, Span, quote

logger = logging.getLogger("pixelrag")


class ChatTemplate:
    """A tokenizer's chat template, and where in what it renders the assistant speaks.

    Args:
        tokenizer: has the template.
        template: text of another one to use instead of the tokenizer's.
        variables: given to the template in every chat, such as `enable_thinking`.
        date: day, YYYY-MM-DD, that the template is told is today.

    Raises:
        ModelError: there is no template, it cannot be rendered, or it does not show what the
            assistant says.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        date: str = TEMPLATE_DATE,
    ) -> None:
        self._renderer = Renderer(tokenizer, template, variables, date)
        self._finder: AnswerFinder | None = None
        self._told = False
        # Some tokenizers have another template for chats with tools, marked or not.
        if not self._renderer.is_marked(()):
            self._finder = AnswerFinder(self._renderer)

    def spans(self, chat: Chat) -> tuple[str, list[Span]]:
        """Render a chat and find the assistant's words in it.

        Returns:
            The text, and the (start, stop) character positions of each answer that is learnt from,
            in order.

        Raises:
            RowError: the template refuses the chat, or nothing or something unproven would be
                learnt from it. The error names no place; the caller knows it.
        """
        self._refuse_control_tokens(chat)
        if self._renderer.is_marked(chat.tools):
            text, spans = self._marked_spans(chat)
        else:
            text, spans = self._found_spans(chat)
        if any(start < stop for (_, stop), (start, _) in itertools.pairwise(spans)):
            raise RowError("", ["the chat template mixes the assistant's messages up"])
        self._tell_of_lost_reasoning(chat, text[slice(*spans[-1])])
        return text, spans

    def _found_spans(self, chat: Chat) -> tuple[str, list[Span]]:
        if self._finder is None:
            self._finder = AnswerFinder(self._renderer)
        try:
            text = self._renderer.render(chat)
        except RowError:
            # Most templates write a call's arguments as JSON, some expect to find it written.
            written = _with_written_arguments(chat)
            if written is None:
                raise
            chat, text = written, self._renderer.render(written)
        return text, self._finder.spans(chat, text)

    def _marked_spans(self, chat: Chat) -> tuple[str, list[Span]]:
        text, spans = self._renderer.render_marked(chat)
        spans = [span for span in spans if span[0] < span[1]]
        num_answers = sum(message["role"] == "assistant" for message in chat.messages)
        if len(chat.answers) < num_answers:
            if len(spans) != num_answers:
                raise RowError(
                    "",
                    [
                        f"the chat template marks {len(spans)} passages of {num_answers} messages "
                        "of the assistant, so those of the prompt cannot be told from the others"
                    ],
                )
            spans = spans[-len(chat.answers) :]
        if not spans:
            raise RowError("", ["the chat template marks nothing in it as the assistant's"])
        shown = shown_text(chat.messages[chat.answers[-1]])
        if shown not in "".join(text[slice(*span)] for span in spans):
            raise RowError(
                "", [f"the chat template marks other text than the assistant's {quote(shown)}"]
            )
        return text, spans

    def _refuse_control_tokens(self, chat: Chat) -> None:
        reasons = []
        for index, message in enumerate(chat.messages):
            texts = {"content": message["content"], "reasoning": reasoning_text(message)}
            for name, text in texts.items():
                if found := self._renderer.control.search(text):
                    reasons.append(
                        f"messages[{index}].{name} contains the control token {found.group()!r} "
                        f"at character {found.start() + 1}: the model would take it for a part of "
                        "the chat's frame"
                    )
                    break
        if reasons:
            raise RowError("", reasons)

    def _tell_of_lost_reasoning(self, chat: Chat, last: str) -> None:
        reasoning = reasoning_text(chat.messages[chat.answers[-1]])
        if reasoning and reasoning not in last and not self._told:
            self._told = True
            logger.warning(
                "The chat template of %s drops the reasoning of last answers: nothing will be "
                "learnt from it. A template that keeps it can be named in data.chat_template.",
                self._renderer.name,
            )


def _with_written_arguments(chat: Chat) -> Chat | None:
    """The chat with each call's arguments as JSON text, or None where nothing is called."""

    def written(call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call.get("function", call))
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return dict(call) | {"function": function} if "function" in call else function

    if not any(message.get("tool_calls") for message in chat.messages):
        return None
    messages = tuple(
        message | {"tool_calls": [written(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in chat.messages
    )
    return replace(chat, messages=messages)
