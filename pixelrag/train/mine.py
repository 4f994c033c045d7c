"""`pixelrag mine`: writes the rows of `data.train` again, with hard negatives that a model finds.

OUTPUT/
  <file>.jsonl      the rows of each file of data.train, with negatives, scores and ranks
  mined.json        what they were mined with, and how many were found; written last
  work/             vectors, index and rows of finished shards; gone once mined.json is there

All ranks encode each shard of documents and queries together, then each searches shards of its own.
The same command goes on where a killed one stopped, on any number of ranks: a shard's content
depends on its rows, the model and the settings alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pixelrag.config.mine import MineConfig
from pixelrag.data.files import files_of
from pixelrag.data.pairs import corpus_of, load_corpus, names_of
from pixelrag.data.schema import Document, PairRow
from pixelrag.distributed.collectives import from_main
from pixelrag.distributed.env import World
from pixelrag.distributed.together import together
from pixelrag.errors import ConfigError, NonFiniteError
from pixelrag.evaluate.pairs import document_length
from pixelrag.models import Embedder, Preprocessor
from pixelrag.retrieval.document_encoder import fingerprints
from pixelrag.retrieval.durable import put, put_text
from pixelrag.retrieval.encode import Encoder, encode
from pixelrag.retrieval.index import build_index, open_index
from pixelrag.retrieval.mining import Miner
from pixelrag.retrieval.recipe import index_settings
from pixelrag.retrieval.refresh_worker import save_vectors
from pixelrag.train.biencoder import build_biencoder
from pixelrag.train.inputs import open_dataset, require_text
from pixelrag.train.job import engine_for, sole_writer, world_of
from pixelrag.train.mine_files import MinedFiles, writing
from pixelrag.train.query_side import Towers, tower_of_model

logger = logging.getLogger("pixelrag")


def main(config: MineConfig, own: Mapping[str, str]) -> int:
    """Mine what ``config`` says into the folder ``own["output"]``; returns the exit code.

    Raises:
        ConfigError: no output.
        CheckpointError: it holds something else, or cannot be written.
    """
    if "output" not in own:
        raise ConfigError("--output: got nothing, expected the folder to write")
    output = Path(own["output"])
    with world_of(config) as world, sole_writer(output, world, "--output"):
        mine(config, output, world)
    return 0


def mine(config: MineConfig, output: Path, world: World) -> None:
    """Mine inside an existing process group; a collective."""
    inputs = from_main(lambda: files_of(config.data.train, "train"))
    dataset = open_dataset(config, inputs)
    path = config.mining.corpus
    if path:
        roots = config.data.image_roots
        corpus = list(from_main(lambda: load_corpus(path, image_roots=roots)).values())
    else:
        corpus = corpus_of(dataset)
    container, preprocessor = build_biencoder(config)
    if not preprocessor.has_vision:
        with together():
            require_text([*dataset, *(PairRow("", (d,), (), f"{path}") for d in corpus)])
    fingerprint = dataset.report.fingerprint
    plan = from_main(lambda: _plan(config, fingerprint, corpus, container.encoder, preprocessor))
    files = MinedFiles(names_of(inputs), output)
    if from_main(lambda: files.begin(plan)):
        logger.info("%s is mined already with the same model, rows and settings", output)
        return
    known = {document.key for document in corpus}
    extra = {r.positive.key: r.positive for r in dataset if r.positive.key not in known}
    # Positives that are not searched stand behind the corpus: their scores are wanted all the same.
    documents = [*corpus, *extra.values()]
    engine = engine_for(config, world, container, container.encoder.blocks())
    tower = tower_of_model(config, world)
    work = _Work(config, files, engine if tower is None else Towers(engine, tower))
    work.encode("document", documents, preprocessor.documents, document_length)
    work.encode("query", [row.query for row in dataset], preprocessor.queries, len)
    from_main(lambda: work.build(len(corpus)))
    with together(), writing(output):
        work.search(documents, len(corpus), dataset.rows)
    figures = from_main(lambda: files.finish(plan, dataset.rows, work.shards_of(dataset.rows)))
    logger.info(
        "%s: %d rows, %.2f negatives a row, %d rows with fewer than %d; the positive was among the "
        "first %d of %.1f %%",
        *(output, figures["rows"], figures["negatives"] / figures["rows"], figures["short_rows"]),
        *(config.mining.num_negatives, config.mining.depth, 100 * figures["positives_found"]),
    )
    if any(document.image is not None for document in corpus):
        logger.info("to train on it, allow its images' folders with data.image_roots")


class _Work:
    """What is done shard by shard and survives a crash."""

    def __init__(self, config: MineConfig, files: MinedFiles, engine: Encoder) -> None:
        self._config = config
        self._files = files
        self._engine = engine
        self._size = config.mining.shard_rows
        self._index_settings = index_settings(config.index)
        self._joined = files.work / "documents.npy"
        self._index = files.work / "index.faiss"

    def shards_of(self, items: Sequence[Any]) -> int:
        """How many shards the items are."""
        return -(-len(items) // self._size)

    def encode(
        self,
        role: str,
        items: Sequence[Any],
        prepare: Callable[[list[Any]], dict[str, torch.Tensor]],
        length: Callable[[Any], int],
    ) -> None:
        """Write the vectors of every shard that are not there; a collective.

        Raises:
            NonFiniteError: a vector holds NaN or infinity.
        """
        shards = range(self.shards_of(items))
        there = from_main(lambda: {i for i in shards if self._vectors(role, i).exists()})
        if there:
            logger.info("%d of %d %s shards are there", len(there), len(shards), role)
        for shard in shards:
            if shard in there:
                continue
            vectors_MD = encode(
                self._engine,
                role,
                self._part(items, shard),
                prepare,
                batch_size=self._config.mining.batch_size,
                length=length,
            )
            with together():
                _require_finite(role, vectors_MD)
            from_main(partial(_put, self._vectors(role, shard), vectors_MD.numpy()))
            logger.info("encoded %s shard %d of %d", role, shard + 1, len(shards))

    def build(self, num_indexed: int) -> None:
        """Join the documents' shards, and index those that are searched. On rank 0."""
        if not self._joined.exists():
            paths = sorted(self._files.work.glob("document-*.npy"))
            _put(self._joined, np.concatenate([np.load(path, mmap_mode="r") for path in paths]))
        if not self._index.exists():
            vectors_ND = np.load(self._joined, mmap_mode="r")[:num_indexed]
            # One thread: several build another HNSW graph every time.
            index = build_index(vectors_ND, self._index_settings, threads=1)
            with writing(self._files.output):
                put(self._index, index.write)

    def search(self, documents: list[Document], num_indexed: int, rows: Sequence[PairRow]) -> None:
        """Mine for this rank's shards of rows."""
        vectors_ND = np.load(self._joined, mmap_mode="r")
        threads = self._config.index.search_threads
        index = open_index(self._index, self._index_settings, threads=threads)
        answers: dict[str, list[Document]] = {}
        for row in rows:
            answers.setdefault(row.query, []).extend(row.positives)
        miner = Miner(documents[:num_indexed], vectors_ND, index, answers, self._config.mining)
        place = {document.key: i for i, document in enumerate(documents)}
        objects = self._files.objects()
        engine = self._engine
        for shard in range(engine.rank, self.shards_of(rows), engine.world_size):
            if self._files.part(shard).exists():
                continue
            part = self._part(rows, shard)
            mined = miner(
                [row.query for row in part],
                [row.positive for row in part],
                np.load(self._vectors("query", shard)),
                vectors_ND[[place[row.positive.key] for row in part]],
            )
            lines = [
                self._files.line(objects[row.sample_id], row, one) + "\n"
                for row, one in zip(part, mined, strict=True)
            ]
            put_text(self._files.part(shard), "".join(lines))

    def _part(self, items: Sequence[Any], shard: int) -> Sequence[Any]:
        return items[shard * self._size : (shard + 1) * self._size]

    def _vectors(self, role: str, shard: int) -> Path:
        return self._files.work / f"{role}-{shard:05d}.npy"


