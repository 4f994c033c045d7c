"""Refreshes that go well, and all the ways in which they do not."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pixelrag.errors import IndexError_
from pixelrag.retrieval import coordinator, refresh_spec
from pixelrag.retrieval.generations import Generations
from pixelrag.retrieval.hits import exact_search
from pixelrag.retrieval.refresh import Refresher, Status
from tests.unit.rag_stand_ins import (
    DIM,
    StandInStore,
    encoded_rows,
    log_lines,
    make_generation,
    make_recipe,
    vector,
    write_passages,
)

WEIGHTS = b"the weights"
ROWS = 50  # three shards: 20, 20, 10


class Rig:
    """A run's index folder with an old generation, and refreshes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.passages = write_passages(folder / "passages.jsonl", ROWS)
        self.generations = Generations(folder / "index")
        self.log = folder / "encoder.log"
        self.flag = folder / "flag"
        self.refreshers: list[Refresher] = []

    def refresher(self, retries: int = 0, retry_seconds: float = 0.05, **recipe: Any) -> Refresher:
        recipe["encoder_options"] = {"log": str(self.log), **recipe.get("encoder_options", {})}
        made = Refresher(
            self.generations,
            make_recipe(self.passages, **recipe),
            retries=retries,
            retry_seconds=retry_seconds,
        )
        self.refreshers.append(made)
        return made

    def start(self, refresher: Refresher, step: int = 30, weights: bytes = WEIGHTS) -> Path:
        folder = refresher.begin(step)
        (folder / "weights.safetensors").write_bytes(weights)
        refresher.start(folder, step)
        return folder

    def run(self, refresher: Refresher, step: int = 30, weights: bytes = WEIGHTS) -> Status:
        self.start(refresher, step, weights)
        return refresher.wait(60)

    def assert_good(self, number: int, weights: bytes = WEIGHTS) -> None:
        generation = self.generations.open(number)
        generation.verify()
        store = StandInStore(self.passages)
        expected = np.stack([vector(weights, f"{p.title}|{p.text}") for p in store])
        assert (np.asarray(generation.vectors_ND) == expected).all()
        assert generation.ids(range(ROWS)) == store.ids
        queries = expected[:7]
        assert (
            generation.search(queries, 5).rows_Qk == exact_search(expected, queries, 5).rows_Qk
        ).all()

    def assert_old_in_place(self) -> None:
        """Nothing but the old generation is there, and it is whole."""
        left = sorted(p.name for p in self.generations.root.iterdir())
        assert left == ["gen-000001"]
        self.generations.open(1).verify()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    make_generation(rig.generations.root, 1, step=0)
    yield rig
    for refresher in rig.refreshers:
        refresher.close()
    wait_until(lambda: not processes_of(tmp_path))


