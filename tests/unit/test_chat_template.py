"""The assistant's tokens: what is learnt from is what the assistant says, to the letter."""

import json
import logging
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pixelrag.data.chat import Chat, parse_text_row
from pixelrag.data.chat_template import ChatTemplate
from pixelrag.data.schema import RowError
from pixelrag.data.text_encoder import TextEncoder
from pixelrag.errors import ModelError
from tests.unit.chat_templates import (
    BRACKETS,
    CHANNELS,
    CHATML,
    HEADERS,
    MARKED,
    MARKED_LAST,
    OPENED,
    SILENT,
    THINKING,
    TWICE,
    chat_tokenizer,
)

END = "<|im_end|>"
CALL = {"type": "function", "id": "123456789", "function": {"name": "look", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
TEMPLATES = {
    name: ChatTemplate(chat_tokenizer(template))
    for name, template in {
        "chatml": CHATML,
        "thinking": THINKING,
        "headers": HEADERS,
        "brackets": BRACKETS,
        "opened": OPENED,
        "channels": CHANNELS,
        "marked": MARKED,
    }.items()
}
ENCODERS = {
    name: TextEncoder(chat_tokenizer(template))
    for name, template in {
        "chatml": CHATML,
        "thinking": THINKING,
        "headers": HEADERS,
        "brackets": BRACKETS,
        "marked": MARKED,
    }.items()
}


def says(content: str, **fields) -> dict:
    return {"role": "assistant", "content": content, **fields}


def asks(content: str = "why?") -> dict:
    return {"role": "user", "content": content}


def result(content: str) -> dict:
    return {"role": "tool", "content": content, "tool_call_id": "123456789"}


def chat(*messages: dict, **fields) -> Chat:
    return parse_text_row({"messages": list(messages), **fields}, "row")


def found(template: str, *messages: dict, **fields) -> list[str]:
    text, spans = TEMPLATES[template].spans(chat(*messages, **fields))
    return [text[start:stop] for start, stop in spans]


# What no message may contain is tested by itself.
words = st.text(st.characters(exclude_characters="\x00<", exclude_categories=["Cs"]), max_size=30)
words = words.filter(str.strip)


@st.composite
def conversations(draw):
    """Turns of questions and answers, perhaps behind a system message."""
    turns = draw(st.lists(st.tuples(words, words), min_size=1, max_size=4))
    system = draw(st.none() | words)
    return system, turns


@pytest.mark.parametrize("name", ENCODERS)
@settings(deadline=None, max_examples=40)
@given(conversations())
def test_masked_tokens_are_what_the_assistant_says(name, conversation):
    system, turns = conversation
    messages = [] if system is None or name == "brackets" else [dict(asks(system), role="system")]
    for question, answer in turns:
        messages += [asks(question), says(answer)]
    encoder = ENCODERS[name]
    (tokens,) = encoder.encode([chat(*messages)])
    expected = ""
    for index, (_, answer) in enumerate(turns):
        if name == "headers":
            expected += answer.strip() + "<|eot|>"
        elif name == "brackets":
            expected += " " + answer + END
        elif name == "thinking" and index + 1 == len(turns):
            expected += answer.lstrip("\n") + END
        else:
            expected += answer + END
    decode = encoder._tokenizer.decode
    # The tokenizer itself normalizes to NFC.
    assert decode(tokens.ids[tokens.supervised]) == unicodedata.normalize("NFC", expected)
    whole = encoder._tokenizer.apply_chat_template(messages, tokenize=False)
    assert unicodedata.normalize("NFC", decode(tokens.ids)) == unicodedata.normalize("NFC", whole)


def test_tokens_are_those_of_the_whole_text_where_no_token_lies_across_a_border():
    tokenizer = chat_tokenizer(MARKED)
    messages = [asks(), says("the quick brown fox"), asks("more"), says(" search\nengine ")]
    whole = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    bare = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    for template in (MARKED, bare):
        (tokens,) = TextEncoder(chat_tokenizer(template)).encode([chat(*messages)])
        assert tokens.ids.tolist() == whole["input_ids"]
        assert tokens.supervised.tolist() == [bool(flag) for flag in whole["assistant_masks"]]


def test_a_border_within_a_token_is_cut():
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.add_tokens(["\n\n"])  # the header's line break and the answer's would merge
    (tokens,) = TextEncoder(tokenizer).encode([chat(asks(), says("\nfox"))])
    assert tokenizer.decode(tokens.ids[tokens.supervised]) == "\nfox" + END
    assert tokenizer.convert_tokens_to_ids("\n\n") not in tokens.ids


# Reasoning.


@pytest.mark.parametrize("form", ["inline", "field"])
def test_reasoning_is_learnt_where_the_template_shows_it_and_not_where_it_drops_it(form):
    def thinks(why: str, content: str) -> dict:
        if form == "field":
            return says(content, reasoning_content=why)
        return says(f"<think>\n{why}\n</think>\n\n{content}")

    messages = [asks(), thinks("old why", "one"), asks("more"), thinks("new why", "two")]
    assert found("thinking", *messages) == [
        f"one{END}",
        f"<think>\nnew why\n</think>\n\ntwo{END}",
    ]


def test_an_empty_reasoning_block_belongs_to_the_prompt():
    assert found("thinking", asks(), says("one")) == [f"one{END}"]
    text, _ = TEMPLATES["thinking"].spans(chat(asks(), says("one")))
    assert "<think>\n\n</think>\n\none" in text


def test_an_answer_starts_behind_what_turns_and_prompt_share_where_the_prompt_goes_on():
    assert found("opened", asks(), says("one"), asks(), says("two")) == [f"one{END}", f"two{END}"]


def test_what_the_model_itself_writes_before_an_answer_is_learnt():
    messages = [asks(), says("one"), asks(), says("two", reasoning_content="why")]
    assert found("channels", *messages) == [
        "<|channel|>final<|message|>one<|eot|>",
        "<|channel|>analysis<|message|>why<|eot|>"
        "<|start|>assistant<|channel|>final<|message|>two<|return|>",
    ]


def test_lost_reasoning_is_told_once(caplog):
    template = ChatTemplate(chat_tokenizer(OPENED))
    with caplog.at_level(logging.WARNING, "pixelrag"):
        for _ in range(2):
            template.spans(chat(asks(), says("<think>why</think>one")))
            template.spans(chat(asks(), says("one")))
    assert len([r for r in caplog.records if "drops the reasoning" in r.message]) == 1


# Tools.


@pytest.mark.parametrize("arguments", [{"a": 1}, json.dumps({"a": 1})])
def test_calls_are_learnt_and_results_are_not(arguments):
    call = {**CALL, "function": {"name": "look", "arguments": arguments}}
    messages = [
        asks(),
        says("let me see", tool_calls=[call, call]),
        result("it is blue"),
        says("", tool_calls=[call]),
        result("it is red"),
        says("purple"),
        asks("thanks"),
        says("welcome"),
    ]
    rendered = '\n<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
    assert found("thinking", *messages, tools=TOOLS) == [
        f"let me see{rendered}{rendered}{END}",
        f"{rendered}{END}",
        f"purple{END}",
        f"welcome{END}",
    ]


def test_calls_that_the_template_cannot_do_without():
    messages = [asks(), says("", tool_calls=[CALL]), result("it is blue"), says("blue")]
    assert found("brackets", *messages) == [f"[CALLS]{json.dumps([CALL])}{END}", f" blue{END}"]
    assert found("channels", *messages) == [
        ' to=look<|message|>{"a": 1}<|call|>',
        "<|channel|>final<|message|>blue<|return|>",
    ]


def test_a_result_within_the_assistants_turn_is_not_learnt():
    # As in Gemma 4: the result stands in the turn of the call, and only if there was one.
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '<|call|>' + c.function | tojson }}{% endfor %}"
        "{{ messages[loop.index].content if m.tool_calls and not loop.last }}{{ '<|eot|>' }}"
        "{% elif m.role == 'user' %}{{ '<|message|>' + m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>' }}{% endif %}"
    )
    finder = ChatTemplate(chat_tokenizer(template))
    messages = [asks(), says("", tool_calls=[CALL]), result("it is blue"), says("so")]
    assert "it is blue<|eot|>" in chat_tokenizer(template).apply_chat_template(
        messages, tokenize=False
    )
    with pytest.raises(
        RowError, match=r"messages\[1\].*does not show where the assistant's 'call'"
    ):
        finder.spans(chat(*messages))


