"""DeepSpeed's config: nothing left to its defaults, no contradiction, all mistakes at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pixelrag.engine.ds_config import read_ds_config, resolve
from pixelrag.errors import ConfigError


def _resolve(user: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "stage": 2,
        "world_size": 4,
        "bf16": False,
        "per_chunk": False,
        "resident": True,
        "offload_optimizer": False,
        "num_trained": 10_000,
        "source": "zero.json",
    }
    return resolve(user, **(defaults | options))


def _problems(user: dict[str, Any], **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        _resolve(user, **options)
    first, *lines = str(caught.value).splitlines()
    assert first == f"zero.json contradicts the job's config in {len(lines)} places:"
    return [line.strip() for line in lines]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("offload_optimizer", [False, True])
@pytest.mark.parametrize("per_chunk", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_habit_is_written_out(
    stage: int, per_chunk: bool, offload_optimizer: bool, bf16: bool
) -> None:
    config = _resolve(
        stage=stage, per_chunk=per_chunk, offload_optimizer=offload_optimizer, bf16=bf16
    )
    assert config["gradient_clipping"] == 0.0  # DeepSpeed's default is 1.0
    assert config["gradient_accumulation_steps"] == 1
    assert config["train_micro_batch_size_per_gpu"] == 1
    assert config["train_batch_size"] == 4
    assert config["zero_force_ds_cpu_optimizer"] is False  # its CPU Adam needs a compiler
    assert config["zero_allow_untested_optimizer"] is True
    assert config["zero_optimization"]["stage"] == stage
    assert config["torch_autocast"]["enabled"] is bf16
    assert config["torch_autocast"]["lower_precision_safe_modules"] == []
    assert "bf16" not in config  # its gradients are not fp32
    assert "fp16" not in config
    assert "optimizer" not in config
    assert ("offload_optimizer" in config["zero_optimization"]) == offload_optimizer
    managed = not (per_chunk and offload_optimizer and stage >= 2)
    assert config["managed_gradient_accumulation"] is managed
    assert '"auto"' not in json.dumps(config)


@pytest.mark.parametrize("resident", [False, True])
def test_stage_3_keeps_all_parameters_or_none(resident: bool) -> None:
    zero = _resolve(stage=3, resident=resident)["zero_optimization"]
    limit = zero["stage3_param_persistence_threshold"]
    assert limit == zero["stage3_model_persistence_threshold"]
    assert limit > 10**11 if resident else limit == 0


def test_every_auto_is_resolved() -> None:
    user = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "torch_autocast": {"enabled": "auto", "dtype": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "communication_data_type": "auto",
        "zero_optimization": {
            "stage": "auto",
            "overlap_comm": "auto",
            "reduce_bucket_size": "auto",
            "allgather_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "offload_optimizer": {"device": "auto", "pin_memory": "auto"},
        },
    }
    for stage in range(4):
        for offload in (False, True):
            config = _resolve(user, stage=stage, offload_optimizer=offload)
            assert '"auto"' not in json.dumps(config)
            zero = config["zero_optimization"]
            assert zero.get("offload_optimizer") == ({"device": "cpu"} if offload else None)


def test_a_leftover_auto_is_an_error_that_names_its_place() -> None:
    user = {"zero_optimization": {"sub_group_size": "auto"}, "comms_logger": {"verbose": "auto"}}
    assert _problems(user) == [
        'zero_optimization.sub_group_size: "auto" is not resolved by any setting; write a value',
        'comms_logger.verbose: "auto" is not resolved by any setting; write a value',
    ]


@pytest.mark.parametrize("user", [None, {"zero_optimization": {"reduce_bucket_size": "auto"}}])
def test_a_bucket_is_no_larger_than_the_model(user: dict[str, Any] | None) -> None:
    """DeepSpeed allocates it whole: 2 GB of fp32, unless it is told."""
    for num_trained, size in ((10_000, 10_000), (10**9, 5 * 10**8)):
        zero = _resolve(user, num_trained=num_trained)["zero_optimization"]
        assert zero["reduce_bucket_size"] == size


def test_settings_of_the_user_are_kept() -> None:
    user = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000, "overlap_comm": True},
        "comms_logger": {"enabled": False},
    }
    config = _resolve(user)
    assert config["zero_optimization"]["reduce_bucket_size"] == 1000
    assert config["zero_optimization"]["overlap_comm"] is True
    assert config["comms_logger"] == {"enabled": False}
    assert user["zero_optimization"] == {
        "stage": 2,
        "reduce_bucket_size": 1000,
        "overlap_comm": True,
    }


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping: got 1.0, expected 0.0"),
        ({"gradient_accumulation_steps": 8}, "gradient_accumulation_steps: got 8, expected 1"),
        ({"train_batch_size": 64}, "train_batch_size: got 64, expected 4"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage: got 3, expected 2"),
        ({"bf16": {"enabled": True}}, "bf16.enabled: got True, but engine.precision is fp32"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled: got True"),
        ({"fp16": {"enabled": True}}, "fp16: not supported here"),
        ({"optimizer": {"params": {"lr": 1e-3}}}, "optimizer.params: got {'lr': 0.001}"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer.device: got 'cpu', but engine.offload_optimizer",
        ),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation: got False"),
        ({"zero_force_ds_cpu_optimizer": True}, "zero_force_ds_cpu_optimizer: got True"),
        ({"zero_optimization": []}, "zero_optimization: got [], expected an object"),
        ({"torch_autocast": True}, "torch_autocast: got True, expected an object"),
        (
            {"zero_optimization": {"offload_optimizer": "cpu"}},
            "zero_optimization.offload_optimizer: got 'cpu', expected an object",
        ),
    ],
)
def test_a_contradiction_names_the_place_and_both_values(
    user: dict[str, Any], message: str
) -> None:
    (problem,) = _problems(user)
    assert problem.startswith(message)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("gradient_allreduce_op", "sum"),
        ("prescale_gradients", True),
        ("gradient_predivide_factor", 4.0),
        ("communication_data_type", "bf16"),
        ("data_types.grad_accum_dtype", "bf16"),
        ("torch_autocast.lower_precision_safe_modules", ["torch.nn.Linear"]),
        ("zero_optimization.round_robin_gradients", True),
        ("zero_optimization.zero_quantized_gradients", True),
        ("zero_optimization.zero_quantized_weights", True),
        ("zero_optimization.compute_grad_norm", False),
    ],
)
def test_settings_that_would_change_the_gradient_are_refused(path: str, value: Any) -> None:
    *sections, key = path.split(".")
    user = {sections[0]: {key: value}} if sections else {key: value}
    (problem,) = _problems(user)
    assert problem.startswith(f"{path}: got {value!r}, expected ")
    assert "would change the gradient" in problem
    harmless = {sections[0]: {key: None}} if sections else {key: None}
    assert _resolve(harmless)


def test_all_mistakes_are_told_at_once() -> None:
    user = {"gradient_clipping": 1.0, "amp": {"enabled": True}, "zero_optimization": {"stage": 1}}
    problems = _problems(user)
    assert [problem.split(":")[0] for problem in problems] == [
        "zero_optimization.stage",
        "gradient_clipping",
        "amp",
    ]


def test_reading_a_file(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    assert read_ds_config(path) == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n  }', r"zero\.json: not valid JSON: .* at line 2"),
        ("[1, 2]", r"zero\.json: got list, expected an object"),
        (None, r"cannot read .*zero\.json: No such file"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "zero.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_ds_config(path)
