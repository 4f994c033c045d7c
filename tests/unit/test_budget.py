"""Which modes `auto` chooses from free memory, and that the choice says why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from pixelrag.distributed.env import process_group
from pixelrag.engine import budget
from pixelrag.engine.budget import Modes, choose_modes
from pixelrag.errors import EngineError

GIB = 2**30
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with process_group("cpu"):
        yield


def _model(trained: float = 1.0, frozen: float = 0.0) -> nn.Module:
    """A model of so many GiB of fp32 parameters that take no memory."""
    module = nn.Module()
    with torch.device("meta"):
        module.trained = nn.Parameter(torch.empty(int(trained * GIB / 4)))
        module.frozen = nn.Parameter(torch.empty(int(frozen * GIB / 4)), requires_grad=False)
    return module


def _choose(monkeypatch: pytest.MonkeyPatch, engine: str, free_gib: float, **options) -> Modes:
    monkeypatch.setattr(budget, "_smallest_free_bytes", lambda device: int(free_gib * GIB))
    model = options.pop("model", None) or _model()
    defaults = {"grad_sync": "auto", "params": "auto", "precision": "fp32"}
    return choose_modes(model, engine, CPU, **(defaults | options))


@pytest.mark.parametrize(
    ("engine", "free_gib", "grad_sync", "resident"),
    [
        # Of the free memory 40 % may be taken; whole gradients and parameters are 1 GiB each.
        ("fsdp2", 5.5, "deferred", True),
        ("fsdp2", 4.0, "per_chunk", True),
        ("fsdp2", 2.0, "per_chunk", False),
        ("zero3", 5.5, "deferred", True),
        ("zero3", 4.0, "per_chunk", True),
        ("zero3", 2.0, "per_chunk", False),
        ("zero2", 3.0, "deferred", True),
        ("zero2", 2.0, "per_chunk", True),
        # These hold whole gradients anyway.
        ("ddp", 0.1, "deferred", True),
        ("zero0", 0.1, "deferred", True),
        ("zero1", 0.1, "deferred", True),
    ],
)
def test_auto_takes_what_fits(
    monkeypatch: pytest.MonkeyPatch, engine: str, free_gib: float, grad_sync: str, resident: bool
) -> None:
    modes = _choose(monkeypatch, engine, free_gib)
    assert (modes.grad_sync, modes.resident) == (grad_sync, resident)


def test_frozen_parameters_have_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    lora = _model(trained=0.01, frozen=1.0)
    modes = _choose(monkeypatch, "fsdp2", 2.6, model=lora)
    assert (modes.grad_sync, modes.resident) == ("deferred", True)
    modes = _choose(monkeypatch, "fsdp2", 2.0, model=lora)
    assert (modes.grad_sync, modes.resident) == ("deferred", False)


def test_fsdp2_gathers_half_as_much_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _choose(monkeypatch, "fsdp2", 2.0, precision="fp32").resident
    assert _choose(monkeypatch, "fsdp2", 2.0, precision="bf16").resident
    assert not _choose(monkeypatch, "zero3", 2.0, precision="bf16").resident


@pytest.mark.parametrize("grad_sync", ["deferred", "per_chunk"])
@pytest.mark.parametrize("params", ["resident", "sharded"])
def test_what_is_asked_for_is_done(
    monkeypatch: pytest.MonkeyPatch, grad_sync: str, params: str
) -> None:
    for free_gib in (0.001, 1000.0):
        modes = _choose(monkeypatch, "fsdp2", free_gib, grad_sync=grad_sync, params=params)
        assert (modes.grad_sync, modes.resident) == (grad_sync, params == "resident")
        assert modes.reason.count("asked for") == 2


def test_the_reason_has_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = _choose(monkeypatch, "fsdp2", 4.0).reason
    assert "grad_sync=per_chunk (auto: whole gradients 1.00 GiB)" in reason
    assert "params=resident (auto: whole parameters 1.00 GiB)" in reason
    assert "budget 1.60 GiB of 4.00 GiB free" in reason


@pytest.mark.parametrize("engine", ["ddp", "zero0", "zero1", "zero2"])
def test_an_engine_that_replicates_cannot_shard(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    with pytest.raises(EngineError, match=f"sharded, but {engine} keeps whole parameters"):
        _choose(monkeypatch, engine, 9.0, params="sharded")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grad_sync": "never"}, "engine.grad_sync: got 'never', expected auto, deferred"),
        ({"params": "all"}, "engine.params: got 'all', expected auto, resident"),
    ],
)
def test_unknown_modes(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        _choose(monkeypatch, "fsdp2", 9.0, **options)


def test_ranks_of_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = budget._smallest_free_bytes(CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert 0.1 < budget._smallest_free_bytes(CPU) / whole < 0.5
