"""Distil a model, and let it write. python examples/distill.py STUDENT TEACHER CHATS.jsonl OUT"""

import sys

from transformers import pipeline

from pixelrag.config.distill import DistillConfig
from pixelrag.distributed.env import process_group
from pixelrag.train.distill import train


def run(student: str, teacher: str, chats: str, output: str, **more) -> tuple[dict, str]:
    config = DistillConfig(
        output_dir=output,
        student={"name_or_path": student},
        teacher={"name_or_path": teacher},
        data={"train": [chats], "eval_samples": 8},
        optim={"num_epochs": 1},
        **more,
    )
    with process_group(config.engine.device) as world:  # torchrun starts more than this one
        summary = train(config, world)
    writer = pipeline("text-generation", f"{output}/last", device="cpu")
    return summary, writer("the quick", max_new_tokens=8)[0]["generated_text"]


if __name__ == "__main__":
    print(run(*sys.argv[1:])) if len(sys.argv) == 5 else sys.exit(__doc__)