def processes_of(folder: Path) -> list[int]:
    """Live processes whose command line names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
            zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (OSError, IndexError):
            continue
        inside = entry.name.isdigit() and str(folder).encode() in command
        if inside and not zombie and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


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


@pytest.mark.parametrize("job", ["encode", "after encode", "build", "validate"])
def test_a_killed_worker_is_replaced(rig: Rig, job: str, caplog: pytest.LogCaptureFixture) -> None:
    where = "encoder_options" if "encode" in job else "passage_options"
    fault = {"faults": {job: "kill"}, "flag": str(rig.flag)}
    status = rig.run(rig.refresher(retries=1, **{where: fault}))
    assert (status.state, status.attempt) == ("published", 2)
    rig.assert_good(2)
    # What was finished is not encoded again.
    assert sorted(encoded_rows(rig.log)) == ["doc-0", "doc-20", "doc-40"]
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(told) == 1
    assert "killed by SIGKILL" in told[0]


@pytest.mark.parametrize(
    ("job", "fault"),
    [
        *((job, fault) for job in ("encode", "build", "validate") for fault in ("kill", "raise")),
        ("encode", "full"),
        ("build", "full"),
    ],
)
def test_what_goes_on_failing_ends(rig: Rig, job: str, fault: str, caplog) -> None:
    status = rig.run(rig.refresher(retries=1, passage_options={"faults": {job: fault}}))
    assert (status.state, status.attempt) == ("failed", 2)
    expected = {"kill": "SIGKILL", "full": "File too large", "raise": "something odd"}[fault]
    assert expected in status.reason
    rig.assert_old_in_place()
    assert sum("The training goes on" in r.getMessage() for r in caplog.records) == 1


def test_a_hung_worker_is_killed(rig: Rig) -> None:
    refresher = rig.refresher(
        timeout_seconds=1.5, encoder_options={"faults": {"after encode": "hang"}}
    )
    status = rig.run(refresher)
    assert status.state == "failed"
    assert "no sign of life for" in status.reason
    rig.assert_old_in_place()
    assert not processes_of(rig.folder)


def test_a_slow_worker_is_not(rig: Rig) -> None:
    refresher = rig.refresher(timeout_seconds=1.5, encoder_options={"seconds": 0.7})
    assert rig.run(refresher).state == "published"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"encoder_options": {"faults": {"encode": "nan"}}}, "passage doc-1 is not finite"),
        ({"encoder_options": {"faults": {"encode": "zero"}}}, "passage doc-1 is zero"),
        ({"encoder_options": {"faults": {"encode": "shape"}}}, "[20, 15], expected [20, 16]"),
        ({"encoder_options": {"noise": 0.1}}, "encoded once more differs by"),
        (
            {"index": {"factory": "IVF16,Flat", "nprobe": 1}, "min_recall": 0.999},
            "less than refresh.min_recall 0.999. Raise index.ef_search",
        ),
        ({"index": {"factory": "Banana"}}, "could not parse index string Banana"),
    ],
    ids=["nan", "zero", "shape", "parity", "recall", "factory"],
)  # fmt: skip
def test_what_would_fail_again_is_not_tried_again(rig: Rig, changes, says) -> None:
    status = rig.run(rig.refresher(retries=5, **changes))
    assert (status.state, status.attempt) == ("failed", 1)
    assert says in status.reason
    rig.assert_old_in_place()


def test_the_gates_have_a_measure(rig: Rig) -> None:
    """What the gates refuse above passes where they are set lower."""
    changes = {"index": {"factory": "IVF16,Flat", "nprobe": 1}, "min_recall": 0.05}
    status = rig.run(rig.refresher(parity_tolerance=0.5, encoder_options={"noise": 0.1}, **changes))
    assert status.state == "published"
    validation = rig.generations.open(2).manifest.validation
    assert 0.05 < validation["recall@10"] < 0.999
    assert 0.05 < validation["parity"] < 0.5


def test_passages_that_changed_under_the_run(rig: Rig) -> None:
    refresher = rig.refresher(retries=5)
    write_passages(rig.passages, ROWS, word="other")
    status = rig.run(refresher)
    assert (status.state, status.attempt) == ("failed", 1)
    assert "the passages have changed since the run began: 50 with fingerprint" in status.reason
    rig.assert_old_in_place()


def test_a_disk_without_room(rig: Rig) -> None:
    status = rig.run(rig.refresher(dim=10**12))
    assert status.state == "failed"
    assert "GiB are free" in status.reason
    rig.assert_old_in_place()


def test_a_killed_coordinator_takes_its_workers_along(rig: Rig) -> None:
    options = {"faults": {"after encode": "hang"}, "flag": str(rig.flag)}
    refresher = rig.refresher(retries=1, encoder_options=options)
    rig.start(refresher)
    wait_until(rig.flag.exists)
    assert len(processes_of(rig.folder)) == 2
    os.kill(refresher._process.pid, signal.SIGKILL)
    wait_until(lambda: not processes_of(rig.folder))
    status = refresher.wait(60)
    assert (status.state, status.attempt) == ("published", 2)
    rig.assert_good(2)
    assert sorted(encoded_rows(rig.log)) == ["doc-0", "doc-20", "doc-40"]


def test_a_coordinator_killed_after_the_commit_point_has_published(rig: Rig) -> None:
    refresher = rig.refresher()
    rig.start(refresher)
    process = refresher._process
    wait_until(lambda: rig.generations.path(2).exists())
    process.kill()
    assert refresher.wait(10).state == "published"
    rig.assert_good(2)


def test_a_hung_coordinator_is_killed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pixelrag.retrieval.refresh._SILENT_SECONDS", 0.5)
    refresher = rig.refresher(retries=1)
    rig.start(refresher)
    os.kill(refresher._process.pid, signal.SIGSTOP)
    wait_until(lambda: "no sign of life" in refresher.poll().reason)
    monkeypatch.setattr("pixelrag.retrieval.refresh._SILENT_SECONDS", 60)
    assert refresher.wait(60).state == "published"


def test_back_off_grows(rig: Rig) -> None:
    now = [100.0]
    recipe = make_recipe(rig.passages, passage_options={"faults": {"encode": "raise"}})
    refresher = Refresher(rig.generations, recipe, retries=2, retry_seconds=8, clock=lambda: now[0])
    rig.refreshers.append(refresher)
    rig.start(refresher)
    for attempt, pause in ((1, 8), (2, 16)):
        wait_until(lambda: refresher.poll().state == "waiting")
        assert refresher.status.attempt == attempt
        now[0] += pause - 0.1
        assert refresher.poll().state == "waiting"
        now[0] += 0.2
        assert refresher.poll().state == "encoding"
    wait_until(lambda: refresher.poll().state == "failed")
    assert refresher.status.attempt == 3


def test_the_next_refresh_after_a_failed_one(rig: Rig) -> None:
    options = {"faults": {"encode": "kill"}, "flag": str(rig.flag)}
    refresher = rig.refresher(passage_options=options)
    assert rig.run(refresher).state == "failed"
    status = rig.run(refresher, step=60, weights=b"other")
    assert (status.state, status.generation, status.step) == ("published", 2, 60)
    rig.assert_good(2, b"other")


TRAINER = """
import sys, time
from pathlib import Path
from pixelrag.retrieval.generations import Generations
from pixelrag.retrieval.refresh import Refresher
from tests.unit.rag_stand_ins import make_recipe
folder, log, job, flag = sys.argv[1:]
options = {"faults": {job: "hang"}, "flag": flag}
where = "encoder_options" if "encode" in job else "passage_options"
recipe = {"encoder_options": {"log": log}}
recipe.setdefault(where, {}).update(options)
recipe = make_recipe(Path(folder, "passages.jsonl"), **recipe)
refresher = Refresher(Generations(Path(folder, "index")), recipe)
work = refresher.begin(30)
(work / "weights.safetensors").write_bytes(b"the weights")
refresher.start(work, 30)
time.sleep(1000)
"""


def killed_trainer(rig: Rig, job: str) -> None:
    """A trainer whose worker hangs in a job, killed there."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(rig.folder), str(rig.log), job, str(rig.flag)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        wait_until(rig.flag.exists)
        assert len(processes_of(rig.folder)) == 3  # with coordinator and worker
    finally:
        trainer.kill()
        trainer.wait()


