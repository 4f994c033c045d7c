"""Finds the assistant's words in what a chat template renders, without knowing the template.

A chat is rendered a second time with another text in the assistant's place: what stays the same is
not the assistant's, what changes is. Nothing is assumed about the template's wording, and each row
is its own proof:

- Every answer is replaced by a mark. If putting the answers back where the marks came out gives
  the chat as rendered in the first place, letter by letter, then these are the places.
- Where it does not (reasoning that is shown in one turn and dropped in another, calls of tools),
  one message at a time is replaced, and what lies before and after it must come out unchanged.

A span starts where the model would start: behind the longest of the template's generation prompts
that the text holds at that place. So the empty reasoning block that a template puts before an
answer is no part of the answer. It ends with the control token that ends the turn, since a model
must learn to stop, and without the line break behind it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pixelrag.data.chat import Chat, reasoning_of
from pixelrag.data.schema import RowError
from pixelrag.data.template_render import Renderer, Span, any_of, quote
from pixelrag.errors import ModelError

# Private-use characters: no template strips, splits or escapes them.
_ASK = "\ue0a0ask\ue0a1"
_SAY = "\ue0b0say\ue0b1"


class AnswerFinder:
    """Finds answers in the text of one template.

    Args:
        renderer: the template.

    Raises:
        ModelError: the template cannot be rendered, or does not show what the assistant says.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._probe()

    def spans(self, chat: Chat, text: str) -> list[Span]:
        """Find the answers that are learnt from.

        Args:
            chat: the chat.
            text: what the template makes of it.

        Returns:
            The spans, in order.

        Raises:
            RowError: the spans cannot be proven.
        """
        spans = self._spans_of_all(chat, text)
        if spans is None:
            spans = [self._span_of_one(chat, text, index) for index in chat.answers]
        return spans

    # All answers at once.

    def _spans_of_all(self, chat: Chat, text: str) -> list[Span] | None:
        """The spans by one more rendering with all answers replaced, or None if that fails."""
        if any(message.get("tool_calls") for message in chat.messages):
            return None
        replaced, marks, answers = [], [], []
        for index, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                replaced.append(message)
                continue
            marks.append(f"{_SAY}{index}{_SAY}")
            answers.append(message["content"])
            replaced.append({"role": "assistant", "content": marks[-1]})
        other = self._renderer.attempt(replace(chat, messages=tuple(replaced)))
        parts = re.split("|".join(map(re.escape, marks)), other) if other is not None else []
        if len(parts) != len(marks) + 1 or not text.startswith(parts[0]):
            return None
        spans = []
        position = len(parts[0])
        for answer, part in zip(answers, parts[1:], strict=True):
            # Templates may strip white space off an answer.
            for shown in (answer, answer.lstrip("\n"), answer.strip(), answer.rstrip()):
                if text.startswith(shown + part, position):
                    break
            else:
                return None
            stop = position + len(shown)
            spans.append((self._start(text, position), self._closed(text, stop)))
            position = stop + len(part)
        return spans[-len(chat.answers) :] if position == len(text) else None

    # One message at a time.

    def _span_of_one(self, chat: Chat, text: str, index: int) -> Span:
        message = chat.messages[index]
        span = self._span_by_mark(chat, text, index)
        if span is None or not self._ends_before_next(chat, text, index, span[1]):
            span = self._span_by_arguments(chat, text, index)
        if span is None or not self._ends_before_next(chat, text, index, span[1]):
            raise RowError(
                "",
                [
                    f"messages[{index}]: the chat template does not show where the assistant's "
                    f"{quote(shown_text(message) or 'call')} begins and ends"
                ],
            )
        self._check(message, index, text[slice(*span)])
        return span

    def _span_by_mark(self, chat: Chat, text: str, index: int) -> Span | None:
        """The span by a rendering in which the message is a mark and nothing else."""
        other = self._with(chat, index, {"role": "assistant", "content": _SAY})
        if other is None or other.count(_SAY) != 1:
            return None
        mark = other.index(_SAY)
        after = other[mark + len(_SAY) :]
        if not text.endswith(after):
            return None
        common = _common_length(text, other)
        if common >= mark:
            start: int | None = self._start(text, mark)
        else:
            # What stands before the mark is not what stands in the text: reasoning, or a call.
            begins = self._begins(chat, text, index, other[:mark])
            start = None if begins is None or begins > common else self._prompted(text, begins)
        stop = len(text) - len(after)
        return None if start is None or start > stop else (start, self._closed(text, stop))

    def _span_by_arguments(self, chat: Chat, text: str, index: int) -> Span | None:
        """The span of a message that calls a tool, where the template cannot do without the call.

        The last call's arguments are replaced. What follows them up to the token that ends the
        turn is the message's, too.
        """
        calls = [dict(call) for call in chat.messages[index].get("tool_calls", ())]
        if not calls:
            return None
        function = dict(calls[-1].get("function", calls[-1]))
        written = isinstance(function["arguments"], str)
        function["arguments"] = f'{{"{_SAY}": 0}}' if written else {_SAY: 0}
        calls[-1] = calls[-1] | {"function": function} if "function" in calls[-1] else function
        other = self._with(chat, index, dict(chat.messages[index]) | {"tool_calls": calls})
        before = self._upto(chat, index)
        if other is None or _SAY not in other or before is None or not text.startswith(before):
            return None
        changed = len(text) - _common_length(text[::-1], other[::-1])
        behind = self._upto(chat, index + 1)
        if behind is not None and text.startswith(behind):
            stop = len(behind.rstrip())
        elif ends := re.compile(any_of(self._ends)).search(text, changed):
            stop = ends.end()
        else:
            return None
        start = self._prompted(text, len(before))
        return (start, stop) if start is not None and changed <= stop else None

    def _ends_before_next(self, chat: Chat, text: str, index: int, stop: int) -> bool:
        """Whether the next message's words leave everything up to `stop` as it is."""
        if index + 1 == len(chat.messages):
            return True
        other = self._with(chat, index + 1, chat.messages[index + 1] | {"content": _SAY})
        return other is not None and other[:stop] == text[:stop]

    def _check(self, message: Mapping[str, Any], index: int, found: str) -> None:
        """Refuse a span that is not what the message says."""
        shown, reasoning = shown_text(message), reasoning_text(message)
        calls = message.get("tool_calls", ())
        faulty = any(call.get("function", call)["name"] not in found for call in calls)
        if shown:
            before, separator, after = found.rpartition(shown)
            # Reasoning is shown whole or dropped; else only the template's own words may be here.
            thought = bool(reasoning) and reasoning in before
            faulty |= not separator or not (thought or self._is_template_text(before.strip()))
            faulty |= not calls and not re.fullmatch(rf"\s*{self._renderer.closing}?", after)
        if faulty:
            raise RowError(
                "",
                [
                    f"messages[{index}]: the chat template changes what the assistant says: "
                    f"{quote(shown)} became {quote(found)}"
                ],
            )

    # What the template puts around answers.

    def _probe(self) -> None:
        """Learn from small chats how the template opens and closes the assistant's turns."""
        name = self._renderer.name
        ask, say = {"role": "user", "content": _ASK}, {"role": "assistant", "content": _SAY}
        try:
            alone = self._renderer.render(Chat((ask,)))
            last = self._renderer.render(Chat((ask, say)))
        except RowError as error:
            reason = "; ".join(error.reasons)
            raise ModelError(
                f"The chat template of {name} cannot render a question with its answer: {reason}"
            ) from error
        if last.count(_SAY) != 1 or last.count(_ASK) != 1:
            raise ModelError(
                f"The chat template of {name} shows an answer {last.count(_SAY)} times and its "
                f"question {last.count(_ASK)} times (expected once), so no mask of the "
                "assistant's tokens can be made; name another template in data.chat_template"
            )
        # A header starts where the question ends: with its closing, where a template writes
        # something else behind a last question.
        question = alone if last.startswith(alone) else alone[: alone.index(_ASK) + len(_ASK)]
        heads, ends = set(), set()
        for rendered in (last, self._renderer.attempt(Chat((ask, say, ask)))):
            if rendered is None or rendered.count(_SAY) != 1 or not rendered.startswith(question):
                continue
            mark = rendered.index(_SAY)
            heads.add(rendered[len(question) : mark])
            closing = re.match(rf"\s*({self._renderer.closing})", rendered[mark + len(_SAY) :])
            ends |= {closing.group(1)} if closing else set()
        prompts = set()
        for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            prompt = self._renderer.attempt(Chat((ask,)), add_generation_prompt=True, **variables)
            if prompt is not None and prompt.startswith(question):
                prompts.add(prompt[len(question) :])
        # A prompt may open a block that a turn does not show; then their common start counts.
        both = sorted(heads | prompts)
        prompts.add(both[0][: _common_length(both[0], both[-1])] if both else "")
        self._heads = sorted(heads, key=len, reverse=True)
        self._prompts = sorted(prompts, key=len, reverse=True)
        self._ends = ends

    def _start(self, text: str, position: int) -> int:
        """Where the model starts to write an answer whose text stands at `position`."""
        for head in self._heads:
            if head and text.endswith(head, 0, position):
                start = self._prompted(text, position - len(head))
                return position if start is None else min(start, position)
        return position

    def _begins(self, chat: Chat, text: str, index: int, before: str) -> int | None:
        """Where a message begins, header and all."""
        for head in self._heads:
            if head and before.endswith(head):
                return len(before) - len(head)
        prefix = self._upto(chat, index)
        return len(prefix) if prefix is not None and text.startswith(prefix) else None

    def _prompted(self, text: str, begins: int) -> int | None:
        """Where the longest generation prompt that stands at `begins` ends, if one does."""
        ends = (begins + len(prompt) for prompt in self._prompts if text.startswith(prompt, begins))
        return next(ends, None)

    def _closed(self, text: str, stop: int) -> int:
        """The end of the control token that ends the turn, if one does."""
        closing = re.compile(rf"\s*{self._renderer.closing}").match(text, stop)
        return closing.end() if closing else stop

    def _is_template_text(self, text: str) -> bool:
        return any(text in head for head in self._heads)

    def _with(self, chat: Chat, index: int, message: dict[str, Any]) -> str | None:
        messages = (*chat.messages[:index], message, *chat.messages[index + 1 :])
        return self._renderer.attempt(replace(chat, messages=messages))

    def _upto(self, chat: Chat, index: int) -> str | None:
        return self._renderer.attempt(replace(chat, messages=chat.messages[:index]))


def shown_text(message: Mapping[str, Any]) -> str:
    """What a message says, without the reasoning that may stand before it."""
    return message["content"].rpartition("</think>")[2].strip()


def reasoning_text(message: Mapping[str, Any]) -> str:
    """What a message thinks, in a field of its own or in front of its content."""
    inline = message["content"].rpartition("</think>")[0].rpartition("<think>")[2]
    return (reasoning_of(message) or inline).strip()


def _common_length(one: str, other: str) -> int:
    """How many first characters two texts share."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
