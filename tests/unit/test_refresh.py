"""Refreshes that go well: what they publish, and that nothing waits for them."""

from __future__ import annotations

import json
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pixelrag.errors import IndexError_
from pixelrag.retrieval import refresh_spec
from tests.unit.rag_stand_ins import (
    DIM,
    StandInStore,
    encoded_rows,
    log_lines,
    make_generation,
    make_recipe,
)
from tests.unit.refresh_rig import ROWS, WEIGHTS, Rig, wait_until


def test_a_refresh_is_published(rig: Rig) -> None:
    refresher = rig.refresher(devices=["cpu", "cpu"])
    assert refresher.poll().state == "idle"
    assert not refresher.status.busy
    status = rig.run(refresher)
    assert (status.state, status.generation, status.step) == ("published", 2, 30)
    assert (status.attempt, status.reason) == (1, "")
    rig.assert_good(2)
    manifest = rig.generations.open(2).manifest
    assert manifest.step == 30
    assert manifest.validation["recall@10"] == 1.0
    assert manifest.validation["parity"] == 0.0
    assert manifest.validation["min_norm"] == pytest.approx(1, abs=1e-5)
    assert manifest.fingerprints["passages"] == StandInStore(rig.passages).fingerprint
    assert len(manifest.fingerprints["weights"]) == 64
    assert sorted(p.name for p in rig.generations.path(2).iterdir()) == [
        "ids.npz", "index.faiss", "manifest.json", "metadata.npz", "summary.json", "vectors.npy",
    ]  # fmt: skip
    # Two workers: each passage once, none twice.
    assert sorted(encoded_rows(rig.log)) == ["doc-0", "doc-20", "doc-40"]
    assert len({line["pid"] for line in log_lines(rig.log) if "pid" in line}) == 2


def test_pixelrags_server_finds_what_it_mounts(rig: Rig) -> None:
    rig.run(rig.refresher())
    folder = rig.generations.path(2)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["backend"] == "faiss"
    assert (summary["total_vectors"], summary["dimension"]) == (ROWS, DIM)
    with np.load(folder / "metadata.npz") as file:
        assert file["article_ids"].tolist() == list(range(ROWS))
        assert {name: len(file[name]) for name in file.files} == dict.fromkeys(
            ("article_ids", "tile_indices", "chunk_indices", "y_offsets", "tile_heights"), ROWS
        )


def test_starting_and_polling_do_not_wait(rig: Rig) -> None:
    refresher = rig.refresher(encoder_options={"faults": {"encode": "hang"}})
    folder = refresher.begin(30)
    (folder / "weights.safetensors").write_bytes(WEIGHTS)
    before = time.perf_counter()
    refresher.start(folder, 30)
    assert time.perf_counter() - before < 1.0
    wait_until(lambda: refresher.poll().of == 3)
    times = []
    for _ in range(200):
        before = time.perf_counter()
        refresher.poll()
        times.append(time.perf_counter() - before)
    assert statistics.median(times) < 1e-3
    assert refresher.status.state == "encoding"


def test_workers_stand_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    rig.run(rig.refresher(nice=2, threads=3))
    (line,) = [line for line in log_lines(rig.log) if "pid" in line]
    assert line["nice"] == 2
    assert line["group_nice"] in (None, "2")
    assert line["threads"] == "3"
    assert line["rank"] is None
    assert line["session"] == line["pid"]


def test_one_refresh_at_a_time(rig: Rig) -> None:
    refresher = rig.refresher(encoder_options={"faults": {"encode": "hang"}})
    rig.start(refresher)
    with pytest.raises(IndexError_, match="generation 2 is being made"):
        refresher.begin(40)


def test_a_start_needs_its_snapshot(rig: Rig) -> None:
    refresher = rig.refresher()
    with pytest.raises(IndexError_, match="without begin"):
        refresher.start(rig.folder, 30)
    folder = refresher.begin(30)
    with pytest.raises(IndexError_, match="save the snapshot first"):
        refresher.start(folder, 30)
    with pytest.raises(IndexError_, match="not started"):
        refresher.wait(5)
    refresher.fail("the disk is full")
    assert refresher.status.state == "failed"
    rig.assert_old_in_place()


def test_index_shards(rig: Rig) -> None:
    assert rig.run(rig.refresher(num_index_shards=3)).state == "published"
    rig.assert_good(2)
    names = rig.generations.open(2).manifest.index_files
    assert names == [f"index-{i}-of-3.faiss" for i in range(3)]
    # PixelRAG's server reads one index file: it must not take this for something to mount.
    there = {p.name for p in rig.generations.path(2).iterdir()}
    assert there == {"ids.npz", "manifest.json", "vectors.npy", *names}


