"""Measures a RAG model on held-out questions: what it finds, and what it answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pixelrag.config.rag import RagConfig
from pixelrag.data.passages import PassageStore
from pixelrag.data.questions import Question
from pixelrag.distributed.collectives import gather_objects
from pixelrag.distributed.interrupt import stop_point
from pixelrag.distributed.together import together
from pixelrag.engine.base import Engine
from pixelrag.evaluate.answers import answer_metrics, recall_by_answer, recall_by_gold
from pixelrag.evaluate.ranking import summarize
from pixelrag.losses.rag_marginal import document_log_prior
from pixelrag.losses.temperature import scale_from_log
from pixelrag.models.generator_prompt import Readable
from pixelrag.models.preprocess import Batch
from pixelrag.retrieval.encode import must_touch
from pixelrag.retrieval.hits import exact_search
from pixelrag.train.rag_data import RagParts
from pixelrag.train.rag_index import KnowledgeBase
from pixelrag.train.rag_retrieve import Retriever

KS = (1, 5)


@dataclass(frozen=True, slots=True)
class Answered:
    """One held-out question: the passages found, best first, and what was written ("" if not).

    Attributes:
        question: as in the file.
        rows, scores: what was found, and the inner products.
        answer: what was written.
        passages: ids of what was found.
    """

    question: Question
    rows: list[int]
    scores: list[float]
    answer: str
    passages: list[str]

    def to_json(self) -> dict[str, Any]:
        """As one line of a JSONL file would have it."""
        return {
            "question": self.question.text,
            "sample_id": self.question.sample_id,
            "answer": self.answer,
            "answers": list(self.question.answers),
            "passages": self.passages,
            "scores": self.scores,
        }


@dataclass(frozen=True, slots=True)
class RagEvaluation:
    """Figures, the values of each question behind them, and the answers; equal on all ranks.

    Attributes:
        figures: means, by names such as `eval/em`.
        per_question: of each measure, such as `em`, a value for every question.
        answered: the questions in their order.
        passages: what the rows in `answered` are of.
    """

    figures: dict[str, float]
    per_question: dict[str, np.ndarray]
    answered: list[Answered]
    passages: PassageStore


class RagEvaluator:
    """Evaluates on held-out questions.

    An answer is written for each passage; of them the likeliest counts, equal ones adding up:
    p(y|x) = sum_k p(z_k|x) p(y|x,z_k) over the passages that gave y (Lewis et al. 2020, section
    2.5, "fast decoding", with one hypothesis a passage). With fusion in the decoder one answer is
    written from all passages.

    Args:
        config: the job's configuration.
        passages: the knowledge base.
        parts: models and what makes their inputs.
        questions: held out, at least one.
        retriever: finds passages.
    """

    def __init__(
        self,
        config: RagConfig,
        passages: PassageStore,
        parts: RagParts,
        questions: Sequence[Question],
        retriever: Retriever,
    ) -> None:
        self._config = config
        self._passages = passages
        self._parts = parts
        self._questions = list(questions)
        self._retriever = retriever
        self._k = config.retrieval.k
        self._fused = config.loss.answer == "fid"

    def __call__(self, engine: Engine, knowledge: KnowledgeBase) -> RagEvaluation:
        """Evaluate with the index in use; a collective."""
        config, count = self._config, len(self._questions)
        texts = [question.text for question in self._questions]
        bounds = [r * count // engine.world_size for r in range(engine.world_size + 1)]
        own = slice(bounds[engine.rank], bounds[engine.rank + 1])
        depth = max(self._k, *KS)
        hits = self._retriever(engine, knowledge.generation, texts, own, depth)
        answers = [""] * (own.stop - own.start)
        if config.eval.answers:
            answers = self._answers(engine, own, hits.rows, hits.scores, bounds)
        parts = gather_objects((hits.rows, hits.scores, answers))
        rows = [row for part in parts for row in part[0]]
        scores = [score for part in parts for score in part[1]]
        answers = [answer for part in parts for answer in part[2]]
        per_question = self._recall(rows)
        if config.eval.answers:
            per_question |= answer_metrics(answers, [q.answers for q in self._questions])
        figures = summarize(per_question)
        if config.eval.fresh_index:
            figures |= self._fresh(engine, texts)
        answered = [
            Answered(question, found, score, answer, [self._passages.id_of(row) for row in found])
            for question, found, score, answer in zip(
                self._questions, rows, scores, answers, strict=True
            )
        ]
        named = {f"eval/{name}": value for name, value in figures.items()}
        return RagEvaluation(named, per_question, answered, self._passages)

    def _recall(self, rows: list[list[int]], prefix: str = "") -> dict[str, np.ndarray]:
        depth = max(KS)
        values: dict[str, np.ndarray] = {}
        gold = [
            [self._passages.rows_of(name) for name in question.passage_ids]
            for question in self._questions
        ]
        known = [index for index, passages in enumerate(gold) if passages]
        if known:
            table = np.full((len(known), depth), -1)
            for place, index in enumerate(known):
                table[place, : len(rows[index])] = rows[index][:depth]
            values |= recall_by_gold(table, [gold[index] for index in known], KS)
        if not self._passages.has_images:
            texts = [[self._passages[row].text or "" for row in found[:depth]] for found in rows]
            values |= recall_by_answer(texts, [q.answers for q in self._questions], KS)
        return {prefix + name: value for name, value in values.items()}

    def _fresh(self, engine: Engine, texts: list[str]) -> dict[str, float]:
        """Recall with passages encoded now, searched exactly."""
        vectors_ND = self._retriever.vectors(engine, range(len(self._passages)))
        queries_QD = self._retriever.queries(engine, texts)
        hits = exact_search(vectors_ND, queries_QD, min(max(KS), len(vectors_ND)))
        return summarize(self._recall(hits.rows_Qk.tolist(), "fresh_"))

    def _answers(
        self,
        engine: Engine,
        own: slice,
        rows: list[list[int]],
        scores: list[list[float]],
        bounds: list[int],
    ) -> list[str]:
        """This rank's answers; every rank makes as many calls as the fullest."""
        size = max(1, self._config.eval.batch_size // (1 if self._fused else self._k))
        most = max(b - a for a, b in itertools.pairwise(bounds))
        answers: list[str] = []
        with engine.inference():
            for start in range(0, most, size):
                stop_point()
                block = range(start, min(start + size, own.stop - own.start))
                # A rank without questions of its own asks the first one; it is thrown away.
                with together():
                    questions = [self._questions[own.start + i] for i in block]
                    found = [rows[i][: self._k] or [0] for i in block]
                    questions, found = questions or self._questions[:1], found or [[0]]
                    inputs = self._prompts(questions, found)
                kept = [scores[i][: self._k] or [0.0] for i in block]
                answers += self._write(engine, inputs, found, kept)[: len(block)]
        return answers

    def _prompts(self, questions: list[Question], found: list[list[int]]) -> Batch:
        prompt = self._parts.generator
        names = [question.sample_id for question in questions]
        if self._fused:
            passages: list[list[Readable | None]] = [
                [self._passages[row] for row in rows] + [None] * (self._k - len(rows))
                for rows in found
            ]
            return prompt.joint([question.text for question in questions], passages, names)
        pairs = [(q, row) for q, rows in zip(questions, found, strict=True) for row in rows]
        return prompt.prompts(
            [question.text for question, _ in pairs],
            [self._passages[row] for _, row in pairs],
            [question.sample_id for question, _ in pairs],
        )

    def _write(
        self, engine: Engine, inputs: Batch, found: list[list[int]], scores: list[list[float]]
    ) -> list[str]:
        prompt = self._parts.generator
        touch = must_touch(inputs)
        inputs = {key: value.to(engine.device) for key, value in inputs.items()}
        end, pad = prompt.tokenizer.eos_token_id, prompt.tokenizer.pad_token_id
        tokens, log_scale = engine(
            "write", touch_vision=touch, max_new_tokens=prompt.text.target_max_length,
            end_token_id=end, pad_token_id=pad, **inputs,
        )  # fmt: skip
        texts = prompt.texts(tokens.cpu())
        if self._fused:
            return texts
        targets = _as_targets(tokens, end, pad, started=prompt.text.is_seq2seq)
        log_probs_NT, _ = engine("reading", touch_vision=touch, **inputs, **targets)
        scale = float(scale_from_log(log_scale))
        chosen, first = [], 0
        for rows, own in zip(found, scores, strict=False):
            part = slice(first, first + len(rows))
            first += len(rows)
            prior_K = document_log_prior(scale * torch.tensor([own], dtype=torch.float64))[0]
            joint_K = prior_K + log_probs_NT[part].double().sum(1).cpu()
            chosen.append(_likeliest(texts[part], joint_K))
        return chosen


def _likeliest(texts: list[str], log_p_K: torch.Tensor) -> str:
    """The text of the largest probability, that of equal texts added up; "" of none."""
    together = {
        text: torch.logsumexp(log_p_K[[i for i, t in enumerate(texts) if t == text]], 0)
        for text in dict.fromkeys(texts)
    }
    return max(together, key=lambda text: float(together[text])) if together else ""


def _as_targets(
    tokens_NT: torch.Tensor, end: int, pad: int, *, started: bool
) -> dict[str, torch.Tensor]:
    """Written tokens as `target_ids` and `target_mask`: up to the first end, that included."""
    tokens_NT = tokens_NT[:, 1:] if started else tokens_NT
    if tokens_NT.shape[1] == 0:
        tokens_NT = tokens_NT.new_full((len(tokens_NT), 1), end)
    ended_NT = (tokens_NT == end) | (tokens_NT == pad)
    before_NT = ended_NT.cumsum(1) - ended_NT.long()
    return {"target_ids": tokens_NT, "target_mask": (before_NT == 0).long()}
