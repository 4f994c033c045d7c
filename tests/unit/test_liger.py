"""Liger's kernels: where they go, and that they compute what the plain modules do."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from pixelrag.errors import ModelError
from pixelrag.models import liger
from pixelrag.models.liger import KINDS, apply_liger

NORMS = {"llama": 3, "mistral": 3, "qwen2": 3, "qwen3": 5, "smollm3": 3}
"""Two of the layer, those of queries and keys, and the last."""
TOLERANCE = 2e-5

installed = pytest.mark.skipif(
    not (importlib.util.find_spec("liger_kernel") and importlib.util.find_spec("triton")),
    reason="liger-kernel and triton are not installed (pip install --no-deps liger-kernel triton)",
)


def tiny(kind: str = "qwen3", **settings):
    config = AutoConfig.for_model(
        kind, vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, **settings,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """What `liger_cases.py` found: it takes a process of its own, as Triton must be told early."""
    cases = Path(__file__).with_name("liger_cases.py")
    done = subprocess.run(
        [sys.executable, cases, tmp_path_factory.mktemp("liger")],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@installed
class TestKernels:
    """Interpreted on the CPU, fp32."""

    @pytest.mark.parametrize("case", [*KINDS, "lora", "checkpointed", "logits"])
    def test_loss_and_gradients_of_packed_rows(self, results, case):
        assert results[case]["error"] < TOLERANCE
        assert results[case]["norms"] < TOLERANCE

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_norm_rotation_and_mlp_has_one_and_no_loss(self, results, kind):
        kernels = results[kind]["launched"]
        assert sum(n for name, n in kernels.items() if "rms_norm" in name) == NORMS[kind]
        assert kernels.pop("_triton_rope") == kernels.pop("_swiglu_forward_kernel") == 1
        assert all("rms_norm" in name for name in kernels)

    def test_another_model_of_the_kind_stays_plain(self, results):
        assert all(not case["plain"] for case in results.values())

    def test_a_teacher_has_its_own_switch(self, results):
        teacher = results["teacher"]
        assert teacher["error"] < TOLERANCE
        assert teacher["launched"]["_triton_rope"] == 1


@installed
class TestPlacing:
    def test_neither_losses_nor_other_models_change(self):
        from transformers.models.qwen3 import modeling_qwen3

        names, cross_entropy = dict(vars(modeling_qwen3)), F.cross_entropy
        model = tiny()
        assert apply_liger(model, "auto", "student", cuda=True)
        assert "forward" in vars(model.model.layers[0].mlp)
        assert model.forward.__func__ is type(model).forward
        assert dict(vars(modeling_qwen3)) == names
        assert F.cross_entropy is cross_entropy
        other = tiny()
        assert all("forward" not in vars(module) for module in other.modules())
        assert {type(module) for module in model.modules()} == {type(m) for m in other.modules()}

    def test_what_is_not_changed_says_why(self, caplog):
        gelu, unknown = tiny(hidden_act="gelu"), tiny("granite")
        assert not apply_liger(tiny(), "off", "student", cuda=True)
        with caplog.at_level(logging.INFO, "pixelrag"):
            assert not apply_liger(tiny(), "auto", "student", cuda=False)
            assert not apply_liger(gelu, "auto", "teacher", cuda=True)
            assert not apply_liger(unknown, "auto", "student", cuda=True)
        assert [record.getMessage() for record in caplog.records] == [
            "student: no Liger kernels (it needs CUDA)",
            "teacher: no Liger kernels (its MLPs know SiLU only, and the model has gelu)",
            "student: no Liger kernels (it has not been tried with GraniteForCausalLM (granite))",
        ]
        for model in (gelu, unknown):
            assert all("forward" not in vars(module) for module in model.modules())
            with pytest.raises(ModelError, match=r"student\.liger on: .* Set student\.liger to"):
                apply_liger(model, "on", "student", cuda=True)


def test_without_the_package(monkeypatch, caplog):
    model = tiny()
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, "pixelrag"):
        assert not apply_liger(model, "auto", "student", cuda=True)
    assert len(caplog.records) == 1
    with pytest.raises(ModelError, match="pip install liger-kernel"):
        apply_liger(model, "on", "teacher", cuda=True)


def test_a_compiled_layer_finds_the_other_rotation():
    """The compiler looks names up its own way; here with a rotation that shows."""
    model = tiny().eval()
    attention, ids = model.model.layers[0].self_attn, torch.arange(12)[None]

    def unturned(q, k, cos, sin, unsqueeze_dim=1):
        return 2 * q, k

    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        attention.forward = liger._with_rotary(type(attention).forward, unturned).__get__(attention)
        expected = model(ids, use_cache=False).logits
        model.model.layers[0].compile(backend="eager", fullgraph=True)
        got = model(ids, use_cache=False).logits
    assert not torch.allclose(plain, expected)
    assert torch.allclose(got, expected)
