"""`pixelrag mine`: from rows and a model to rows with negatives that the trainer reads."""

import json
import os
import signal

import numpy as np
import pytest
import torch

from pixelrag.data.pairs import PairDataset, corpus_of
from tests.train import nursery
from tests.train.material import command, merged, write_jsonl

pytestmark = pytest.mark.distributed


@pytest.fixture
def mined(tmp_path, base):
    """Runs `pixelrag mine`; returns the folder, or how it ended where it is to fail."""

    def _run(name: str, *overrides: dict, nproc: int = 1, fails: bool = False, **options):
        mining = {"num_negatives": 3, "depth": 8, "batch_size": 4, "shard_rows": 10}
        config = merged(base, {"output_dir": str(tmp_path / "x"), "mining": mining}, *overrides)
        words = [*command(tmp_path, config, "mine"), "--output", str(tmp_path / name)]
        ended = nursery.run(words, nproc=nproc, **options)
        return ended if fails else (ended.check(), tmp_path / name)[1]

    return _run


def _files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@torch.no_grad()
def _embedded(model, queries, documents):
    """Vectors, float64: one row at a time, with the model itself."""
    from pixelrag.config.parts import ModelConfig
    from pixelrag.models import load_embedder

    embedder, prepare = load_embedder(ModelConfig(name_or_path=str(model)))
    embedder.eval()
    found = [[embedder(**prepare.queries([q]))[0] for q in queries]]
    found.append([embedder(**prepare.documents([d]))[0] for d in documents])
    return [torch.stack(vectors).double().numpy() for vectors in found]


def test_negatives_are_those_of_a_plain_search(mined, shelf, tmp_path):
    folder = mined("out")
    before = PairDataset(shelf / "train.jsonl")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    corpus = corpus_of(before)
    queries_QD, docs_ND = _embedded(shelf / "bert", [row.query for row in before], corpus)
    for i, (row, old) in enumerate(zip(rows, before, strict=True)):
        scores = docs_ND @ queries_QD[i]
        order = [corpus[j] for j in np.argsort(-scores, kind="stable")[:8]]
        expected = [document.text for document in order if document != old.positive][:3]
        assert row["neg_passages"] == expected
        assert row["query"] == old.query
        assert row["passage"] == old.positive.text
        by_text = {document.text: score for document, score in zip(corpus, scores, strict=True)}
        assert row["neg_scores"] == pytest.approx([by_text[t] for t in expected], abs=2e-6)
        assert row["positive_score"] == pytest.approx(by_text[row["passage"]], abs=2e-6)
        texts = [document.text for document in order]
        assert row["neg_ranks"] == [texts.index(t) + 1 for t in expected]
        rank = texts.index(row["passage"]) + 1 if row["passage"] in texts else None
        assert row["positive_rank"] == rank
    manifest = json.loads((folder / "mined.json").read_text())
    assert manifest["figures"]["rows"] == 26
    assert manifest["figures"]["negatives"] == 78
    # The trainer takes them, and other keys than ours stay.
    again = PairDataset(folder / "train.jsonl")
    assert [len(row.negatives) for row in again] == [3] * 26
    assert not (folder / "work").exists()


def test_tiles_of_several_files_are_found_from_their_new_place(mined, shelf, tmp_path):
    rows = [json.loads(line) for line in (shelf / "mixed.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows):
        row["source_dataset"] = f"set {i}"
    write_jsonl(shelf / "more.jsonl", rows[:5])
    (shelf / "deep").mkdir(exist_ok=True)
    for row in rows[5:]:
        if "chunk_path" in row:
            row["chunk_path"] = f"../{row['chunk_path']}"
        row.pop("neg_chunk_paths", None)
    write_jsonl(shelf / "deep" / "more.jsonl", rows[5:])
    data = {"train": [str(shelf / "more.jsonl"), str(shelf / "deep" / "more.jsonl")]}
    vision = {"model": {"name_or_path": str(shelf / "qwen3_vl")}, "data": data}
    folder = mined("out", vision, nproc=2)
    files = [folder / shelf.name / "more.jsonl", folder / "deep" / "more.jsonl"]
    old = PairDataset(data["train"])
    new = PairDataset(files, image_roots=[str(shelf)])
    assert [row.sample_id for row in old][:5] == [
        f"{shelf.name}/more.jsonl:{i}" for i in range(1, 6)
    ]
    by_query = {row.query: row for row in new}
    for row in old:
        assert by_query[row.query].positive == row.positive
        assert by_query[row.query].negatives
        assert row.positive not in by_query[row.query].negatives
    kept = [json.loads(line) for path in files for line in path.open()]
    assert {row["source_dataset"] for row in kept} == {f"set {i}" for i in range(len(rows))}


def test_a_killed_run_goes_on_and_ends_alike(mined, tmp_path):
    """Killed twice, on one process and on two; finished shards are not encoded again."""
    whole = mined("whole")
    setup = "tests.train.faults:kill_in_encode"
    ended = mined("cut", fails=True, setup=setup, payload={"call": 3})
    assert ended.codes == [-signal.SIGKILL]
    work = tmp_path / "cut" / "work"
    first = {name: os.stat(work / name).st_mtime_ns for name in sorted(os.listdir(work))}
    assert list(first) == ["document-00000.npy", "document-00001.npy", "plan.json"]
    mined("cut", fails=True, setup=setup, payload={"call": 4}, nproc=2)
    for name, stamp in first.items():
        assert os.stat(work / name).st_mtime_ns == stamp, f"{name} was written again"
    assert len(os.listdir(work)) > len(first)
    assert _files(mined("cut", nproc=2)) == _files(whole)
    before = _files(whole)
    mined("whole")
    assert _files(whole) == before


def test_an_hnsw_index_is_the_same_every_time(mined):
    index = {"index": {"factory": "HNSW8", "ef_search": 32}}
    assert _files(mined("one", index)) == _files(mined("two", index, nproc=2))


def test_a_corpus_of_its_own(mined, shelf, tmp_path):
    path = write_jsonl(
        tmp_path / "corpus.jsonl", [{"id": str(i), "text": f"the list {i}"} for i in range(5)]
    )
    folder = mined("out", {"mining": {"corpus": path, "num_negatives": 4}})
    for line in (folder / "train.jsonl").open():
        row = json.loads(line)
        assert len(row["neg_passages"]) == 4
        assert all(text.startswith("the list") for text in row["neg_passages"])
        assert row["positive_rank"] is None
        assert -1 <= row["positive_score"] <= 1


def test_a_folder_of_something_else_is_left_alone(mined, shelf, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.jsonl").write_text("mine")
    ended = mined("out", fails=True)
    assert ended.codes == [5]
    assert "exists and was not mined here" in ended.text
    assert (tmp_path / "out" / "train.jsonl").read_text() == "mine"
    mined("other")
    ended = mined("other", {"mining": {"num_negatives": 2}}, fails=True)
    assert ended.codes == [5]
    assert "mined with other mining" in ended.text
    ended = mined("other", {"model": {"name_or_path": str(shelf / "qwen3_vl")}}, fails=True)
    assert "mined with other weights" in ended.text


def test_settings_that_contradict_are_refused(mined):
    ended = mined("out", {"mining": {"num_negatives": 30, "margin": 0.5}}, fails=True)
    assert ended.codes == [2]
    assert "mining.num_negatives 30 of mining.depth 8" in ended.text
    assert "mining.margin 0.5 while mining.filter is none" in ended.text
