"""One distillation run on tiny models, and what it logged."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from pixelrag.config.base import load
from pixelrag.config.distill import DistillConfig
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
        case: `folder` of the material, `name` of the run, `student` and further `flags`.
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
    train(config, world)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    names = ("train/loss", "train/ce_loss", "train/kd_loss", "train/grad_norm")
    found = {name: [line[name] for line in steps] for name in names}
    held_out = next(line for line in reversed(lines) if "eval/loss" in line)
    return found | {name: [value] for name, value in held_out.items() if name != "step"}