def _plan(
    config: MineConfig,
    data: str,
    corpus: Sequence[Document],
    encoder: Embedder,
    preprocessor: Preprocessor,
) -> dict[str, Any]:
    """All that decides what is mined."""
    inputs = fingerprints(encoder, preprocessor, bf16=config.engine.precision == "bf16")
    inputs["query_instruction"] = preprocessor.query_instruction
    inputs["query_max_length"] = str(preprocessor.query_max_length)
    weights = hashlib.sha256()
    for name, tensor in encoder.state_dict().items():
        weights.update(name.encode())
        weights.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    corpus_keys = "\n".join(document.key for document in corpus)
    return {
        "rows": data,
        "corpus": hashlib.sha256(corpus_keys.encode()).hexdigest(),
        "weights": weights.hexdigest(),
        "inputs": inputs,
        "mining": config.mining.model_dump(mode="json"),
        "index": config.index.model_dump(mode="json", exclude={"search_threads"}),
    }


def _require_finite(role: str, vectors_MD: torch.Tensor) -> None:
    bad = (~torch.isfinite(vectors_MD).all(dim=1)).nonzero().flatten()
    if len(bad):
        raise NonFiniteError(
            f"{len(bad)} of {len(vectors_MD)} {role} vectors hold NaN or infinity; use "
            "engine.precision fp32, or an earlier checkpoint"
        )


def _put(path: Path, vectors_MD: np.ndarray) -> None:
    with writing(path.parent):
        put(path, lambda temporary: save_vectors(temporary, vectors_MD))
