"""The choice of the attention implementation."""

import logging

import pytest

from pixelrag.errors import ModelError
from pixelrag.models.kernels import choose_attention


class Both:
    _supports_sdpa = True
    _supports_flash_attn = True


class Neither:
    _supports_sdpa = False
    _supports_flash_attn = False


GPU = {"cuda": True, "flash_attn": True, "half_precision": True}
CPU = {"cuda": False, "flash_attn": False, "half_precision": False}


@pytest.mark.parametrize(
    ("model_class", "machine", "expected"),
    [
        (Both, GPU, "flash_attention_2"),
        (None, GPU, "flash_attention_2"),
        (Neither, GPU, "eager"),
        (Both, GPU | {"flash_attn": False}, "sdpa"),
        (Both, GPU | {"half_precision": False}, "sdpa"),
        (Both, CPU, "sdpa"),
        (None, CPU, "sdpa"),
        (Neither, CPU, "eager"),
    ],
)
def test_auto(
    model_class: type | None,
    machine: dict[str, bool],
    expected: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "pixelrag"):
        assert choose_attention("auto", model_class, **machine) == expected
    assert len(caplog.records) == 1
    assert expected in caplog.text


@pytest.mark.parametrize("requested", ["eager", "sdpa", "flash_attention_2"])
def test_explicit_wins(requested: str) -> None:
    assert choose_attention(requested, Both, **GPU) == requested


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cuda": False}, "no CUDA device"),
        ({"flash_attn": False}, "flash-attn is not installed"),
        ({"half_precision": False}, "engine.precision to bf16"),
    ],
)
def test_explicit_flash_attention_that_cannot_run(change: dict[str, bool], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        choose_attention("flash_attention_2", Both, **GPU | change)


def test_explicit_request_the_model_does_not_support() -> None:
    with pytest.raises(ModelError, match="Neither does not support it"):
        choose_attention("sdpa", Neither, **CPU)
    with pytest.raises(ModelError, match="Neither does not support it"):
        choose_attention("flash_attention_2", Neither, **GPU)
