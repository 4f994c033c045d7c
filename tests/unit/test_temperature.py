"""The learnable temperature: its range, its gradient at the borders, its way back."""

import math

import pytest
import torch

from pixelrag.losses.temperature import LogitScale, scale_from_log
from pixelrag.models.biencoder import BiEncoder


def test_starts_at_one_over_the_temperature() -> None:
    module = LogitScale()
    assert scale_from_log(module()).item() == pytest.approx(1 / 0.07, rel=1e-6)
    assert scale_from_log(LogitScale(0.5)()).item() == pytest.approx(2.0, rel=1e-6)


def test_has_the_shape_that_sharding_needs_and_stays_out_of_low_precision() -> None:
    module = LogitScale()
    assert module.log_scale.shape == (1,)
    assert module().shape == (1,)
    assert module.full_precision


def test_is_inside_the_container_and_part_of_every_output() -> None:
    class Encoder(torch.nn.Linear):
        def forward(self, *, touch_vision: bool, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    container = BiEncoder(Encoder(2, 2))
    assert "logit_scale.log_scale" in dict(container.named_parameters())
    _, log_scale = container("query", x=torch.ones(1, 2))
    log_scale.sum().backward()
    assert container.logit_scale.log_scale.grad.item() == 1.0


@pytest.mark.parametrize("temperature", [0.0099, 1.01, 0.0, -1.0, math.nan])
def test_refuses_a_temperature_outside_the_range(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"loss\.temperature: got .*expected 0\.01 to 1"):
        LogitScale(temperature)


def test_fixed_temperature_is_not_trained() -> None:
    assert not LogitScale(learnable=False).log_scale.requires_grad


@pytest.mark.parametrize(
    ("log_scale", "scale"), [(-3.0, 1.0), (0.0, 1.0), (1.0, math.e), (9.0, 100.0)]
)
def test_the_scale_never_leaves_its_range(log_scale: float, scale: float) -> None:
    value = torch.tensor([log_scale], dtype=torch.float64)
    assert scale_from_log(value).item() == pytest.approx(scale, rel=1e-12)


def _gradient(log_scale: float, push: float) -> float:
    """Gradient of ``push * scale`` with respect to the logarithm."""
    leaf = torch.tensor([log_scale], dtype=torch.float64, requires_grad=True)
    (push * scale_from_log(leaf)).sum().backward()
    return leaf.grad.item()


def test_inside_the_range_the_gradient_is_that_of_exp() -> None:
    assert _gradient(2.0, 1.0) == pytest.approx(math.exp(2.0))
    assert _gradient(2.0, -3.0) == pytest.approx(-3.0 * math.exp(2.0))


@pytest.mark.parametrize("beyond", [0.0, 2.0])
def test_outside_the_range_only_the_way_back_is_open(beyond: float) -> None:
    above, below = math.log(100.0) + beyond, -beyond
    # Descent goes against the gradient: a loss that falls with the scale pushes it up.
    assert _gradient(above, -1.0) == 0.0
    assert _gradient(above, 1.0) == pytest.approx(100.0)
    assert _gradient(below, 1.0) == 0.0
    assert _gradient(below, -1.0) == pytest.approx(-1.0)