def test_vectors_that_are_there_are_not_made_again(rig: Rig) -> None:
    first = rig.refresher(index={"factory": "HNSW8"})
    rig.run(first)
    encoded = encoded_rows(rig.log)
    # Of the same kind: index files as well. Of another: the vectors.
    for number, index in ((3, {"factory": "HNSW8"}), (4, {"factory": "Flat"})):
        refresher = rig.refresher(index=index)
        folder = refresher.begin(30)
        (folder / "weights.safetensors").write_bytes(WEIGHTS)
        refresher.start(folder, 30, like=rig.generations.path(2))
        assert refresher.wait(60).state == "published"
        found, source = rig.generations.open(number).manifest, rig.generations.open(2).manifest
        assert found.validation["vectors from"] == str(rig.generations.path(2))
        assert (found.files["index.faiss"] == source.files["index.faiss"]) == (number == 3)
        rig.assert_good(number)
    assert encoded_rows(rig.log) == encoded


def test_a_run_that_begins_anew_uses_what_another_left_where_it_is_the_same(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.run(rig.refresher())

    def begin(weights: bytes, **recipe: Any) -> str:
        refresher = rig.refresher(**recipe)
        folder = refresher.begin(0)
        (folder / "weights.safetensors").write_bytes(weights)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="pixelrag"):
            refresher.start(folder, 0, earlier=True)
        assert refresher.wait(60).state == "published"
        return caplog.text

    encoded = encoded_rows(rig.log)
    assert f"{rig.generations.path(2)}: of the same passages, weights" in begin(WEIGHTS)
    rig.assert_good(3)
    assert encoded_rows(rig.log) == encoded
    # Another index over the same vectors, of a generation that is not the newest.
    make_generation(rig.generations.root, 4)
    assert f"{rig.generations.path(3)}: of the same" in begin(WEIGHTS, index={"factory": "HNSW8"})
    rig.assert_good(5)
    assert encoded_rows(rig.log) == encoded
    said = begin(b"other")
    assert f"{rig.generations.path(5)}, of an earlier run, is not used: other weights." in said
    rig.assert_good(6, b"other")
    # What is damaged is said to be, and passed over.
    with open(rig.generations.path(6) / "vectors.npy", "r+b") as file:
        file.seek(-4, 2)
        file.write(b"flip")
    assert "Passed over" in begin(b"other")
    rig.assert_good(7, b"other")


def test_vectors_of_something_else_are_refused(rig: Rig) -> None:
    rig.run(rig.refresher())
    refresher = rig.refresher(fingerprints={"passages": "p"})
    folder = refresher.begin(30)
    (folder / "weights.safetensors").write_bytes(b"other")
    refresher.start(folder, 30, like=rig.generations.root)  # the newest there
    assert refresher.status.state == "failed"
    reason = refresher.status.reason
    assert reason.startswith(f"{rig.generations.path(2)} does not belong to this run:\n  passages")
    assert "\n  weights: it has " in reason
    assert reason.endswith("leave index.start_from out")
    assert rig.generations.parts() == []


def test_the_seal_covers_what_decides_the_result(rig: Rig) -> None:
    base = make_recipe(rig.passages)
    same = make_recipe(rig.passages, generation=4, step=9, nice=1, timeout_seconds=1.0,
                       devices=["cpu"] * 3)  # fmt: skip
    assert base.seal("w") == same.seal("w")
    for changes in (
        {"shard_rows": 7},
        {"index": {"factory": "HNSW8"}},
        {"min_recall": 0.5},
        {"encoder_options": {"noise": 0.1}},
        {"passage_options": {"flag": "x"}},
        {"fingerprints": {"passages": "other"}},
    ):
        assert make_recipe(rig.passages, **changes).seal("w") != base.seal("w"), changes
    assert base.seal("other") != base.seal("w")


def test_a_spec_survives_its_file(rig: Rig, tmp_path: Path) -> None:
    recipe = make_recipe(rig.passages, devices=["cpu", "cuda:1"])
    recipe.write(tmp_path)
    assert refresh_spec.RefreshSpec.read(tmp_path) == recipe
    (tmp_path / "spec.json").write_text("{}")
    with pytest.raises(IndexError_, match=r"spec\.json: cannot be read"):
        refresh_spec.RefreshSpec.read(tmp_path)
