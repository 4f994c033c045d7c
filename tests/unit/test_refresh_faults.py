"""Workers that die, hang, fill the disk or write nonsense; and what is tried again."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from pixelrag.retrieval import coordinator
from pixelrag.retrieval.refresh import Refresher
from tests.unit.rag_stand_ins import (
    StandInStore,
    encoded_rows,
    make_recipe,
    vector,
    write_passages,
)
from tests.unit.refresh_rig import ROWS, WEIGHTS, Rig, processes_of, wait_until


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


@pytest.mark.parametrize("error", [0.0, 0.01])
def test_the_training_must_encode_alike(rig: Rig, error: float) -> None:
    """A template or truncation that both of the workers' encodings share shows nowhere else."""
    store = StandInStore(rig.passages)
    rows = np.array([3, 17, 48])
    vectors = np.stack(
        [vector(WEIGHTS, f"{p.title}|{p.text}") for p in map(store.__getitem__, rows)]
    )
    vectors[1] += error * vectors[0]
    rig.witness = rows, vectors
    status = rig.run(rig.refresher(retries=5))
    if not error:
        assert status.state == "published"
        assert rig.generations.open(2).manifest.validation["training_parity"] == 0
        return
    assert (status.state, status.attempt) == ("failed", 1)
    assert "the vector of passage doc-17 differs by 0.01 of its length" in status.reason
    rig.assert_old_in_place()


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


def test_two_coordinators_never_work_on_one_part(rig: Rig, monkeypatch) -> None:
    monkeypatch.setattr(coordinator, "_LOCK_SECONDS", 0.2)
    work = rig.folder / "gen-000002.part" / "work"
    work.mkdir(parents=True)
    second = coordinator._alone(work)
    with coordinator._alone(work), pytest.raises(coordinator.Failed, match="another coordinator"):
        second.__enter__()
