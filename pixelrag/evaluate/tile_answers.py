"""Question answering from the tiles found: a reader answers, a grader judges.

Whatever keeps an answer from being written or judged is a failure of its own, counted apart:
accuracy is the share of right answers among those that were judged.
"""

from __future__ import annotations

import base64
import logging
import mimetypes
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pixelrag.config.tile_questions import GRADER_KEY, READER_KEY, TileQuestionOptions
from pixelrag.data.tile_questions import TileQuestion
from pixelrag.distributed.collectives import agree_max, gather_objects
from pixelrag.distributed.interrupt import stop_point
from pixelrag.evaluate.chat_api import ChatApi, ReplyError

logger = logging.getLogger("pixelrag")

# Questions that a rank asks at once. Ranks meet after each such wave, so that none waits longer
# for another than a wave takes.
WAVE = 8
_HOPELESS_WAVES = 2
_READER = (
    "The images are parts of pages. Answer the question from them, in as few words as possible. "
    "If they do not hold the answer, say that you do not know.\n\nQuestion: {question}"
)
# The three grades of SimpleQA (Wei et al. 2024).
_GRADER = (
    "Grade an answer to a question. Its wording does not matter, its content does.\n\n"
    "Question: {question}\nRight answer: {right}\nAnswer to grade: {answer}\n\n"
    "Reply with one letter.\n"
    "A: it says what the right answer says and contradicts nothing of it.\n"
    "B: it contradicts the right answer, or names another.\n"
    "C: it does not commit itself, or says that it does not know."
)
_GRADES = {"A": "correct", "B": "incorrect", "C": "not_attempted"}
_LETTER = re.compile(r"\W*([ABC])\b")


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """An answer and its grade: correct, incorrect, not_attempted, or failed with the reason."""

    id: str
    answer: str | None
    grade: str
    failure: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


class TileAnswerer:
    """A reader and a grader, as the configuration names them; see `TileQuestionOptions`."""

    def __init__(self, options: TileQuestionOptions, **kwargs: Any) -> None:
        kwargs["timeout"] = options.answer_timeout_seconds
        named = (options.reader_url, options.reader_model, options.grader_url, options.grader_model)
        reader_url, reader_model, grader_url, grader_model = (name or "" for name in named)
        self._reader = ChatApi(reader_url, reader_model, key_variable=READER_KEY, **kwargs)
        self._grader = ChatApi(grader_url, grader_model, key_variable=GRADER_KEY, **kwargs)

    def __call__(self, question: TileQuestion, tiles: Sequence[Path]) -> GradedAnswer:
        """Have one question answered and the answer judged; never raises for what the APIs do."""
        answer = None
        try:
            parts = [_image(tile) for tile in tiles]
            parts.append({"type": "text", "text": _READER.format(question=question.text)})
            answer = self._reader.reply(parts)
            grade = self._grader.reply(
                _GRADER.format(question=question.text, right=question.answer, answer=answer)
            )
            letter = _LETTER.match(grade)
            if letter is None:
                raise ReplyError(f"the grader replied {grade[:80]!r}, expected A, B or C")
            return GradedAnswer(question.id, answer, _GRADES[letter[1]])
        except (ReplyError, OSError) as error:
            return GradedAnswer(question.id, answer, "failed", str(error))


def answer_all(
    ask: Callable[[TileQuestion, Sequence[Path]], GradedAnswer],
    questions: Sequence[TileQuestion],
    tiles: Sequence[Sequence[Path]],
    rank: int,
    world_size: int,
) -> list[GradedAnswer]:
    """Ask about every question, dealt out to the ranks; a collective.

    When two waves in a row fail on all ranks, the rest are failures without being asked.

    Args:
        ask: see `TileAnswerer`.
        questions: the same on all ranks.
        tiles: of each question, the best first.
        rank, world_size: this process's place.

    Returns:
        Every question's, in their order, on all ranks.
    """
    mine = range(rank, len(questions), world_size)
    waves = -(-len(range(0, len(questions), world_size)) // WAVE)
    found: dict[int, GradedAnswer] = {}
    hopeless = 0
    with ThreadPoolExecutor(WAVE, "pixelrag-answers") as pool:
        for wave in range(waves):
            stop_point()
            numbers = mine[wave * WAVE : (wave + 1) * WAVE]
            asked = pool.map(lambda i: ask(questions[i], tiles[i]), numbers)
            found |= dict(zip(numbers, asked, strict=True))
            went_well = any(found[i].grade != "failed" for i in numbers)
            hopeless = 0 if agree_max([int(went_well)])[0] else hopeless + 1
            if hopeless == _HOPELESS_WAVES:
                break
    given_up = f"not asked: {_HOPELESS_WAVES} rounds of questions before it had all failed"
    for i in mine:
        found.setdefault(i, GradedAnswer(questions[i].id, None, "failed", given_up))
    everyone = {i: graded for part in gather_objects(found) for i, graded in part.items()}
    return [everyone[i] for i in range(len(questions))]


def answer_figures(answers: Sequence[GradedAnswer]) -> dict[str, float]:
    """``miniv8/qa_...``: shares among the judged answers, and of failures among all.

    Where nothing was judged there is no accuracy. The log tells the first failure.
    """
    counts = Counter(answer.grade for answer in answers)
    judged = len(answers) - counts["failed"]
    figures = {"miniv8/qa_failed": counts["failed"] / len(answers)}
    if counts["failed"]:
        first = next(answer for answer in answers if answer.grade == "failed")
        logger.warning(
            "%d of %d questions were not answered and judged; they count as failures, not as wrong "
            "answers. The first, %s: %s",
            *(counts["failed"], len(answers), first.id, first.failure),
        )
    if judged:
        figures["miniv8/qa_accuracy"] = counts["correct"] / judged
        figures["miniv8/qa_not_attempted"] = counts["not_attempted"] / judged
    return figures


def _image(tile: Path) -> dict[str, Any]:
    kind = mimetypes.guess_type(tile.name)[0] or "image/png"
    data = base64.b64encode(tile.read_bytes()).decode("ascii")
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
