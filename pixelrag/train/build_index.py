"""`pixelrag index`: one generation of a knowledge base, made without training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file

from pixelrag.config.rag import RagConfig
from pixelrag.console import say
from pixelrag.distributed.env import read_ranks
from pixelrag.errors import ConfigError, IndexError_
from pixelrag.retrieval.generation import Generation
from pixelrag.retrieval.generations import Generations
from pixelrag.retrieval.ray_config import on_ray
from pixelrag.retrieval.refresh import Refresher
from pixelrag.retrieval.refresh_spec import WEIGHTS
from pixelrag.train.job import show_log
from pixelrag.train.owner import held
from pixelrag.train.rag_data import load_document_encoder, read_passages
from pixelrag.train.rag_recipe import recipe_for


def main(config: RagConfig, own: Mapping[str, str]) -> int:
    """Make a generation, and say where it is; returns the exit code.

    Args:
        config: as for training; questions, generator and training are not used.
        own: `output`, the folder of generations; a further one is added where there are some.

    Raises:
        ConfigError: no output.
        IndexError_: the generation cannot be made, or another process makes one there.
    """
    if not own.get("output"):
        raise ConfigError("--output: got nothing, expected the folder to write")
    rank = read_ranks()[0]
    show_log(rank)
    if rank == 0:  # its workers do the work: more ranks have nothing to add
        made = build(config, Path(own["output"]))
        recall, k = made.manifest.validation, config.refresh.recall_k
        say(f"{made.path}: {len(made):,} passages, recall@{k} {recall[f'recall@{k}']:.4f}")
    return 0


def build(config: RagConfig, output: Path) -> Generation:
    """Encode the passages with the document encoder as it is, index them, and open the result.

    Finished shards of an interrupted call are used again.

    Raises:
        CheckpointError: another process that lives writes there.
        IndexError_: the generation cannot be made.
    """
    on_ray(config)  # before anything is loaded
    passages = read_passages(config)
    encoder, documents = load_document_encoder(config)
    generations = Generations(output)
    refresh = config.refresh
    with held(output, "--output"), generations.owned():
        refresher = Refresher(
            generations,
            recipe_for(config, passages, encoder, documents),
            retries=refresh.retries,
            retry_seconds=refresh.retry_seconds,
        )
        try:
            folder = refresher.begin(0)
            save_file({n: p.detach() for n, p in encoder.named_parameters()}, folder / WEIGHTS)
            refresher.start(folder, 0, nice=0)
            status = refresher.wait()
        finally:
            refresher.close()
    if status.state != "published":
        raise IndexError_(f"{output}: the generation cannot be made: {status.reason}")
    return generations.open(status.generation)
