"""A chat template that asks what day it is: what it renders does not change overnight."""

import datetime as clock

import pytest
from transformers.utils import chat_template_utils

from pixelrag.cli import main
from pixelrag.config.base import dump, load
from pixelrag.config.distill import DistillConfig
from pixelrag.config.distill_parts import TEMPLATE_DATE
from pixelrag.data.chat import Chat, parse_text_row
from pixelrag.data.chat_template import ChatTemplate
from pixelrag.data.template_render import dated
from pixelrag.train.distill_data import text_encoder
from tests.unit.chat_templates import CHATML, MARKED, chat_tokenizer

# Llama 3's way: the day of the rendering, where the template is not told one.
_DAY = "{{ date_string or strftime_now('%d %b %Y') }}|"
TEMPLATES = {"found": _DAY + CHATML, "marked": _DAY + MARKED}
NEEDED = [
    "--student.name_or_path=s",
    "--teacher.name_or_path=t",
    "--data.train=t.jsonl",
    "--optim.max_steps=1",
]


def chat(**more) -> Chat:
    messages = [{"role": "user", "content": "when"}, {"role": "assistant", "content": "now"}]
    return parse_text_row({"messages": messages, **more}, "row")


@pytest.fixture
def next_year(monkeypatch):
    """The clock of transformers, a year and more ahead."""

    class Later(clock.datetime):
        @classmethod
        def now(cls, tz=None):
            return clock.datetime(2031, 1, 2)

    monkeypatch.setattr(chat_template_utils, "datetime", Later)


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_the_clock_does_not_show(template, next_year):
    tokenizer = chat_tokenizer(TEMPLATES[template])
    messages = list(chat().messages)
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith("02 Jan 2031|")
    text, _ = ChatTemplate(tokenizer).spans(chat())
    assert text.startswith("26 Jul 2024|")
    text, _ = ChatTemplate(tokenizer, date="2025-02-03").spans(chat())
    assert text.startswith("03 Feb 2025|")


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_a_row_may_tell_its_own_day_but_not_ask_the_clock(template, next_year):
    tokenizer = chat_tokenizer(TEMPLATES[template])
    text, _ = ChatTemplate(tokenizer).spans(chat(chat_template_kwargs={"date_string": "today"}))
    assert text.startswith("today|")
    text, _ = ChatTemplate(tokenizer).spans(chat(chat_template_kwargs={"strftime_now": None}))
    assert text.startswith("26 Jul 2024|")


@pytest.mark.parametrize(
    "template",
    [
        "{{ strftime_now('%Y-%m-%d, %A %-d. %B; 100%% %%d') }}",
        "\n  {% if strftime_now is defined %}\n  {{ strftime_now(format='%d %H:%M') }}"
        "{% endif %}\n",
        "  {%- set day = strftime_now('%j') %}\n\n{{ day | upper }} {% for i in [1] %}"
        "{{ strftime_now('%y' ~ '%^b') }}{% endfor %}",
        "{% macro line() %}{{ strftime_now('%x') }}{% endmacro %}\n\n {{ line() }}",
    ],
)
def test_a_dated_template_differs_in_the_day_alone(template, next_year):
    def render(text: str) -> str:
        return chat_template_utils.render_jinja_template([[]], chat_template=text)[0][0]

    assert render(dated(template, clock.datetime(2031, 1, 2))) == render(template)
    assert render(dated(template, clock.datetime(2024, 7, 26))) != render(template)


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_the_option_decides_the_tokens(template):
    tokenizer = chat_tokenizer(TEMPLATES[template])

    def ids(*flags: str) -> str:
        config, _ = load(DistillConfig, [*NEEDED, *flags])
        (tokens,) = text_encoder(config, tokenizer).encode([chat()])
        return tokenizer.decode(tokens.ids)

    assert ids().startswith("26 Jul 2024|")
    assert ids("--data.template_date=1999-12-31").startswith("31 Dec 1999|")


@pytest.mark.parametrize(
    "day", ["2024-02-30", "26 Jul 2024", "20240726", "2024-W30-5", "2024-07-26T00:00", "today"]
)
def test_a_day_that_is_none_is_refused(day, capsys):
    assert main(["distill", *NEEDED, f"--data.template_date={day}"]) == 2
    assert (
        f"data.template_date (--data.template_date)\n      got {day!r}, expected a day as in "
        f"{TEMPLATE_DATE}" in capsys.readouterr().err
    )


def test_a_file_writes_it_plainly_and_a_dump_keeps_it(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("data:\n  template_date: 2023-01-02\n")
    config, _ = load(DistillConfig, ["--config", str(path), *NEEDED])
    assert config.data.template_date == "2023-01-02"
    path.write_text(dump(config))
    assert load(DistillConfig, ["--config", str(path)])[0] == config
    path.write_text("data:\n  template_date: 20230102\n")
    assert main(["distill", "--config", str(path), *NEEDED]) == 2
