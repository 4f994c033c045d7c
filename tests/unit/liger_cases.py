"""Liger's kernels on the CPU, interpreted: what `test_liger.py` runs in a process of its own.

    TRITON_INTERPRET=1 python tests/unit/liger_cases.py FOLDER

Triton reads the variable when it is imported. Prints a JSON line: of each case the relative error
of the loss and of the gradients, how far their norms' ratio is from 1, and which kernels ran.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl
from transformers import AutoConfig, AutoModelForCausalLM
from triton.language.extra import libdevice
from triton.runtime import interpreter

from pixelrag.config.distill_parts import AdapterConfig, KDLossConfig, StudentConfig, TeacherConfig
from pixelrag.losses.kd import Head, Logits, Projected
from pixelrag.models.causal_load import load_frozen, load_student
from pixelrag.models.distill import DistillModel, Supervision
from pixelrag.models.isolation import check_isolation
from pixelrag.models.liger import KINDS
from pixelrag.models.load import quiet
from pixelrag.models.rows import Rows

VOCAB = 60
LENGTHS = ((5, 1, 6), (8, 4))
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": True,
}  # fmt: skip
LORA = AdapterConfig(enabled=True, r=4, dropout=0.0, target_modules=["q_proj", "gate_proj"])

launched: Counter[str] = Counter()


@triton.jit
def rsqrt(x):
    return tl.math.rsqrt(x)


def prepare_interpreter() -> None:
    """Count launches, and lend the interpreter what only the compiler has: `libdevice.rsqrt`, and
    fp32 scalars in place of float arguments.
    """
    convert, run = interpreter._implicit_cvt, interpreter.GridExecutor.__call__

    def converted(argument):
        if type(argument) is not float:
            return convert(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    def counted(executor, *arguments, **others):
        launched[executor.fn.__name__] += 1
        return run(executor, *arguments, **others)

    libdevice.rsqrt = rsqrt
    interpreter._implicit_cvt = converted
    interpreter.GridExecutor.__call__ = counted


def save(folder: Path, kind: str) -> str:
    torch.manual_seed(1)
    with quiet():
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)).save_pretrained(
            folder
        )
    return str(folder)


def packed() -> Rows:
    positions = [torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS]
    ids = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))
    return Rows.of(ids, torch.stack(positions))


def train(folder: str, liger: str, lora: AdapterConfig | None = None, **options) -> dict:
    """Loss and gradients of a student as a run with a GPU would load it, and what was launched."""
    loss = KDLossConfig(chunk_size=5, implementation=options.pop("implementation", "fused"))
    config = StudentConfig(name_or_path=folder, liger=liger, **options)
    student = load_student(config, lora, cuda=True)
    model = DistillModel(student, loss, vocab_size=VOCAB, half_precision=False)
    rows, generator = packed(), torch.Generator().manual_seed(4)
    taught = torch.arange(0, 23, 2)
    if loss.implementation == "fused":
        hidden, head = (torch.randn(n, 8, generator=generator) for n in (len(taught), VOCAB))
        answer = Projected(hidden, Head(head, None, None))
    else:
        answer = Logits(torch.randn(len(taught), VOCAB, generator=generator))
    lesson = Supervision(taught, rows.input_ids_BT.flatten()[taught + 1], answer, len(taught))
    if lora is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # zero as it comes, and A would have no gradient
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
    launched.clear()
    total = model("student", rows=rows, supervision=lesson).total
    forward = dict(launched)
    total.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"model": model, "loss": total.detach(), "gradients": gradients, "forward": forward}


def compare(folder: str, lora: AdapterConfig | None = None, **options) -> dict[str, object]:
    """The kernels against the plain modules, which are loaded and run after them."""
    got = train(folder, "on", lora, **options)
    expected = train(folder, "off", lora, **options)
    assert got["gradients"].keys() == expected["gradients"].keys()
    pairs = [(got["gradients"][name], g) for name, g in expected["gradients"].items()]
    pairs.append((got["loss"], expected["loss"]))
    return {
        "error": max(((a - b).norm() / b.norm()).item() for a, b in pairs),
        "norms": max(abs((a.norm() / b.norm()).item() - 1) for a, b in pairs),
        "launched": got["forward"],
        "plain": expected["forward"],
    }


def teach(folder: str) -> dict[str, object]:
    """A frozen model's final states, and its self-test, with the kernels."""
    states, counts = {}, {}
    for liger in ("on", "off"):
        teacher = load_frozen(TeacherConfig(name_or_path=folder, liger=liger), cuda=True)
        launched.clear()
        with torch.no_grad():
            states[liger] = teacher.hidden(packed())
            counts[liger] = dict(launched)
            if liger == "on":
                check_isolation(
                    teacher.logits, name="teacher", vocab_size=VOCAB, precision=torch.float32,
                    device=torch.device("cpu"), setting="teacher.attention",
                )  # fmt: skip
    error = (states["on"] - states["off"]).norm() / states["off"].norm()
    return {"error": error.item(), "launched": counts["on"], "plain": counts["off"]}


def main(root: Path) -> None:
    prepare_interpreter()
    folders = {kind: save(root / kind, kind) for kind in KINDS}
    results = {kind: compare(folder) for kind, folder in folders.items()}
    results["lora"] = compare(folders["qwen3"], LORA)
    results["checkpointed"] = compare(folders["qwen3"], gradient_checkpointing=True)
    results["logits"] = compare(folders["llama"], implementation="logits")
    results["teacher"] = teach(folders["qwen3"])
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
