"""The temperature stays in its range on every engine, under steps that push it far out, and back.

CLIP's clamp in place after the step is undone by ZeRO's master weights; a clamp in the forward
alone never lets go again. What is held is the scale that the loss uses; the parameter itself may
pass the border by what momentum still carries.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from pixelrag.distributed.env import World
from pixelrag.engine import build_engine
from pixelrag.losses.temperature import LogitScale, scale_from_log
from tests.distributed.harness import Results, run_cases
from tests.distributed.trials import every_mode

pytestmark = pytest.mark.distributed

MODES = {
    name: mode
    for name, mode in every_mode("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2").items()
    if mode["grad_sync"] == "deferred"  # one backward a step: per_chunk is the same
}
NUM_STEPS = 30
LEARNING_RATE = 0.3  # a log scale moves by about this much in a step


class Scaled(nn.Module):
    """A layer beside the temperature, so that the temperature is not alone in its group."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.logit_scale = LogitScale(temperature)

    def forward(self, role: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(torch.ones(1, 3)).sum(), self.logit_scale()


def adam(named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=LEARNING_RATE, weight_decay=0.0)


def push(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Push the scale over one border for many steps, then back; the scale of every step."""
    return {
        # Descent goes against the gradient: a loss that falls with the scale pushes it up.
        "up": _scales(world, case, temperature=0.07, direction=-1.0),
        # Near the lower border, where the gradient is small and Adam's memory long.
        "down": _scales(world, case, temperature=0.5, direction=1.0),
    }


def _scales(world: World, case: dict[str, Any], temperature: float, direction: float):
    torch.manual_seed(0)
    module = Scaled(temperature)
    engine = build_engine(
        module,
        adam,
        name=case["engine"],
        device=world.device,
        blocks=[module.layer],
        precision=case["precision"],
        grad_sync=case["grad_sync"],
        params=case["params"],
    )
    scales = []
    for step in range(2 * NUM_STEPS):
        sign = direction if step < NUM_STEPS else -direction
        output, log_scale = engine("any")
        scale = scale_from_log(log_scale)
        engine.backward((sign * scale + 0.0 * output).sum() / world.world_size, last=True)
        engine.step()
        scales.append(scale.item())
    return scales


CASES = {
    f"{mode}, {precision}": case | {"precision": precision}
    for mode, case in MODES.items()
    for precision in ("fp32", "bf16")
    if precision == "fp32" or case["params"] == "resident"
}


@pytest.fixture(scope="module")
def results() -> Results:
    return run_cases("tests.distributed.test_temperature_held:push", CASES, nproc=2)


@pytest.mark.parametrize("name", CASES)
def test_the_scale_stays_in_its_range_and_comes_back(results: Results, name: str) -> None:
    for result in results[name]:
        for way, border, first in (("up", 100.0, 1 / 0.07), ("down", 1.0, 2.0)):
            scales = result[way]
            assert scales[0] == pytest.approx(first, rel=1e-6)
            assert min(scales) >= 1.0 - 1e-6
            assert max(scales) <= 100.0 * (1 + 1e-6)
            assert scales[NUM_STEPS // 2 : NUM_STEPS] == pytest.approx([border] * (NUM_STEPS // 2))
            # What momentum carried beyond the border is walked back in a few steps.
            left = [step for step, s in enumerate(scales) if abs(math.log(s / border)) > 0.2]
            assert any(NUM_STEPS < step <= NUM_STEPS + 15 for step in left)


@pytest.mark.parametrize("name", CASES)
def test_every_engine_moves_the_temperature_alike(results: Results, name: str) -> None:
    expected = results["ddp-deferred-resident, fp32"][0]
    for result in results[name]:
        for way in ("up", "down"):
            assert result[way] == pytest.approx(expected[way], rel=1e-5)
