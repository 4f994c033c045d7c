"""Questions with their answers, and where known the passages that hold them.

    {"question": "...", "answers": ["...", "..."], "passage_ids": ["7", "12"]}
    {"question": "...", "answer": "..."}

Every answer is right by itself; `with_answer` chooses the one to train on. Every passage of
`passage_ids` (a passage's id, or a document's, which stands for all its pieces) is relevant. They
are only for evaluation and the contrastive term: training learns from answers alone. Other keys are
ignored, `null` and a missing key both mean "none".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from pixelrag.data.lines import BadRow, StrPath, file_labels, parsed_lines
from pixelrag.data.pairs import DataReport, names_of, refuse_or_skip
from pixelrag.data.passages import PassageStore
from pixelrag.data.schema import RowError, kind_of, usable_text
from pixelrag.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Question:
    """A question.

    Attributes:
        text: the question.
        answers: at least one, in the order of the file, each once.
        passage_ids: relevant passages or documents; may be empty.
        sample_id: "train.jsonl:12", lines counted from 1, which errors name.
    """

    text: str
    answers: tuple[str, ...]
    passage_ids: tuple[str, ...]
    sample_id: str


def with_answer(question: Question, *key: int) -> Question:
    """The question with one of its answers, drawn evenly; equal keys give equal draws.

    As FiD and Atlas train on one random answer of those that count as right each time that a
    question comes up (Izacard and Grave 2021, `get_target` of the code).

    Args:
        question: with any number of answers.
        key: what the draw depends on, not negative: seed, epoch and the question's row.
    """
    count = len(question.answers)
    if count == 1:
        return question
    # The raw stream is the same in every release of NumPy.
    drawn = int(np.random.SeedSequence(key).generate_state(1)[0]) % count
    return replace(question, answers=(question.answers[drawn],))


class QuestionDataset:
    """The usable questions of some JSONL files, in the order of the files.

    Args:
        paths: the files.
        bad_rows: "error" refuses to start on a bad row, "skip" leaves bad rows out and says so.
        passages: the knowledge base; with it, a passage id that it does not have is a fault.
        quiet: nothing is logged of bad rows that are left out; the caller tells of them.

    Attributes:
        rows: the questions.
        report: what was found; its `num_documents` counts distinct ids in `passage_ids`, and its
            `fingerprint` is a hash of the files' bytes.

    Raises:
        DataError: a file is missing, unreadable, named twice or has no rows; or a row is bad and
            `bad_rows` is "error"; or no row is usable.
        ConfigError: `bad_rows` is neither of the two.
    """

    def __init__(
        self,
        paths: StrPath | Sequence[StrPath],
        bad_rows: Literal["error", "skip"] = "error",
        *,
        passages: PassageStore | None = None,
        quiet: bool = False,
    ) -> None:
        if bad_rows not in ("error", "skip"):
            raise ConfigError(f"data.bad_rows: got {bad_rows!r}, expected 'error' or 'skip'")
        names = names_of(paths)
        if not names or len(set(names)) < len(names):
            raise DataError(f"Questions: got the files {names}; name at least one, and each once")
        self.rows: list[Question] = []
        digest = hashlib.sha256()
        bad: list[BadRow] = []
        num_rows = 0
        for name, label in zip(names, file_labels(names), strict=True):
            num_before = num_rows

            def parse(obj: object, file: Path, line: int, label: str = label) -> Question:
                return parse_question(obj, file, line, label=label)

            for line, question in parsed_lines(name, parse, digest):
                num_rows += 1
                reasons = (
                    question.reasons
                    if isinstance(question, RowError)
                    else _unknown(question, passages)
                )
                bad += [BadRow(name, line, reason) for reason in reasons]
                if not reasons and not isinstance(question, RowError):
                    self.rows.append(question)
            if num_rows == num_before:
                raise DataError(f"{name} has no rows; expected one JSON object a line")
            digest.update(b"\x00")  # so that a line moved from one file to the next is noticed
        known = {identity for question in self.rows for identity in question.passage_ids}
        self.report = DataReport(num_rows, len(known), bad, digest.hexdigest())
        refuse_or_skip(self.report, bad_rows, quiet=quiet)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Question:
        return self.rows[index]

    def __iter__(self) -> Iterator[Question]:
        return iter(self.rows)


def parse_question(obj: object, file: Path, line: int, *, label: str | None = None) -> Question:
    """Turn the JSON value of one line into a question.

    Args:
        obj: the decoded line.
        file: the file it stands in.
        line: its line number, from 1.
        label: name of the file in `sample_id` (default: the file's own name).

    Raises:
        RowError: listing everything that is wrong with the row.
    """
    where = f"{file}:{line}"
    if not isinstance(obj, dict):
        raise RowError(where, [f"a row is a JSON object, got {kind_of(obj)}"])
    reasons: list[str] = []
    text = usable_text(obj.get("question"), "question", reasons)
    given = [key for key in ("answers", "answer") if obj.get(key) is not None]
    answers: list[str] = []
    if len(given) != 1:
        reasons.append("has " + ("both" if given else "neither") + " of answers and answer")
    elif given == ["answer"]:
        answers = _strings([obj["answer"]], "answer", reasons)
    else:
        answers = _strings(obj["answers"], "answers", reasons)
        if obj["answers"] == []:
            reasons.append("answers is empty; give at least one")
    gold = obj.get("passage_ids")
    if isinstance(gold, list):
        # As in a knowledge base, a number is the text that it is written as.
        gold = [str(i) if isinstance(i, int) and not isinstance(i, bool) else i for i in gold]
    passage_ids = _strings(gold or [], "passage_ids", reasons)
    if reasons or text is None:
        raise RowError(where, reasons)
    return Question(text, tuple(answers), tuple(passage_ids), f"{label or file.name}:{line}")


def _strings(value: object, name: str, reasons: list[str]) -> list[str]:
    """The distinct strings of a list, in its order."""
    if not isinstance(value, list):
        reasons.append(f"{name} is a list of strings, got {kind_of(value)}")
        return []
    names = [name if name == "answer" else f"{name}[{i}]" for i in range(len(value))]
    found = [usable_text(item, place, reasons) for item, place in zip(value, names, strict=True)]
    return list(dict.fromkeys(item for item in found if item is not None))


def _unknown(question: Question, passages: PassageStore | None) -> list[str]:
    if passages is None:
        return []
    return [
        f"passage_ids names {identity!r}, which the knowledge base does not have"
        for identity in question.passage_ids
        if not passages.rows_of(identity)
    ]
