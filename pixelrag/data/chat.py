"""What one row of a text data set means: a chat, a prompt with its completion, or plain text.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}          or both as lists of messages
    {"text": "..."}

A chat may bring `tools` (JSON schemas, as a list or as the JSON text of one) and
`chat_template_kwargs`. A message may bring `reasoning_content`, `tool_calls`, `tool_call_id`,
`name` and what else its chat template reads. Other keys of a row are ignored, `null` means missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pixelrag.data.schema import RowError, kind_of, usable_text
from pixelrag.json_text import parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation.

    Attributes:
        messages: dictionaries with `role`, `content` (a string, "" where there is none) and what
            else the row gave them; a `null` was dropped.
        tools: JSON schemas of the functions on offer.
        template_kwargs: further variables for the chat template.
        prompt_length: assistant messages before this one belong to the prompt and teach nothing.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt_length: int = 0

    @property
    def answers(self) -> list[int]:
        """Positions of the assistant's messages that teach something."""
        return [
            index
            for index, message in enumerate(self.messages)
            if message["role"] == "assistant" and index >= self.prompt_length
        ]


@dataclass(frozen=True, slots=True)
class Completion:
    """Text to be continued, and its continuation; taken as they are, without a template."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text in which every token teaches."""

    text: str


TextRow = Chat | Completion | PlainText