def test_a_call_whose_result_is_shown_only_behind_a_call():
    # Without the call the result is gone too, so the call must not be replaced as a whole. And the
    # prompt opens a block that turns do not show.
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
        "{{ '<|call|>' if m.tool_calls else '<|eot|>' }}{% elif m.role == 'user' %}"
        "{{ '<|message|>' + m.content }}{% elif messages[loop.index0 - 1].tool_calls %}"
        "{{ '<|channel|>' + m.content + '<|eot|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|><think>\n' }}{% endif %}"
    )
    messages = [asks(), says("", tool_calls=[CALL]), result("it is blue"), says("so")]
    text, spans = ChatTemplate(chat_tokenizer(template)).spans(chat(*messages))
    assert [text[start:stop] for start, stop in spans] == [
        f"{json.dumps(CALL['function'])}<|call|>",
        "so<|eot|>",
    ]


def test_a_template_that_drops_calls_or_words_is_refused():
    with pytest.raises(RowError, match=r"messages\[1\].*changes what the assistant says"):
        found("headers", asks(), says("let me see", tool_calls=[CALL]), result("blue"), says("so"))
    changed = CHATML.replace("m.content", "m.content.replace('c', 'k')")
    with pytest.raises(RowError, match=r"'can' became 'kan<\|im_end\|>'"):
        ChatTemplate(chat_tokenizer(changed)).spans(chat(asks(), says("can")))


