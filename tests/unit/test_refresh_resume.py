"""A run that ended in the middle of a refresh, and what its next process makes of it."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.unit.rag_stand_ins import StandInStore, encoded_rows, vector
from tests.unit.refresh_rig import ROWS, WEIGHTS, Rig, killed_trainer, processes_of, wait_until


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


@pytest.mark.parametrize("left", ["nothing", "shards of the same", "shards of others"])
def test_a_trainer_killed_before_anyone_looked_at_its_snapshot_goes_on_with_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    if left != "nothing":
        killed_trainer(rig, "after encode")
    weights = WEIGHTS if left == "shards of the same" else b"other weights"
    options = {"faults": {"after encode": "hang"}, "flag": str(rig.flag)}
    rig.flag.touch()  # no fault any more
    dead = rig.refresher(encoder_options=options)
    monkeypatch.setattr(dead, "_launch", lambda: None)
    rig.start(dead, 31, weights)
    refresher = rig.refresher(encoder_options=options)
    assert refresher.resume(step=35)
    status = refresher.wait(60)
    assert (status.state, status.generation, status.step) == ("published", 2, 31)
    rig.assert_good(2, weights)
    first = ["doc-0"] if left == "shards of others" else []
    assert encoded_rows(rig.log) == [*first, "doc-0", "doc-20", "doc-40"]


@pytest.mark.parametrize("weights", [WEIGHTS, b"other weights"])
def test_a_trainer_killed_in_its_snapshot_leaves_shards_for_the_same_one(rig: Rig, weights) -> None:
    killed_trainer(rig, "after encode")
    options = {"faults": {"after encode": "hang"}, "flag": str(rig.flag)}
    dead = rig.refresher(encoder_options=options)
    (dead.begin(31) / "weights.safetensors").write_bytes(b"new weights under the old spec")
    refresher = rig.refresher(encoder_options=options)
    assert not refresher.resume(step=35)
    assert rig.generations.numbers() == [1]
    assert rig.run(refresher, weights=weights).state == "published"
    rig.assert_good(2, weights)
    first = [] if weights == WEIGHTS else ["doc-0"]
    assert encoded_rows(rig.log) == [*first, "doc-0", "doc-20", "doc-40"]


@pytest.mark.parametrize("fault", ["", "gone", "torn"])
def test_what_the_training_made_of_passages_is_compared_after_a_kill(rig: Rig, fault: str) -> None:
    """Without it a refresh that was gone on with would be published unchecked."""
    rows = np.arange(0, ROWS, 10)
    texts = [f"{p.title}|{p.text}" for p in map(StandInStore(rig.passages).__getitem__, rows)]
    rig.witness = rows, np.stack([vector(WEIGHTS, text) for text in texts])
    dead = rig.refresher()
    dead._launch = lambda: None
    file = rig.start(dead) / "training.npz"
    if fault:
        file.unlink() if fault == "gone" else file.write_bytes(file.read_bytes()[:-9])
    refresher = rig.refresher()
    assert refresher.resume(step=35)
    status = refresher.wait(60)
    if fault:
        assert status.state == "failed"
        assert "training.npz: missing, or not what the training wrote" in status.reason
        rig.assert_old_in_place()
    else:
        assert status.state == "published"
        assert rig.generations.open(2).manifest.validation["training_parity"] == 0
