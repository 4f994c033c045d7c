"""Operations of a step, against arithmetic by hand."""

import pytest
import torch
from transformers import AutoConfig

from pixelrag.config.distill_parts import StudentConfig, TeacherConfig
from pixelrag.models.causal_load import outline
from pixelrag.models.tiny_causal import save_tiny_causal
from pixelrag.train.flops import ModelShape, attention_cost, peak_of

# Qwen3 of width 32: 4 heads and 2 groups of 8 numbers, an inner width of 64, 3 layers.
MATRICES = 2 * 32 * 4 * 8 + 2 * 32 * 2 * 8 + 3 * 32 * 64
NORMS = 2 * 32 + 2 * 8
# Llama of width 48: heads of 12, an inner width of 96, 2 layers.
TEACHER = 2 * 48 * 48 + 2 * 48 * 24 + 3 * 48 * 96


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("flops")
    return {
        "student": save_tiny_causal(root / "s", "qwen3", num_layers=3, padded_rows=9),
        "teacher": save_tiny_causal(root / "t", "llama", hidden_size=48, tied=False),
    }


def test_a_forward_pass(folders):
    student = outline(StudentConfig(name_or_path=str(folders["student"])))
    shape = ModelShape.of(student, vocab_size=500)
    assert shape == ModelShape(3 * (MATRICES + NORMS), 3 * 4 * 8, 500 * 32)
    # Of 7 tokens in documents of 3 and 4, and 5 of them learnt from. A pair of tokens costs a
    # product for the score and one for the value, and half of all pairs are causal.
    by_hand = 2 * (3 * (MATRICES + NORMS) * 7 + 3 * 4 * 8 * (9 + 16) + 500 * 32 * 5)
    assert shape.forward(7, 9 + 16, 5) == by_hand
    assert shape.attention_cost == 3 * 4 * 8 / (3 * (MATRICES + NORMS))


def test_layers_that_are_left_out_cost_nothing(folders):
    config = StudentConfig(name_or_path=str(folders["student"]), num_layers=2)
    shape = ModelShape.of(outline(config), vocab_size=500)
    assert shape == ModelShape(2 * (MATRICES + NORMS), 2 * 4 * 8, 500 * 32)


def test_the_teacher_has_sizes_of_its_own(folders):
    teacher = outline(TeacherConfig(name_or_path=str(folders["teacher"])))
    shape = ModelShape.of(teacher, vocab_size=500)
    assert shape == ModelShape(2 * (TEACHER + 2 * 48), 2 * 48, 500 * 48)


def test_the_cost_of_attention_from_configurations_alone(folders):
    student, teacher = (AutoConfig.from_pretrained(folders[n]) for n in ("student", "teacher"))
    alone = attention_cost(student, None)
    assert alone == pytest.approx(4 * 8 / MATRICES)
    # Three passes of the student, one of the teacher.
    both = (3 * 3 * 4 * 8 + 2 * 48) / (3 * 3 * MATRICES + 2 * TEACHER)
    assert attention_cost(student, teacher) == pytest.approx(both)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 9.89e14),
        ("NVIDIA H100 80GB HBM3", 9.89e14),
        ("NVIDIA H100 PCIe", 7.56e14),
        ("NVIDIA H100 NVL", 8.35e14),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA A100-SXM4-80GB", 3.12e14),
        ("NVIDIA A10G", 7.0e13),
        ("NVIDIA A10", 1.25e14),
        ("NVIDIA L4", 1.21e14),
        ("NVIDIA L40S", 3.62e14),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_peaks_are_those_of_the_very_device(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    cuda = torch.device("cuda", 0)
    assert peak_of(cuda, "bf16") == peak
    assert peak_of(cuda, "fp32") is None
    assert peak_of(torch.device("cpu"), "bf16") is None
