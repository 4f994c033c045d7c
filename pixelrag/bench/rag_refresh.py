"""Steps of the RAG job beside a refresh of its knowledge base, and alone; and how stale it gets.

The job itself runs on a generated catalogue. Refreshes start and end while it trains, so steps
beside one and steps alone alternate in one run; a step during which one started or ended counts as
neither. `age` is the steps since the snapshot that is searched.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from pixelrag.bench.cases import Ready, row_of
from pixelrag.bench.rows import Case, Row
from pixelrag.bench.timing import Taken
from pixelrag.config.base import load
from pixelrag.config.bench import RefreshConfig
from pixelrag.config.rag import RagConfig
from pixelrag.distributed.env import World, choose_device
from pixelrag.distributed.spawn import run_workers

SUITE = "rag-refresh"
_TIMEOUT_SECONDS = 1800.0
PHASES = ("alone", "beside")


def groups(config: RefreshConfig) -> list[list[Case]]:
    """Both phases by world."""
    return [[{"world": world, "refresh": p} for p in PHASES] for world in config.work.worlds]


def measure(config: RefreshConfig, cases: Sequence[Case]) -> Iterator[Row]:
    """One run for the phases of a world."""
    world = int(cases[0]["world"])
    device = choose_device(config.run.device, 0)
    with tempfile.TemporaryDirectory() as folder:
        make_material(Path(folder), config)
        payload = {"folder": folder, "config": config.model_dump(mode="json")}
        steps = run_workers(
            "pixelrag.bench.rag_refresh:worker", payload, nproc=world, device=config.run.device,
            timeout_seconds=_TIMEOUT_SECONDS, env={"OMP_NUM_THREADS": str(config.run.threads)},
        )[0]  # fmt: skip
    for case in cases:
        wall, cpu, ages = (
            [step[key] for step in steps if step["phase"] == case["refresh"]]
            for key in ("wall", "cpu", "age")
        )
        if not wall:
            why = "no step was; change --work.steps, --work.every_steps or --work.passages"
            yield Row(SUITE, case, skipped=why)
            continue
        figures = {
            "mean_age_steps": sum(ages) / len(ages),
            "most_age_steps": float(max(ages)),
            "questions_per_second": config.work.global_batch * len(wall) / sum(wall),
        }
        made = Ready(lambda: None, figures=figures.copy)
        yield row_of(SUITE, case, made, Taken(wall, cpu), device)


def make_material(folder: Path, config: RefreshConfig) -> None:
    """A catalogue, an encoder and a reader with drawn weights."""
    from pixelrag.demo.rag_shift import all_words, write_catalogue
    from pixelrag.models.tiny import save_tiny_bert
    from pixelrag.models.tiny_seq2seq import save_tiny_seq2seq

    words, work = all_words(), config.work
    write_catalogue(folder / "new", "new", num_passages=work.passages, num_held_out=1, seed=0)
    sizes = {"hidden_size": work.hidden_size, "num_layers": work.num_layers}
    save_tiny_bert(folder / "encoder", texts=[" ".join(words)], vocab_size=700, **sizes)
    save_tiny_seq2seq(
        folder / "reader", "t5", texts=[" ".join(words)] * 4 + words, vocab_size=3000, **sizes
    )


def worker(world: World, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Train; what each step took, in which phase, and how old the searched vectors were."""
    from pixelrag.train import loop, rag

    config, folder = RefreshConfig(**payload["config"]), Path(payload["folder"])
    torch.set_num_threads(config.run.threads)
    taken: list[dict[str, Any]] = []
    step = loop.Loop._step

    def timed(self: Any, number: int) -> Any:
        switch = self._task._knowledge.switch
        begun = switch.in_flight
        wall, cpu = time.perf_counter(), time.process_time()
        figures = step(self, number)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if begun == switch.in_flight and number >= config.run.warmup:
            phase = PHASES[begun is not None]
            taken.append({"phase": phase, "wall": wall, "cpu": cpu, "age": switch.age(number)})
        return figures

    with mock.patch.object(loop.Loop, "_step", timed):
        rag.train(load(RagConfig, job_flags(config, folder, world))[0], world)
    return taken


def job_flags(config: RefreshConfig, folder: Path, world: World) -> list[str]:
    """The job's command line."""
    work = config.work
    return [
        f"--output_dir={folder / 'run'}",
        f"--question_encoder.name_or_path={folder / 'encoder'}",
        f"--generator.name_or_path={folder / 'reader'}",
        f"--knowledge_base.source={folder / 'new' / 'passages.jsonl'}",
        f"--data.train={folder / 'new' / 'train.jsonl'}",
        "--generator.target_max_length=4",
        f"--retrieval.k={work.k}",
        f"--batch.per_device_batch_size={work.global_batch // world.world_size}",
        f"--optim.max_steps={work.steps}",
        f"--refresh.every_steps={work.every_steps}",
        "--refresh.final_refresh=skip",
        f"--index.factory={work.factory}",
        f"--engine.device={config.run.device}",
        f"--engine.name={'ddp' if world.world_size == 1 else 'fsdp2'}",
        "--logging.every_steps=1000",
        "--checkpoint.save_optimizer=false",
    ]
