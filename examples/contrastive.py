"""Train a retriever, and search with it. python examples/contrastive.py MODEL ROWS.jsonl OUTPUT"""

import sys

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.parts import ModelConfig
from pixelrag.distributed.env import process_group
from pixelrag.models import load_embedder
from pixelrag.train.contrastive import train


def run(model: str, rows: str, output: str, **more) -> tuple[dict, list[float]]:
    config = ContrastiveConfig(
        output_dir=output,
        model={"name_or_path": model},
        data={"train": [rows], "eval": [rows]},
        optim={"num_epochs": 1},
        **more,
    )
    with process_group(config.engine.device) as world:  # torchrun starts more than this one
        summary = train(config, world)
    embedder, inputs = load_embedder(ModelConfig(name_or_path=f"{output}/last"))
    first, second = embedder.eval()(**inputs.queries(["open a file", "sort a list"])).tolist()
    return summary, [x * y for x, y in zip(first, second, strict=True)]


if __name__ == "__main__":
    print(run(*sys.argv[1:])[0]) if len(sys.argv) == 4 else sys.exit(__doc__)