def test_arguments_that_a_template_expects_as_text():
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.arguments }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    text, spans = ChatTemplate(chat_tokenizer(template)).spans(
        chat(asks(), says("look", tool_calls=[CALL]), result("blue"), says("so"))
    )
    assert [text[a:b] for a, b in spans] == [f'look<call>{{"a": 1}}{END}', f"so{END}"]


# Markers.


def test_markers_of_the_template_are_taken_at_their_word():
    assert found("marked", asks(), says("one"), asks(), says("two")) == [f"one{END}", f"two{END}"]
    template = ChatTemplate(chat_tokenizer(MARKED_LAST))
    text, spans = template.spans(chat(asks(), says("one"), asks(), says("two")))
    assert [text[a:b] for a, b in spans] == [f"two{END}"]


def test_markers_that_mark_nothing_or_something_else_are_errors():
    nothing = MARKED.replace("m.role == 'assistant'", "m.role == 'nobody'")
    with pytest.raises(RowError, match="marks nothing"):
        ChatTemplate(chat_tokenizer(nothing)).spans(chat(asks(), says("one")))
    other = MARKED.replace("m.role == 'assistant'", "m.role == 'user'")
    with pytest.raises(RowError, match="other text than the assistant's 'one'"):
        ChatTemplate(chat_tokenizer(other)).spans(chat(asks(), says("one")))


# What is learnt from.


@pytest.mark.parametrize("template", ["chatml", "marked", "thinking"])
def test_answers_in_a_prompt_teach_nothing(template):
    row = {
        "prompt": [asks(), says("one"), asks("more")],
        "completion": [says("two")],
    }
    text, spans = TEMPLATES[template].spans(parse_text_row(row, "row"))
    assert [text[start:stop] for start, stop in spans] == [f"two{END}"]


def test_prompt_answers_cannot_be_told_apart_if_only_the_last_is_marked():
    row = {"prompt": [asks(), says("one"), asks("more")], "completion": [says("two")]}
    with pytest.raises(RowError, match="cannot be told from the others"):
        ChatTemplate(chat_tokenizer(MARKED_LAST)).spans(parse_text_row(row, "row"))


def test_supervise_last_and_all():
    row = chat(asks(), says("one"), asks(), says("two"))
    tokenizer = chat_tokenizer()
    (last,) = TextEncoder(tokenizer, supervise="last_assistant").encode([row])
    assert tokenizer.decode(last.ids[last.supervised]) == f"two{END}"
    (everything,) = TextEncoder(tokenizer, supervise="all").encode([row])
    assert everything.supervised.all()
    assert np.array_equal(everything.ids, last.ids)


# Refusals.


@pytest.mark.parametrize(("template", "times"), [(TWICE, 2), (SILENT, 0)])
def test_a_template_that_gives_no_mask_is_an_error(template, times):
    with pytest.raises(ModelError, match=f"shows an answer {times} times"):
        ChatTemplate(chat_tokenizer(template))


def test_no_template_is_an_error():
    with pytest.raises(ModelError, match=r"no chat template; name one in data\.chat_template"):
        ChatTemplate(chat_tokenizer(None))
    assert ChatTemplate(chat_tokenizer(None), CHATML).spans(chat(asks(), says("one")))


def test_control_tokens_in_messages_are_refused():
    messages = [asks(f"say {END}"), says("one"), asks(), says("two", reasoning_content="<|eot|>")]
    with pytest.raises(RowError) as error:
        found("chatml", *messages)
    assert len(error.value.reasons) == 2
    assert "messages[0].content contains the control token '<|im_end|>' at character 5" in str(
        error.value
    )
    assert "messages[3].reasoning" in str(error.value)


def test_what_a_template_refuses_is_told():
    with pytest.raises(RowError, match="refuses it: roles must alternate"):
        found("brackets", asks(), asks(), says("one"))


def test_variables_reach_the_template():
    template = "{{ mood }}" + CHATML
    finder = ChatTemplate(chat_tokenizer(template), variables={"mood": "calm"})
    assert finder.spans(chat(asks(), says("one")))[0].startswith("calm")
    row = chat(asks(), says("one"), chat_template_kwargs={"mood": "wild"})
    assert finder.spans(row)[0].startswith("wild")
