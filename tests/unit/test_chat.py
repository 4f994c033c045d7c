"""What rows of text data sets mean, and everything that can be wrong with them."""

import pytest

from pixelrag.data.chat import Chat, Completion, PlainText, parse_text_row, without_nulls
from pixelrag.data.schema import RowError

ASK = {"role": "user", "content": "why?"}
SAY = {"role": "assistant", "content": "so"}


def reasons(row: object) -> list[str]:
    with pytest.raises(RowError) as error:
        parse_text_row(row, "a.jsonl:3")
    assert str(error.value).startswith("a.jsonl:3: ")
    return error.value.reasons


def test_the_three_kinds():
    assert parse_text_row({"messages": [ASK, SAY]}, "") == Chat((ASK, SAY))
    assert parse_text_row({"prompt": "a", "completion": " b"}, "") == Completion("a", " b")
    assert parse_text_row({"prompt": "", "completion": "b"}, "") == Completion("", "b")
    assert parse_text_row({"text": "a", "messages": None, "id": 7}, "") == PlainText("a")


def test_a_prompt_and_completion_of_messages_is_a_chat_in_which_the_prompt_teaches_nothing():
    row = parse_text_row({"prompt": [ASK, SAY, ASK], "completion": [SAY]}, "")
    assert row == Chat((ASK, SAY, ASK, SAY), prompt_length=3)
    assert row.answers == [3]
    assert parse_text_row({"messages": [ASK, SAY, ASK, SAY]}, "").answers == [1, 3]


def test_messages_keep_what_templates_read_and_lose_nulls():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    row = {
        "messages": [
            ASK | {"name": None, "weight": 0},
            {"role": "assistant", "content": None, "tool_calls": [call, {"name": "g"}]},
            {"role": "tool", "content": "", "tool_call_id": "c1"},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}] * 2},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": []},
        ],
        "tools": '[{"type": "function", "function": {"name": "f"}}]',
        "chat_template_kwargs": {"enable_thinking": False},
    }
    chat = parse_text_row(row, "")
    assert chat.messages[0] == ASK | {"weight": 0}
    assert chat.messages[1]["content"] == ""
    assert chat.messages[1]["tool_calls"] == [
        call | {"function": {"name": "f", "arguments": {"a": [1]}}},
        {"name": "g", "arguments": {}},
    ]
    assert chat.messages[3]["content"] == "aa"
    assert "tool_calls" not in chat.messages[4]
    assert chat.tools == ({"type": "function", "function": {"name": "f"}},)
    assert chat.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (["x"], "a row is a JSON object, got a list"),
        ({"conversations": []}, "this one has conversations"),
        ({}, "this one has no key at all"),
        ({"messages": [ASK, SAY], "text": "a"}, "this one has messages, text"),
        ({"prompt": "a"}, "this one has prompt"),
        ({"prompt": "a", "completion": [SAY]}, 'prompt is a string ("a") and completion is a l'),
        ({"text": "  "}, "text is empty"),
        ({"text": 3}, "text is a string, got a number (3)"),
        ({"text": "a\x00b"}, "text contains a NUL at character 2"),
        ({"text": "a\ud800"}, "text contains half a surrogate pair '\\ud800' at character 2"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"messages": "hi"}, 'messages is a list of messages, got a string ("hi")'),
        ({"messages": []}, "messages has no message of the assistant: nothing would be learnt"),
        ({"messages": [ASK]}, "messages has no message of the assistant"),
        ({"messages": ["hi", SAY]}, "messages[0] is an object with role and content, got a string"),
        ({"messages": [{"content": "a"}, SAY]}, "messages[0].role is one of system, developer,"),
        ({"messages": [ASK | {"role": "bot"}, SAY]}, 'tool, got a string ("bot")'),
        ({"messages": [ASK | {"content": 4}, SAY]}, "messages[0].content is a string, got a numb"),
        ({"messages": [ASK, SAY | {"content": "  "}]}, "messages[1] says nothing: its content is"),
        ({"messages": [ASK, SAY | {"thinking": "\x00"}]}, "messages[1].thinking contains a NUL"),
        (
            {"messages": [ASK | {"content": [{"type": "image", "url": "x"}]}, SAY]},
            'messages[0].content[0] is a part of type text, got a string ("image"); images and',
        ),
        ({"messages": [ASK, SAY | {"tool_calls": {}}]}, "messages[1].tool_calls is a list, got an"),
        ({"messages": [ASK, SAY | {"tool_calls": [{}]}]}, "tool_calls[0] names no function, got"),
        (
            {"messages": [ASK, SAY | {"tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "messages[1].tool_calls[0].arguments: not valid JSON: Expecting",
        ),
        (
            {"messages": [ASK, SAY | {"tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
            "tool_calls[0].arguments is an object, got a list ([1])",
        ),
        (
            {
                "messages": [
                    ASK,
                    SAY | {"tool_calls": [{"name": "f", "arguments": {"a": "\udc00"}}]},
                ]
            },
            "tool_calls[0].arguments contains half a surrogate pair",
        ),
        ({"messages": [ASK, SAY], "tools": "[1"}, "tools: not valid JSON"),
        (
            {"messages": [ASK, SAY], "tools": [1]},
            "tools is a list of JSON schemas, got a list ([1])",
        ),
        ({"messages": [ASK, SAY], "chat_template_kwargs": 1}, "chat_template_kwargs is an object"),
        ({"prompt": [ASK], "completion": [ASK]}, "completion has no message of the assistant"),
    ],
)
def test_faults(row, expected):
    (reason,) = reasons(row)
    assert expected in reason


def test_all_faults_of_a_row_are_told_at_once():
    row = {"messages": [{"role": "x", "content": 1}, SAY | {"content": ""}], "tools": 5}
    found = reasons(row)
    assert len(found) == 4
    assert [name for reason in found for name in reason.split()[:1]] == [
        "messages[0].role",
        "messages[0].content",
        "messages[1]",
        "tools",
    ]


def test_tables_fill_missing_keys_with_nulls():
    value = {"a": None, "b": [{"c": None, "d": 1}], "e": {"f": None}}
    assert without_nulls(value) == {"b": [{"d": 1}], "e": {}}
