"""Held-out loss, its parts, and how often student and teacher agree."""

from __future__ import annotations

import torch

from pixelrag.data.balance import share_out
from pixelrag.data.pack_plan import PackPlan
from pixelrag.data.packed_batch import PackedCollator
from pixelrag.distributed.collectives import sum_over_ranks
from pixelrag.distributed.env import World
from pixelrag.distributed.interrupt import stop_point
from pixelrag.engine.base import Engine
from pixelrag.models.causal import uncompiled
from pixelrag.models.teacher import TeacherSource
from pixelrag.train.distill_batch import Lesson


class DistillEvaluator:
    """Evaluates on fixed rows, shared out over the ranks by cost.

    The figures are means over supervised tokens: they depend neither on how rows are packed and
    shared out nor on the number of ranks.

    Args:
        plan: held-out rows.
        pad_id: token that fills rows up.
        batch_size: rows of a rank that go through the models at once.
        world: this process's place.
    """

    def __init__(self, plan: PackPlan, pad_id: int, batch_size: int, world: World) -> None:
        self._collate = PackedCollator(plan, pad_id)
        costs = plan.epoch(0).costs
        self._batches = share_out(costs, world.world_size, batch_size)[world.rank]
        self._num_tokens = int(plan.epoch(0).supervised.sum())

    def __call__(self, engine: Engine, teacher: TeacherSource) -> dict[str, float]:
        """The figures `eval/loss`, `eval/ce_loss`, `eval/kd_loss`, `eval/agreement`; a
        collective. Agreement is the share of tokens whose likeliest token is the teacher's too.
        """
        sums = torch.zeros(4, dtype=torch.float64, device=engine.device)
        # Rows as wide as they are, without gradients: layers compiled for training do not fit them.
        with engine.inference(), uncompiled():
            for rows in self._batches:
                stop_point()
                lesson = Lesson.of(self._collate(0, rows))
                inputs = lesson.taught(teacher, self._num_tokens, engine.device)
                terms = engine("student", count_top1=True, **inputs)
                sums += torch.stack([term.double() for term in terms])
        total, ce, kd, equal = sum_over_ranks(sums).tolist()
        return {
            "eval/loss": total,
            "eval/ce_loss": ce,
            "eval/kd_loss": kd,
            "eval/agreement": equal / self._num_tokens,
        }