def parse_text_row(obj: object, where: str) -> TextRow:
    """Turn the value of one row into what it means.

    Args:
        obj: the decoded row.
        where: file and line, for the error.

    Raises:
        RowError: listing everything that is wrong with the row.
    """
    if not isinstance(obj, Mapping):
        raise RowError(where, [f"a row is a JSON object, got {kind_of(obj)}"])
    reasons: list[str] = []
    given = {key for key in ("messages", "prompt", "completion", "text") if _has(obj, key)}
    row: TextRow | None = None
    if given == {"messages"}:
        row = _chat(obj, obj["messages"], [], "messages", reasons)
    elif given == {"text"}:
        text = usable_text(obj["text"], "text", reasons)
        row = PlainText(text) if text is not None else None
    elif given == {"prompt", "completion"}:
        prompt, completion = obj["prompt"], obj["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            # A prompt may be empty: then everything is completion.
            start = usable_text(prompt, "prompt", reasons) if prompt else ""
            end = usable_text(completion, "completion", reasons)
            row = Completion(start, end) if start is not None and end is not None else None
        elif isinstance(prompt, str) or isinstance(completion, str):
            reasons.append(
                f"prompt is {kind_of(prompt)} and completion is {kind_of(completion)}; give both "
                "as strings, or both as lists of messages"
            )
        else:
            row = _chat(obj, completion, prompt, "completion", reasons)
    else:
        keys = sorted(given) if given else list(map(str, obj))[:12]
        reasons.append(
            "a row has messages, or text, or prompt and completion, and nothing else of these; "
            f"this one has {', '.join(keys) or 'no key at all'}"
        )
    if reasons or row is None:
        raise RowError(where, reasons)
    return row


def without_nulls(value: Any) -> Any:
    """The value without the `null` members that tables fill missing keys with, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def reasoning_of(message: Mapping[str, Any]) -> str:
    """The reasoning that a message brings in a field of its own, or ""."""
    return next((message[name] for name in _REASONING if message.get(name)), "")


def _chat(
    obj: Mapping[str, Any], answer: object, prompt: object, name: str, reasons: list[str]
) -> Chat | None:
    before = _messages(prompt, "prompt", reasons)
    after = _messages(answer, name, reasons)
    tools = _tools(obj.get("tools"), reasons)
    kwargs = obj.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        reasons.append(f"chat_template_kwargs is an object, got {kind_of(kwargs)}")
        kwargs = None
    if not reasons and not any(message["role"] == "assistant" for message in after):
        reasons.append(f"{name} has no message of the assistant: nothing would be learnt from it")
    if reasons:
        return None
    return Chat((*before, *after), tuple(tools), dict(kwargs or {}), len(before))


def _messages(value: object, name: str, reasons: list[str]) -> list[dict[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        reasons.append(f"{name} is a list of messages, got {kind_of(value)}")
        return []
    return [
        message
        for index, item in enumerate(value)
        if (message := _message(item, f"{name}[{index}]", reasons)) is not None
    ]


def _message(value: object, name: str, reasons: list[str]) -> dict[str, Any] | None:
    if not isinstance(value, Mapping):
        reasons.append(f"{name} is an object with role and content, got {kind_of(value)}")
        return None
    message = {str(key): item for key, item in value.items() if item is not None}
    role = message.get("role")
    if role not in ROLES:
        reasons.append(f"{name}.role is one of {', '.join(ROLES)}, got {kind_of(role)}")
    before = len(reasons)
    content = _content(message.get("content", ""), f"{name}.content", reasons)
    calls = _tool_calls(message.pop("tool_calls", None), f"{name}.tool_calls", reasons)
    for key in _REASONING:
        if key in message:
            usable_text(message[key], f"{name}.{key}", reasons, blank=True)
    if len(reasons) > before or content is None:
        return None
    if role == "assistant" and not content.strip() and not calls and not reasoning_of(message):
        reasons.append(f"{name} says nothing: its content is empty and it calls no tool")
    return message | {"content": content} | ({"tool_calls": calls} if calls else {})


def _content(value: object, name: str, reasons: list[str]) -> str | None:
    """The text of a message; text parts of a list are joined."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        texts: list[str] = []
        for index, part in enumerate(value):
            is_text = isinstance(part, Mapping) and part.get("type") == "text"
            if is_text and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                kind = part.get("type") if isinstance(part, Mapping) else None
                reasons.append(
                    f"{name}[{index}] is a part of type text, got {kind_of(kind or part)}; "
                    "images and other media cannot be distilled"
                )
        value = "".join(texts)
    # A message to or from a tool may be empty; only what cannot be encoded is refused.
    return usable_text(value, name, reasons, blank=True)


def _tool_calls(value: object, name: str, reasons: list[str]) -> list[dict[str, Any]]:
    """Calls with their arguments as objects: templates write those as JSON themselves."""
    if value is None:
        return []
    if not isinstance(value, Sequence) or isinstance(value, str):
        reasons.append(f"{name} is a list, got {kind_of(value)}")
        return []
    calls: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        function = item.get("function", item) if isinstance(item, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            reasons.append(f"{name}[{index}] names no function, got {kind_of(item)}")
            continue
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = _parsed(arguments)
            except ValueError as error:
                reasons.append(f"{name}[{index}].arguments: {error}")
                continue
        if not isinstance(arguments, Mapping):
            reasons.append(f"{name}[{index}].arguments is an object, got {kind_of(arguments)}")
            continue
        usable_text(_json(arguments), f"{name}[{index}].arguments", reasons)
        function = dict(function) | {"arguments": dict(arguments)}
        calls.append(dict(item) | {"function": function} if "function" in item else function)
    return calls


def _tools(value: object, reasons: list[str]) -> list[dict[str, Any]]:
    if isinstance(value, str) and value:
        try:
            value = _parsed(value)
        except ValueError as error:
            reasons.append(f"tools: {error}")
            return []
    if not value:
        return []
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        reasons.append(f"tools is a list of JSON schemas, got {kind_of(value)}")
        return []
    usable_text(_json(value), "tools", reasons)
    return [dict(tool) for tool in value]


def _parsed(text: str) -> Any:
    return parse_json(text.encode("utf-8"), one_line="\n" not in text)


def _json(value: object) -> str:
    """As a chat template writes it."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _has(obj: Mapping[str, Any], key: str) -> bool:
    return obj.get(key) is not None
