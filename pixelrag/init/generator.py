"""What a RAG starter says of the generator: which one, and room for prompts and answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pixelrag.config.rag_models import GeneratorConfig
from pixelrag.data.lengths import CHARACTERS_A_TOKEN, Lengths, round_up
from pixelrag.data.passage_sources import Passage
from pixelrag.data.questions import Question
from pixelrag.errors import ModelError
from pixelrag.init import shared
from pixelrag.init.starter import Choice

_ENDLESS = 10**9
_TEMPLATE = 48  # tokens that a template may take, where there is no tokenizer to ask
_LONGEST_PROMPT = 2048
_VISUAL = 512


def choices(
    questions: Iterable[Question],
    sample: list[Question],
    passages: list[Passage],
    given: dict[str, Any],
    gpu: bool,
) -> Iterator[Choice]:
    """Choose the generator's options; `sample` is of the questions."""
    asked = given.get("generator", {})
    has_images = any(passage.image for passage in passages)
    small = not gpu and not has_images and shared.is_installed(shared.SMOLLM2)
    model = {"name_or_path": "Qwen/Qwen3-VL-2B-Instruct" if has_images else "facebook/bart-large"}
    if small:
        model = {"name_or_path": f"package:{shared.SMOLLM2}", "gguf_file": shared.SMOLLM2_FILE}
    if "name_or_path" in asked:
        model = {key: asked[key] for key in ("name_or_path", "gguf_file") if key in asked}
    text = _prompts(model, required=bool(asked))
    why = "Writes the answers."
    if small and "name_or_path" not in asked:
        why += " It comes with an installed package: nothing is downloaded."
    for key, value in model.items():
        yield Choice(f"generator.{key}", value, why if key == "name_or_path" else "Its file.")
    answers = [answer for question in questions for answer in question.answers]
    lengths = Lengths([_target(text, answer) for answer in answers], guessed=text is None)
    yield Choice(
        "generator.target_max_length",
        round_up(max(lengths.values), 8),
        lengths.why("answers", len(answers)) + " Answers are never cut: the longest must fit.",
    )
    alone = [_prompt(text, question.text, "", "") for question in sample]
    whole = [
        _prompt(text, question.text, passage.title, passage.text or "")
        for question, passage in zip(sample, _round(passages), strict=False)
    ]
    lengths = Lengths(whole, guessed=text is None)
    room = max(round_up(max(alone), 16) + 16, lengths.at_most(_LONGEST_PROMPT))
    yield Choice(
        "generator.prompt_max_length",
        room + (_VISUAL if has_images else 0),
        lengths.why("prompts of a question and a passage", len(whole))
        + " What is too long is cut in the passage.",
    )
    if has_images:
        yield Choice("generator.max_visual_tokens", _VISUAL, "An image must fit into the prompt.")
    if text is None or not text.is_seq2seq:
        yield Choice("generator_lora.enabled", True, "Adapters: a decoder's weights stay as is.")
        yield Choice("generator_lora.r", 8, "Their rank.")


def _prompts(model: dict[str, Any], *, required: bool) -> Any | None:
    from pixelrag.models.generator_load import read_prompts

    try:
        text = read_prompts(GeneratorConfig(**model)).text
    except ModelError:
        if required:
            raise
        return None
    text.prompt_max_length = text.target_max_length = _ENDLESS
    return text


def _target(text: Any | None, answer: str) -> int:
    if text is None:
        return len(answer) // CHARACTERS_A_TOKEN + 2
    return len(text.target(answer, ""))


def _prompt(text: Any | None, question: str, title: str, passage: str) -> int:
    if text is None:
        return len(question + title + passage) // CHARACTERS_A_TOKEN + _TEMPLATE
    return len(text.prompt(question, title, passage, ""))


def _round(passages: list[Passage]) -> Iterator[Passage]:
    while True:
        yield from passages