@pytest.mark.parametrize("job", ["encode", "after encode", "build", "validate"])
def test_a_killed_trainer_leaves_no_orphan_and_its_run_goes_on(rig: Rig, job: str) -> None:
    killed_trainer(rig, job)
    wait_until(lambda: not processes_of(rig.folder), seconds=5)
    assert rig.generations.numbers() == [1]
    where = "encoder_options" if "encode" in job else "passage_options"
    options = {"faults": {job: "hang"}, "flag": str(rig.flag)}  # the flag is there: no fault
    refresher = rig.refresher(**{where: options})
    assert refresher.resume(step=35)
    status = refresher.wait(60)
    assert (status.state, status.generation, status.step) == ("published", 2, 30)
    rig.assert_good(2)
    assert sorted(encoded_rows(rig.log)) == ["doc-0", "doc-20", "doc-40"]


def test_a_run_that_goes_back_before_the_snapshot_uses_the_shards_when_it_comes_again(rig) -> None:
    killed_trainer(rig, "after encode")
    options = {"faults": {"after encode": "hang"}, "flag": str(rig.flag)}
    refresher = rig.refresher(encoder_options=options)
    assert not refresher.resume(step=20)
    assert refresher.poll().state == "idle"
    assert rig.run(refresher).state == "published"
    rig.assert_good(2)
    assert encoded_rows(rig.log) == ["doc-0", "doc-20", "doc-40"]


