"""Train RAG, and ask. python examples/rag.py ENCODER GENERATOR KB.jsonl QUESTIONS.jsonl OUTPUT"""

import sys

from pixelrag.config.rag import RagConfig
from pixelrag.distributed.env import process_group
from pixelrag.train.rag import evaluate, train


def run(encoder: str, generator: str, passages: str, questions: str, output: str, **more) -> tuple:
    config = RagConfig(
        output_dir=output,
        question_encoder={"name_or_path": encoder},
        generator={"name_or_path": generator},
        knowledge_base={"source": passages},
        data={"train": [questions], "eval": [questions]},
        optim={"num_epochs": 1},
        **more,
    )
    parts = {name: {"name_or_path": f"{output}/last/{name}"} for name in PARTS}
    trained = RagConfig(**config.model_dump() | parts)
    with process_group(config.engine.device) as world:  # torchrun starts more than this one
        summary, found = train(config, world), evaluate(trained, world)
    return summary, {one.question.text: one.answer for one in found.answered}


PARTS = ("question_encoder", "generator")
if __name__ == "__main__":
    print(run(*sys.argv[1:])) if len(sys.argv) == 6 else sys.exit(__doc__)
