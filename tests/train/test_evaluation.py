"""Held-out figures of a run: those of a plain computation, on any engine."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train import nursery
from tests.train.material import command, lines_of, merged, text_rows, write_jsonl

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="session")
def vision(shelf: Path) -> dict[str, Any]:
    """Seven held-out rows that ask for pictures and texts, out of a corpus of both."""
    rows = [json.loads(line) for line in (shelf / "mixed_eval.jsonl").read_text().splitlines()]
    corpus = [{"id": f"tile {i}", "chunk_path": f"tiles/{i}.png"} for i in range(12)]
    corpus += [
        {"id": f"text {i}", "text": row["passage"]}
        for i, row in enumerate(rows)
        if "passage" in row
    ]
    corpus += [{"id": f"more {i}", "text": row["passage"]} for i, row in enumerate(text_rows(8))]
    write_jsonl(shelf / "corpus.jsonl", corpus)
    return {
        "model": {"name_or_path": str(shelf / "qwen3_vl")},
        "data": {"train": str(shelf / "mixed.jsonl"), "eval": str(shelf / "mixed_eval.jsonl")},
        "batch": {"per_device_batch_size": 6, "chunk_size": 3},
        "optim": {"max_steps": 1, "warmup_steps": 0, "learning_rate": 1e-4},
        "eval": {"batch_size": 3, "corpus": str(shelf / "corpus.jsonl")},
    }


@pytest.fixture
def evaluated(tmp_path, base):
    """Runs a configuration; returns its folder and the last held-out figures."""

    def _run(name: str, *overrides: dict, nproc: int = 1) -> tuple[Path, dict[str, float]]:
        config = merged(base, *overrides, {"output_dir": str(tmp_path / name)})
        config["batch"]["per_device_batch_size"] //= nproc
        nursery.run(command(tmp_path, config), nproc=nproc).check()
        found = [record for record in lines_of(tmp_path / name) if "eval/loss" in record][-1]
        return tmp_path / name, {k: v for k, v in found.items() if k != "step"}

    return _run


def _naive(folder: Path, eval_file: Path, corpus_file: Path | None) -> dict[str, float]:
    """The figures of the exported model: one row at a time, loops and sorting, in float64."""
    from pixelrag.config.parts import ModelConfig
    from pixelrag.data.schema import Document
    from pixelrag.models import load_embedder

    embedder, preprocessor = load_embedder(ModelConfig(name_or_path=str(folder / "last")))
    embedder.eval()

    def embed(inputs: dict[str, torch.Tensor]) -> np.ndarray:
        with torch.no_grad():
            return embedder(**inputs)[0].double().numpy()

    def document(entry: dict[str, str], kind: str) -> tuple[str, np.ndarray]:
        if path := entry.get({"text": "chunk_path", "passage": "chunk_path"}[kind]):
            image = Document.of_image(eval_file.parent / path)
            return str(image.image), embed(preprocessor.documents([image]))
        return entry[kind], embed(preprocessor.documents([Document.of_text(entry[kind])]))

    rows = [json.loads(line) for line in eval_file.read_text().splitlines()]
    queries = [embed(preprocessor.queries([row["query"]])) for row in rows]
    positives = [document(row, "passage") for row in rows]
    named: list[tuple[str, np.ndarray]] = []
    for row, positive in zip(rows, positives, strict=True):
        negatives = [{"passage": text} for text in row.get("neg_passages", [])]
        negatives += [{"chunk_path": path} for path in row.get("neg_chunk_paths", [])]
        named += [positive, *(document(negative, "passage") for negative in negatives)]
    searched = distinct = dict(named)
    if corpus_file is not None:
        entries = [json.loads(line) for line in corpus_file.read_text().splitlines()]
        searched = dict(document(entry, "text") for entry in entries)
    temperature = json.loads((folder / "last" / "pixelrag.json").read_text())["temperature"]
    loss = accuracy = mrr = ndcg = 0.0
    recall = {1: 0.0, 5: 0.0, 10: 0.0}
    for query, (key, vector) in zip(queries, positives, strict=True):
        scores = {name: float(query @ other) for name, other in distinct.items()}
        # As in a batch: what two rows name stands there twice; the positive is never a negative.
        others = [scores[name] for name, _ in named if name != key]
        logits = np.array([scores[key], *others]) / temperature
        loss += np.log(np.exp(logits).sum()) - float(query @ vector) / temperature
        accuracy += all(scores[key] > score for name, score in scores.items() if name != key)
        ranked = sorted(searched, key=lambda name: -float(query @ searched[name]))
        rank = ranked.index(key) + 1
        mrr += 1 / rank
        ndcg += 1 / np.log2(1 + rank) if rank <= 10 else 0.0
        for k in recall:
            recall[k] += rank <= k
    figures = {"loss": loss, "accuracy": accuracy, "mrr": mrr, "ndcg@10": ndcg}
    figures |= {f"recall@{k}": hits for k, hits in recall.items()}
    return {f"eval/{name}": value / len(rows) for name, value in figures.items()}


@pytest.mark.parametrize("with_corpus", [False, True])
def test_text_figures_are_those_of_a_plain_computation(evaluated, shelf, tmp_path, with_corpus):
    eval_file, corpus = tmp_path / "eval.jsonl", None
    rows = text_rows(9, first=40)
    for row in rows[::2]:  # a negative that would win, were it searched
        row["neg_passages"] = [row["query"]]
    write_jsonl(eval_file, rows)
    settings = {"data": {"eval": str(eval_file)}, "eval": {"batch_size": 4}}
    settings["ema"] = {"decay": 0.5}  # of the averaged weights, which are those exported
    if with_corpus:
        texts = [row["passage"] for row in rows + text_rows(26)]
        corpus = tmp_path / "corpus.jsonl"
        write_jsonl(corpus, [{"id": str(i), "text": text} for i, text in enumerate(texts)])
        settings["eval"]["corpus"] = str(corpus)
    folder, alone = evaluated("alone", settings)
    assert alone == pytest.approx(_naive(folder, eval_file, corpus), rel=1e-5)
    assert 0 < alone["eval/recall@1"] < 1, "figures at a limit would hide an error"
    _, two = evaluated("two", settings, nproc=2)
    assert two == pytest.approx(alone, rel=1e-5)


def test_pictures_and_texts_in_one_corpus(evaluated, vision, shelf):
    folder, alone = evaluated("alone", vision)
    expected = _naive(folder, shelf / "mixed_eval.jsonl", shelf / "corpus.jsonl")
    assert alone == pytest.approx(expected, rel=1e-4)
    without = merged(vision, {"eval": {"corpus": None}})
    folder, small = evaluated("small", without)
    assert small == pytest.approx(_naive(folder, shelf / "mixed_eval.jsonl", None), rel=1e-4)
    assert small["eval/mrr"] > alone["eval/mrr"], "a larger corpus is harder"


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"])
def test_sharded_engines_with_an_odd_number_of_batches(evaluated, vision, engine):
    """22 documents in batches of 8 are 3 calls: one rank has pictures to repeat, one has texts."""
    batches = {"eval": {"batch_size": 8}, "engine": {"name": engine}}
    if engine != "ddp":
        batches["engine"]["params"] = "sharded"  # each forward gathers, in step with the others
    _, two = evaluated(engine, vision, batches, nproc=2)
    _, alone = evaluated("alone", vision)
    assert two == pytest.approx(alone, rel=1e-4)


def test_fewer_rows_than_ranks(evaluated, vision, tmp_path, shelf):
    path = write_jsonl(shelf / "one.jsonl", [{"query": "tile 3", "chunk_path": "tiles/3.png"}])
    settings = merged(vision, {"data": {"eval": path}, "engine": {"name": "fsdp2"}})
    _, figures = evaluated("one", settings, {"eval": {"corpus": None}}, nproc=2)
    assert figures["eval/recall@1"] == 1.0
    assert figures["eval/loss"] == pytest.approx(0.0, abs=1e-6)


def test_evaluation_leaves_training_alone(evaluated, shelf, tmp_path):
    """Dropout on: the same losses whether or not there is an evaluation between two steps."""
    plain = {"model": {"name_or_path": str(shelf / "bert_dropout")}, "optim": {"max_steps": 2}}
    plain["ema"] = {"decay": 0.7}  # what is evaluated is not what goes on training
    often = {"data": {"eval": str(shelf / "eval.jsonl")}, "eval": {"every_steps": 1}}
    for engine in ("zero3", "fsdp2"):
        settings = merged(plain, {"engine": {"name": engine}})
        last = {"data": {"eval": str(shelf / "eval.jsonl")}}
        rare, _ = evaluated(f"rare-{engine}", settings, last, nproc=2)
        many, _ = evaluated(f"often-{engine}", settings, often, nproc=2)
        losses = [[r["train/loss"] for r in lines_of(f) if "train/loss" in r] for f in (rare, many)]
        assert losses[0] == losses[1]
        assert sum("eval/loss" in record for record in lines_of(many)) == 2


def test_only_the_first_rows(evaluated, shelf, tmp_path):
    rows = (shelf / "eval.jsonl").read_text().splitlines()
    (tmp_path / "four.jsonl").write_text("\n".join(rows[:4]))
    capped = {"data": {"eval": str(shelf / "eval.jsonl")}, "eval": {"max_rows": 4}}
    _, some = evaluated("some", capped)
    _, four = evaluated("four", {"data": {"eval": str(tmp_path / "four.jsonl")}})
    assert some == four


def test_loss_alone(evaluated, shelf):
    settings = {
        "data": {"eval": str(shelf / "eval.jsonl")},
        "eval": {"retrieval": False},
        "checkpoint": {"best_metric": "eval/loss"},
    }
    _, figures = evaluated("loss", settings)
    assert figures.keys() == {"eval/loss", "eval/accuracy"}
