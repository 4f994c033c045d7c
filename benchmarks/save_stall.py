"""How long a step border waits for a checkpoint, written beside the training or before it goes on.

    python -m benchmarks.save_stall --folder /where/checkpoints/go

The module is a BERT of which every number is trained, with AdamW's moments: 12 bytes a parameter.
Each engine has two fresh processes; saves of both kinds take turns. The seconds are those that a
run logs as `checkpoint/stall_seconds` and `checkpoint/write_seconds`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel

from benchmarks import common
from pixelrag.bench.memory import MIB
from pixelrag.bench.models import MAX_NORM, adamw
from pixelrag.bench.timing import Spread
from pixelrag.config.base import load
from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.distributed.env import World
from pixelrag.distributed.spawn import run_workers
from pixelrag.engine import build_engine
from pixelrag.gradcache import gradcache_step
from pixelrag.models import Embedder
from pixelrag.models.biencoder import BiEncoder
from pixelrag.train.run_state import RunState
from pixelrag.train.saver import Saver

ENGINES = ("ddp", "zero2", "zero3", "fsdp2")
WORLD_SIZE = 2


def bert(hidden_size: int, num_layers: int) -> BiEncoder:
    """A bi-encoder whose layers have 12 hidden_size^2 numbers each."""
    config = BertConfig(
        vocab_size=500,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        intermediate_size=4 * hidden_size,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    return BiEncoder(Embedder(BertModel(config, add_pooling_layer=False), "mean")).train()


def measure(world: World, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Save with one engine; the target of `run_workers`. Returns a row for each way of saving.

    Args:
        world: this process's place.
        payload: ``engine``, ``hidden_size``, ``num_layers``, ``rounds`` and ``folder``.
    """
    module = bert(payload["hidden_size"], payload["num_layers"])
    blocks = module.encoder.blocks()
    engine = build_engine(
        module, adamw, name=payload["engine"], device=torch.device("cpu"), blocks=blocks
    )
    ids_BT = torch.arange(32).view(4, 8)
    batch = {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT)}
    gradcache_step(engine, [batch], [batch], torch.arange(4))
    engine.step(MAX_NORM)  # AdamW has its moments
    taken = {
        kind: _save(engine, kind == "async", payload) for kind in ("sync", "async")
    }  # the first of each is not measured
    for turn in range(payload["rounds"]):
        for kind in ("sync", "async") if turn % 2 else ("async", "sync"):
            for name, seconds in _save(engine, kind == "async", payload, 1 + turn).items():
                taken[kind].setdefault(name, []).append(seconds)
    return [
        {
            "case": {"engine": payload["engine"], "save": kind},
            "taken": found,
        }
        for kind, found in taken.items()
    ]


def _save(engine: Any, beside: bool, payload: dict[str, Any], step: int = 0) -> dict[str, Any]:
    flags = ["--model.name_or_path=-", "--data.train=-", f"--output_dir={payload['folder']}"]
    flags += [f"--checkpoint.async_save={beside}", "--checkpoint.keep_last=1"]
    config, _ = load(ContrastiveConfig, [*flags, "--optim.max_steps=1"])
    saver = Saver(Path(payload["folder"]), engine, config, lambda _: None)
    saver.save(RunState(step, {}, None, "", []))
    saver.finish()
    figures = saver.figures()
    return {name.removeprefix("checkpoint/"): s for name, s in figures.items()} if step else {}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every engine and write the rows down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.save_stall")
    parser.add_argument("--folder", type=Path, help="where to save; a temporary folder below it")
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5, help="measured saves of each kind")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    common.add_output(parser)
    arguments = parser.parse_args(argv)
    results = common.Results("save_stall", arguments, 1)
    sizes = {"hidden_size": arguments.hidden_size, "num_layers": arguments.num_layers}
    numbers = sum(p.numel() for p in bert(**sizes).parameters())
    state_mib = round(12 * numbers / MIB, 1)
    for engine in arguments.engines:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            payload = {"engine": engine, "rounds": arguments.rounds, "folder": folder, **sizes}
            rows = run_workers(
                "benchmarks.save_stall:measure", payload, nproc=WORLD_SIZE, device="cpu"
            )[0]
        for row in rows:
            stall = row["taken"]["stall_seconds"]
            figures = {"write_seconds": Spread.of(row["taken"]["write_seconds"]).p50}
            figures |= {"state_mib": state_mib, "ranks": WORLD_SIZE}
            results.add(row["case"], seconds=Spread.of(stall), repeats=len(stall), figures=figures)


if __name__ == "__main__":
    main()
