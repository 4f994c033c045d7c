"""How good answers and the passages behind them are, question by question.

Every function returns one value a question, float64 [Q] in [0, 1], for means
(`pixelrag.evaluate.ranking.summarize`) and for intervals (`pixelrag.evaluate.bootstrap`).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from pixelrag.errors import DataError

Values = NDArray[np.float64]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_TOKEN = re.compile(r"\w+|[^\w\s]")


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation, without articles, with single spaces.

    As in the evaluation script of SQuAD (Rajpurkar et al. 2016, section 6.1), and in its order:
    punctuation goes before articles, so "the-end" becomes "theend".
    """
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, answers: Collection[str]) -> float:
    """1 when the prediction equals any answer after `normalize_answer`, else 0."""
    normalized = normalize_answer(prediction)
    return float(any(normalized == normalize_answer(answer) for answer in answers))


def token_f1(prediction: str, answers: Collection[str]) -> float:
    """The best F1 of the prediction's words against any answer's, as bags, after
    `normalize_answer`; where either has no word left, 1 if neither has (SQuAD 2.0's rule)."""
    return max(_f1(normalize_answer(prediction), normalize_answer(a)) for a in answers)


def answer_metrics(
    predictions: Sequence[str], answers: Sequence[Collection[str]]
) -> dict[str, Values]:
    """`em` and `f1` of each question.

    Args:
        predictions: one a question.
        answers: the right ones of each question, at least one.

    Raises:
        DataError: different numbers of the two, or a question without an answer.
    """
    _require_answers(answers, len(predictions), "predictions")
    pairs = list(zip(predictions, answers, strict=True))
    return {
        "em": np.array([exact_match(*pair) for pair in pairs], np.float64),
        "f1": np.array([token_f1(*pair) for pair in pairs], np.float64),
    }


def recall_by_gold(
    rows_QK: NDArray[np.int64],
    gold: Sequence[Sequence[Collection[int]]],
    ks: Sequence[int] = (1, 5),
) -> dict[str, Values]:
    """`recall@k`: the share of a question's gold passages that are among the first k found.

    Args:
        rows_QK: int64 [Q, K], the rows that a search found, best first; -1 for none.
        gold: for each question the rows of each of its gold passages. A gold document that was cut
            into pieces has several rows (`PassageStore.rows_of`), and any of them finds it.
        ks: each at most K.

    Raises:
        DataError: different numbers of questions; a question without gold, or gold without a row.
        ValueError: a k that is not 1 to K.
    """
    _check_ks(ks, rows_QK.shape[1])
    if len(gold) != len(rows_QK):
        raise DataError(f"recall: gold of {len(gold)} questions, searches of {len(rows_QK)}")
    for query, passages in enumerate(gold):
        if not passages or not all(len(rows) and min(rows) >= 0 for rows in passages):
            raise DataError(
                f"recall: question {query} has no gold passage, or one without a row; leave it out"
            )
    values = {f"recall@{k}": np.zeros(len(gold)) for k in ks}
    for query, passages in enumerate(gold):
        for k in ks:
            found = set(rows_QK[query, :k].tolist())
            hits = sum(not found.isdisjoint(rows) for rows in passages)
            values[f"recall@{k}"][query] = hits / len(passages)
    return values


def recall_by_answer(
    texts: Sequence[Sequence[str]], answers: Sequence[Collection[str]], ks: Sequence[int] = (1, 5)
) -> dict[str, Values]:
    """`answer_recall@k`: 1 where any of the first k passages holds any answer, else 0.

    The top-k accuracy of Karpukhin et al. 2020 ("Dense Passage Retrieval", section 5): words are
    compared as wholes and in any case, so "art" is not in "party".

    Args:
        texts: the passages found for each question, best first, "" for images and for none; fewer
            than k when a search found fewer.
        answers: the right ones of each question, at least one.
        ks: each at least 1.

    Raises:
        DataError: different numbers of the two, or a question without an answer.
        ValueError: a k below 1.
    """
    _check_ks(ks, None)
    _require_answers(answers, len(texts), "lists of passages")
    values = {f"answer_recall@{k}": np.zeros(len(texts)) for k in ks}
    for query, (passages, right) in enumerate(zip(texts, answers, strict=True)):
        needles = [needle for answer in right if (needle := _words(answer)).strip()]
        for rank, passage in enumerate(passages[: max(ks)], start=1):
            words = _words(passage)
            if any(needle in words for needle in needles):
                for k in ks:
                    values[f"answer_recall@{k}"][query] = float(rank <= k)
                break
    return values


def _f1(prediction: str, answer: str) -> float:
    said, right = prediction.split(), answer.split()
    if not said or not right:
        return float(said == right)
    shared = (Counter(said) & Counter(right)).total()
    # 2PR / (P + R) with P = shared / said and R = shared / right.
    return 2 * shared / (len(said) + len(right))


def _words(text: str) -> str:
    """Words and marks, one space around each. NFC: an accent may be written in two ways."""
    found = _TOKEN.findall(unicodedata.normalize("NFC", text).casefold())
    return f" {' '.join(found)} "


def _require_answers(answers: Sequence[Collection[str]], number: int, of: str) -> None:
    if len(answers) != number:
        raise DataError(f"answers: got those of {len(answers)} questions and {number} {of}")
    for query, right in enumerate(answers):
        if isinstance(right, str) or not right:
            raise DataError(
                f"answers: question {query} has {right!r}; expected a list of at least one"
            )


def _check_ks(ks: Sequence[int], most: int | None) -> None:
    for k in ks:
        if k < 1 or (most is not None and k > most):
            raise ValueError(f"k={k}: expected 1 to {most or 'any number'}")