def test_shards_of_other_weights_are_not_used(rig: Rig) -> None:
    killed_trainer(rig, "after encode")
    options = {"faults": {"after encode": "hang"}, "flag": str(rig.flag)}
    refresher = rig.refresher(encoder_options=options)
    assert rig.run(refresher, weights=b"other weights").state == "published"
    rig.assert_good(2, b"other weights")
    assert encoded_rows(rig.log) == ["doc-0", "doc-0", "doc-20", "doc-40"]


def test_leftovers_that_cannot_be_gone_on_with_are_deleted(rig: Rig) -> None:
    root = rig.generations.root
    (root / "gen-000002.part" / "work").mkdir(parents=True)  # no spec: killed in the snapshot
    (root / "gen-000009.part" / "work").mkdir(parents=True)  # of a number that makes no sense
    (root / ".gen-000001.trash").mkdir()
    refresher = rig.refresher()
    assert not refresher.resume(step=100)
    rig.assert_old_in_place()


def test_a_torn_snapshot_is_not_gone_on_with(rig: Rig) -> None:
    killed_trainer(rig, "after encode")
    weights = rig.generations.part(2) / "work" / "weights.safetensors"
    weights.write_bytes(b"the we\0\0\0\0\0")
    assert not rig.refresher().resume(step=100)
    rig.assert_old_in_place()


def test_a_part_that_was_sealed_is_published(rig: Rig) -> None:
    made = rig.refresher()
    rig.run(made)
    os.rename(rig.generations.path(2), rig.generations.part(2))
    (rig.generations.part(2) / "work").mkdir()
    for keep_work in (True, False):
        if not keep_work:
            os.rename(rig.generations.path(2), rig.generations.part(2))
        refresher = rig.refresher()
        assert refresher.resume(step=30)
        assert refresher.wait(20).state == "published"
        rig.assert_good(2)


def test_generations_of_a_future_that_will_not_be_are_deleted(rig: Rig) -> None:
    rig.run(rig.refresher(), step=30)
    refresher = rig.refresher()
    assert not refresher.resume(step=30)
    assert rig.generations.numbers() == [1, 2]
    refresher.resume(step=29)
    rig.assert_old_in_place()


def test_two_coordinators_never_work_on_one_part(rig: Rig, monkeypatch) -> None:
    monkeypatch.setattr(coordinator, "_LOCK_SECONDS", 0.2)
    work = rig.folder / "gen-000002.part" / "work"
    work.mkdir(parents=True)
    second = coordinator._alone(work)
    with coordinator._alone(work), pytest.raises(coordinator.Failed, match="another coordinator"):
        second.__enter__()


def test_index_shards(rig: Rig) -> None:
    assert rig.run(rig.refresher(num_index_shards=3)).state == "published"
    rig.assert_good(2)
    names = rig.generations.open(2).manifest.index_files
    assert names == [f"index-{i}-of-3.faiss" for i in range(3)]


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
