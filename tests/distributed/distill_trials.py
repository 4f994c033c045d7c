"""One distillation run on tiny models, and what it logged."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pixelrag.config.base import load
from pixelrag.config.distill import DistillConfig
from pixelrag.config.distill_parts import TeacherConfig
from pixelrag.distributed.collectives import from_main
from pixelrag.distributed.env import World

WORDS = ("quick", "brown", "fox", "jumps", "over", "lazy", "dog", "search", "engine", "documents")


def make_material(folder: Path) -> None:
    """A teacher, students of two kinds, and chats of very unlike lengths."""
    from pixelrag.models.tiny_causal import save_tiny_causal

    save_tiny_causal(folder / "teacher", "llama", padded_rows=4, hidden_size=48, seed=1)
    save_tiny_causal(folder / "tied", "qwen3", padded_rows=9, num_layers=3, seed=2)
    save_tiny_causal(folder / "untied", "llama", padded_rows=2, num_layers=3, tied=False, seed=3)
    draw = random.Random(0)
    with (folder / "chats.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(48):
            messages = []
            for _ in range(draw.choice([1, 1, 2])):
                for role, most in (("user", 9), ("assistant", draw.choice([6, 12, 30]))):
                    text = " ".join(draw.choices(WORDS, k=draw.randint(1, most)))
                    messages.append({"role": role, "content": text})
            file.write(json.dumps({"messages": messages}) + "\n")


def run(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Train; return the figures of each step, of the evaluation, and the exported student's.

    Args:
        world: this process's place.
        case: `folder` of the material, `name` of the run, `student` and further `flags`; `cache`,
            arguments of a cache to write first and to learn from; `serve`, a codec in which a
            thread serves the teacher; `stop_at`, a step to end at and to go on from.
    """
    from pixelrag.train.distill import train

    folder = Path(case["folder"])
    output = folder / f"run-{case['name']}"
    from_main(lambda: shutil.rmtree(output, ignore_errors=True))
    defaults = [
        f"--output_dir={output}",
        f"--student.name_or_path={folder / case.get('student', 'tied')}",
        f"--teacher.name_or_path={folder / 'teacher'}",
        f"--data.train={folder / 'chats.jsonl'}",
        "--data.eval_samples=8",
        "--packing.length=96",
        "--batch.per_device_batch_size=2",
        "--loss.chunk_size=7",
        "--optim.learning_rate=1e-3",
        "--optim.scheduler=constant",
        "--optim.warmup_ratio=0",
        "--optim.max_steps=3",
        "--logging.every_steps=1",
        "--engine.device=cpu",
    ]
    config, _ = load(DistillConfig, [*defaults, *case.get("flags", [])])
    server = None
    if "cache" in case:
        config = _cached(config, world, folder / f"cache-{case['name']}", case["cache"])
    if "serve" in case:
        config, server = _served(config, world, case["serve"])
    if "stop_at" in case:
        part = config.optim.model_copy(update={"max_steps": case["stop_at"]})
        train(config.model_copy(update={"optim": part}), world)
    train(config, world)
    if server is not None:
        server.close()
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    names = ("train/loss", "train/ce_loss", "train/kd_loss", "train/grad_norm")
    found = {name: [line[name] for line in steps] for name in names}
    assert [line["step"] for line in steps] == [1, 2, 3]
    held_out = next(line for line in reversed(lines) if "eval/loss" in line)
    return found | {name: [value] for name, value in held_out.items() if name != "step"}


def _cached(
    config: DistillConfig, world: World, folder: Path, arguments: dict[str, Any]
) -> DistillConfig:
    from pixelrag.train.cache_answers import write

    from_main(lambda: shutil.rmtree(folder, ignore_errors=True))
    write(config, world, folder, **arguments)
    source = "cache" if arguments["kind"] == "top_k" else "hidden_states"
    return config.model_copy(update={"teacher": TeacherConfig(source=source, path=str(folder))})


def _served(config: DistillConfig, world: World, codec: str) -> tuple[DistillConfig, Any]:
    """Serve from a thread of rank 0."""
    # A path of its own: that of a Unix socket may have about a hundred characters.
    address = from_main(lambda: str(Path(tempfile.mkdtemp()) / "teacher"))
    server = None
    if world.rank == 0:
        server = _server(config, world, address, codec)
        threading.Thread(target=server.serve, daemon=True).start()
    dist.barrier()
    remote = TeacherConfig(source="remote", path=address)
    return config.model_copy(update={"teacher": remote}), server


def _server(config: DistillConfig, world: World, address: str, codec: str) -> Any:
    from pixelrag.models.causal_load import load_frozen, load_tokenizer, student_source
    from pixelrag.models.teacher import LiveTeacher
    from pixelrag.models.teacher_channel import Greeting, TeacherServer
    from pixelrag.train.distill_models import agree_on_models
    from pixelrag.train.serve_teacher import build_server

    if world.world_size == 1:
        return build_server(config, world, address, codec)
    # `pixelrag teacher` is one process; loading there agrees with itself alone.
    contract = agree_on_models(config, load_tokenizer(student_source(config.student)))
    cpu = world.device
    teacher = LiveTeacher(load_frozen(config.teacher), device=cpu, student_device=cpu)
    greeting = Greeting(
        teacher="teacher", dtype="float32", vocab_size=contract.vocab_size,
        vocabulary=contract.vocabulary, codec=codec, isolated=True, logit_scale=1.0, soft_cap=None,
    )  # fmt: skip
    return TeacherServer(teacher, greeting, address)
