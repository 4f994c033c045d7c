"""Lets student and teacher go on with the prompts of held-out samples, to be read by a person."""

from __future__ import annotations

from typing import Any

import numpy as np

from pixelrag.data.pack_plan import PackPlan
from pixelrag.data.text_encoder import Tokens
from pixelrag.engine.base import Engine
from pixelrag.evaluate.sample_sheet import WrittenSample
from pixelrag.models.greedy import longest_prompt, write_greedily
from pixelrag.models.teacher import LiveTeacher, TeacherSource

NUM_SAMPLES = 8
_MOST_NEW_TOKENS = 96
_PLAIN_PROMPT = 32  # tokens of a plain text that serve as its prompt


def write_samples(
    engine: Engine, teacher: TeacherSource, tokenizer: Any, plan: PackPlan
) -> list[WrittenSample]:
    """Greedy continuations of a few held-out samples; a collective, every rank writes them all.

    Args:
        engine: holds a `DistillModel`.
        teacher: a live one writes too; others know no text but the data's.
        tokenizer: the student's.
        plan: held-out rows.
    """
    chosen = np.unique(plan.pieces.samples)
    chosen = chosen[:: max(1, -(-len(chosen) // NUM_SAMPLES))]
    parts = [_prompt_and_reference(plan.store[sample]) for sample in chosen.tolist()]
    prompts, references = [prompt for prompt, _ in parts], [rest for _, rest in parts]
    # Where the data ends, a model that says something else need not go on for long.
    most = min(_MOST_NEW_TOKENS, 2 * max(map(len, references)) + 8)
    # A chat's turn may end with another token than a text does.
    special = set(tokenizer.all_special_ids)
    ends = [tokenizer.eos_token_id, *(rest[-1] for rest in references if rest[-1] in special)]
    options: dict[str, Any] = {"ends": list(dict.fromkeys(ends)), "max_new_tokens": most}
    with engine.inference():
        container: Any = engine.module
        fitting = _cut(prompts, longest_prompt(container.student, most))
        student = engine("write", writing=options | {"prompts": fitting, "device": engine.device})
        by_teacher: list[list[int]] | None = None
        if isinstance(teacher, LiveTeacher):
            fitting = _cut(prompts, longest_prompt(teacher.model, most))
            by_teacher = write_greedily(teacher.model, fitting, device=teacher.device, **options)

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True).strip("\n")

    return [
        WrittenSample(
            plan.store.sample_id(sample),
            text(prompts[row]),
            text(references[row]),
            text(student[row]),
            None if by_teacher is None else text(by_teacher[row]),
        )
        for row, sample in enumerate(chosen.tolist())
    ]


def _prompt_and_reference(tokens: Tokens) -> tuple[list[int], list[int]]:
    """Cut at the beginning of the last stretch that is learnt from; a plain text early in it."""
    learnt = np.flatnonzero(tokens.supervised)
    breaks = np.flatnonzero(np.diff(learnt) > 1)
    first = int(learnt[breaks[-1] + 1]) if len(breaks) else int(learnt[0])
    last = int(learnt[-1]) + 1
    if first <= 1:
        first = max(1, min(_PLAIN_PROMPT, last // 2))
    return tokens.ids[:first].tolist(), tokens.ids[first:last].tolist()


def _cut(prompts: list[list[int]], longest: int | None) -> list[list[int]]:
    """Their ends, as far as they fit."""
    return [prompt if longest is None else prompt[-longest:] for prompt in prompts]
