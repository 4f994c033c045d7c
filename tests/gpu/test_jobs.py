"""All three jobs on every engine in bf16, and in fp32 against the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import rag_runs
from tests.gpu.conftest import CUDA, Train, cases, gpus_of_faiss, has

ENGINES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
# Sums in another order (TF32 is off unless the user turns it on); 8 bits of mantissa.
ERROR = {"fp32": 1e-3, "bf16": 3e-2}
STEPS = 3

RUNS = [(engine, "bf16") for engine in ENGINES] + [("ddp", "fp32")]


def contrastive(folder: Path) -> list[str]:
    """Flags of a run on texts and tiles."""
    return [
        f"--model.name_or_path={folder / 'model'}",
        f"--data.train={folder / 'train.jsonl'}",
        "--batch.per_device_batch_size=8",
        "--batch.chunk_size=3",
        "--optim.learning_rate=3e-4",
        f"--optim.max_steps={STEPS}",
        "--optim.warmup_steps=0",
        "--optim.warmup_ratio=0",
        "--logging.every_steps=1",
    ]


def distill(folder: Path) -> list[str]:
    """Flags of a packed run."""
    return [
        f"--student.name_or_path={folder / 'tied'}",
        f"--teacher.name_or_path={folder / 'teacher'}",
        f"--data.train={folder / 'chats.jsonl'}",
        "--packing.length=96",
        "--batch.per_device_batch_size=2",
        "--loss.chunk_size=40",
        "--optim.learning_rate=3e-4",
        f"--optim.max_steps={STEPS}",
        "--optim.warmup_ratio=0",
        "--logging.every_steps=1",
    ]


def rag(folder: Path) -> list[str]:
    """Flags of a run that renews its index beside the training."""
    flags = [f for f in rag_runs.flags(folder, folder) if not f.startswith("--output_dir")]
    flags = [f for f in flags if not f.startswith(("--engine.device", "--optim.max_steps"))]
    size = ["--batch.per_device_batch_size=8", f"--optim.max_steps={STEPS}"]
    return [*flags, *size, "--refresh.every_steps=1", "--refresh.deterministic_lag=1"]


JOBS = {"contrastive": contrastive, "distill": distill, "rag": rag}


@pytest.mark.parametrize("run", cases(*RUNS), ids=lambda run: "-".join(run))
@pytest.mark.parametrize("job", list(JOBS))
def test_as_on_the_cpu(train: Train, material, job, run):
    """Losses of all steps, and a gradient that is as long."""
    engine, precision = run
    flags = JOBS[job](material[job])
    reference = train(f"{job}-reference", job, flags, cuda=False)
    options = [f"--engine.name={engine}", f"--engine.precision={precision}"]
    got = train(f"{job}-{engine}-{precision}", job, [*flags, *options])
    for name, error in (("train/loss", ERROR[precision]), ("train/grad_norm", 0.15)):
        expected = reference.series(name)
        assert len(expected) == STEPS
        assert got.series(name) == pytest.approx(expected, rel=error), name
    assert not CUDA or min(got.series("mem/peak_gib")) > 0
    assert (got.output / "last").is_dir()


@pytest.mark.parametrize("job", list(JOBS))
def test_goes_on(train: Train, material, job):
    """From a checkpoint, to the losses of the run that was not interrupted."""
    flags = [*JOBS[job](material[job]), "--checkpoint.every_steps=1", "--checkpoint.keep_last=3"]
    straight = train(f"{job}-straight", job, flags)
    assert len(straight.series("train/loss")) == STEPS
    resumed = train(f"{job}-resumed", job, flags, then=straight)
    assert "step 1 of 3" in resumed.text
    expected = straight.series("train/loss")
    assert resumed.series("train/loss") == pytest.approx(expected, rel=ERROR["fp32"])


# --- kernels ------------------------------------------------------------------------------------


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.skipif(not has("flash_attn"), reason="flash-attn is not installed")
@pytest.mark.parametrize("job", ["contrastive", "distill"])
def test_flash_attention(train: Train, material, job):
    """The kernel is chosen by itself and gives what sdpa, or varlen, gives."""
    flags = [*JOBS[job](material[job]), "--engine.precision=bf16"]
    model = "model" if job == "contrastive" else "student"
    chosen = train(f"{job}-ddp-bf16", job, flags)
    assert "flash_attention_2" in chosen.text
    other = "sdpa" if job == "contrastive" else "varlen"
    plain = train(f"{job}-{other}", job, [*flags, f"--{model}.attention={other}"])
    assert plain.series("train/loss") == pytest.approx(chosen.series("train/loss"), rel=2e-2)


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.skipif(not has("liger_kernel"), reason="liger-kernel is not installed")
def test_liger(train: Train, material):
    flags = [*distill(material["distill"]), "--engine.precision=bf16"]
    chosen = train("distill-ddp-bf16", "distill", flags)
    assert "Liger kernels for RMSNorm, RoPE and SwiGLU" in chosen.text
    without = [*flags, "--student.liger=off", "--teacher.liger=off"]
    plain = train("distill-no-liger", "distill", without)
    assert plain.series("train/loss") == pytest.approx(chosen.series("train/loss"), rel=2e-2)


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_compiled_loss(train: Train, material):
    flags = [*distill(material["distill"]), "--engine.precision=bf16"]
    plain = train("distill-ddp-bf16", "distill", flags)
    compiled = train("distill-compiled", "distill", [*flags, "--loss.compile=true"])
    expected = plain.series("train/loss")
    assert compiled.series("train/loss") == pytest.approx(expected, rel=ERROR["bf16"])


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.skipif(gpus_of_faiss() == 0, reason="the installed FAISS sees no GPU (faiss-gpu)")
@pytest.mark.parametrize("factory", ["Flat", "IVF2,Flat"])
def test_index_on_the_gpu(train: Train, material, factory):
    """Questions find the same passages as on the CPU, before a refresh and after it."""
    flags = [*rag(material["rag"]), f"--index.factory={factory}"]
    on_cpu = train(f"rag-{factory}", "rag", flags, cuda=False)
    got = train(f"rag-{factory}", "rag", [*flags, "--index.device=cuda"])
    expected = on_cpu.series("train/loss")
    assert got.series("train/loss") == pytest.approx(expected, rel=ERROR["fp32"])
    assert got.series("index/generation") == on_cpu.series("index/generation")


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_passages_are_encoded_on_the_gpu(train: Train, material):
    """One GPU for the training and the refresh beside it."""
    flags = [*rag(material["rag"]), "--refresh.devices=cuda:0"]
    assert max(train("rag-refresh", "rag", flags).series("index/generation")) > 0
