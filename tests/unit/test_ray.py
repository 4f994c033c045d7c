"""Refreshes and index files on a Ray cluster of this machine, and actors that die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pixelrag
from pixelrag import cli
from pixelrag.config.base import load
from pixelrag.config.rag import RagConfig
from pixelrag.config.yaml_file import write_yaml
from pixelrag.errors import ConfigError, ProvenanceError
from pixelrag.retrieval import ray_actors, ray_config
from pixelrag.retrieval.elsewhere import IndexElsewhere
from pixelrag.retrieval.ray_actors import EncoderActor
from pixelrag.retrieval.refresh_spec import OnRay
from pixelrag.validate.rag import check as validate
from tests.ray_cluster import ray_cluster
from tests.unit.rag_stand_ins import (
    encoded_rows,
    log_lines,
    make_generation,
    make_recipe,
    vector,
    write_passages,
)
from tests.unit.refresh_rig import WEIGHTS, Rig, processes_of, wait_until

ALL_ROWS = ["doc-0", "doc-20", "doc-40"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ray_cluster() as address:
        yield address


def actors(kind: str) -> list[int]:
    """Processes of a kind of actor."""
    return processes_of(Path(f"ray::{kind}"))


def test_actors_make_what_local_workers_make(rig: Rig, address: str) -> None:
    slow = {"encoder_options": {"seconds": 0.3}}
    status = rig.run(rig.refresher(ray=OnRay(address, ["cpu"] * 2), **slow))
    assert (status.state, status.attempt, status.reason) == ("published", 1, "")
    rig.assert_good(2)
    assert sorted(encoded_rows(rig.log)) == ALL_ROWS
    started = [line for line in log_lines(rig.log) if "pid" in line]
    assert len({line["pid"] for line in started}) == 2
    rig.run(rig.refresher())
    here, there = (rig.generations.open(number).manifest for number in (3, 2))
    assert there.files == here.files
    assert there.fingerprints == here.fingerprints
    wait_until(lambda: not actors("EncoderActor"))


def test_a_killed_actor_is_replaced(rig: Rig, address: str, caplog) -> None:
    fault = {"faults": {"after encode": "kill"}, "flag": str(rig.flag)}
    refresher = rig.refresher(ray=OnRay(address, ["cpu"]), retries=1, encoder_options=fault)
    status = rig.run(refresher)
    assert (status.state, status.attempt) == ("published", 2)
    rig.assert_good(2)
    assert sorted(encoded_rows(rig.log)) == ALL_ROWS  # what was finished is not encoded again
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(told) == 1
    assert "encoder on host" in told[0]
    assert "died" in told[0]


def test_a_hung_actor_is_noticed_and_ended(rig: Rig, address: str) -> None:
    hang = {"faults": {"after encode": "hang"}}
    refresher = rig.refresher(
        ray=OnRay(address, ["cpu"]), timeout_seconds=5.0, encoder_options=hang
    )
    status = rig.run(refresher)
    assert status.state == "failed"
    assert "no sign of life for" in status.reason
    rig.assert_old_in_place()
    wait_until(lambda: not actors("EncoderActor"))


def test_a_host_with_another_model_is_found(rig: Rig, address: str) -> None:
    """One passage of each shard is encoded again here, however few that host has encoded."""
    write_passages(rig.passages, 1001)
    other = {"encoder_options": {"foreign": "doc-1000"}}
    status = rig.run(rig.refresher(ray=OnRay(address, ["cpu"]), shard_rows=1000, **other))
    assert status.state == "failed"
    assert "passage doc-1000 encoded once more differs by" in status.reason
    rig.assert_old_in_place()


def test_what_would_fail_again_ends_at_once(rig: Rig, address: str) -> None:
    """Nonsense, from an actor of the threads that were asked for."""
    nonsense = {"encoder_options": {"faults": {"encode": "nan"}}}
    options = {"retries": 5, "threads": 2, **nonsense}
    status = rig.run(rig.refresher(ray=OnRay(address, ["cpu"]), **options))
    assert (status.state, status.attempt) == ("failed", 1)
    assert status.reason.startswith("the vector of passage doc-1 is not finite")
    (started,) = log_lines(rig.log)[:1]
    assert started["threads"] == "2"
    rig.assert_old_in_place()


def test_an_actor_stands_back_and_knows_its_version(rig: Rig, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(ray_actors.os, "setpriority", lambda *call: calls.append(call))
    spec = make_recipe(rig.passages, nice=19).to_json()
    weights = np.frombuffer(WEIGHTS, np.uint8)
    actor = EncoderActor()
    actor.prepare(spec, "cpu", weights, pixelrag.__version__)
    assert calls == [(os.PRIO_PROCESS, 0, 19)]
    assert (actor.encode(2)[3] == vector(WEIGHTS, "T43|passage 43 é")).all()
    with pytest.raises(ProvenanceError, match=r"the training 0\.0; install the same everywhere"):
        EncoderActor().prepare(spec, "cpu", weights, "0.0")


def test_a_cluster_that_is_gone_may_come_back(rig: Rig, address: str) -> None:
    refresher = rig.refresher(ray=OnRay("127.0.0.2:1", ["cpu"]))
    status = rig.run(refresher)
    assert status.state == "failed"
    assert "no Ray cluster can be joined at 127.0.0.2:1 ([Errno 111] Connection" in status.reason


def test_actors_hold_index_files(tmp_path: Path, address: str, caplog) -> None:
    first, second = (make_generation(tmp_path, number, shards=3) for number in (1, 2))
    now = [0.0]
    elsewhere = IndexElsewhere(
        address, 2, threads=1, log=tmp_path / "log", retry_seconds=8, clock=lambda: now[0]
    )
    try:
        queries = np.asarray(first.vectors_ND[:9]) + 0.1
        elsewhere.hold(first)
        first.search(queries, 1)  # what is in use goes on being held
        elsewhere.hold(second)
        here = {g: g.search_here(queries, 60) for g in (first, second)}

        def assert_same() -> None:
            for generation, expected in here.items():
                found = generation.search(queries, 60)
                assert (found.rows_Qk == expected.rows_Qk).all()
                assert (found.scores_Qk == expected.scores_Qk).all()

        with pytest.MonkeyPatch.context() as patch:  # it is the actors who answer
            patch.setattr(type(first), "search_here", None)
            assert_same()
            assert len(actors("HolderActor")) == 2
        os.kill(actors("HolderActor")[0], signal.SIGKILL)
        assert_same()
        (told,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert told.startswith("index actors are lost: OSError: index holder died")
        assert told.endswith("searching here (the next attempt in 8 s)")
        now[0] = 8.1
        first.search(queries, 3)
        wait_until(lambda: elsewhere._lost == 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(first), "search_here", None)
            first.search(queries, 3)
    finally:
        elsewhere.close()
    wait_until(lambda: not actors("HolderActor"))
    assert not processes_of(tmp_path)


def config(*flags: str) -> RagConfig:
    needed = ("--question_encoder.name_or_path=q", "--generator.name_or_path=g")
    needed += ("--knowledge_base.source=kb", "--data.train=t.jsonl", "--optim.max_steps=3")
    return load(RagConfig, [*needed, *flags])[0]


def test_what_a_cluster_has_is_known_at_the_start(address: str) -> None:
    at = f"--ray.address={address}"
    assert ray_config.on_ray(config()) is None
    found = ray_config.on_ray(config(at, "--refresh.workers=ray", "--refresh.num_workers=3"))
    assert found == OnRay(address, ["cpu"] * 3)
    for flags, says in (
        (["--refresh.workers=ray", "--refresh.devices=cuda"], "1 CPUs (refresh.threads) and a GPU"),
        (["--index.holders=ray", "--index.search_threads=9"], "9 CPUs (index.search_threads)"),
    ):
        with pytest.raises(ConfigError) as caught:
            ray_config.on_ray(config(at, *flags))
        assert f"no host of the cluster has {says}; its hosts have 2 CPUs" in str(caught.value)

    both = ["--refresh.workers=ray", "--index.holders=ray", "--index.num_shards=2"]
    with pytest.raises(ConfigError, match="encoder need 3 CPUs at once, the cluster has 2"):
        ray_config.on_ray(config(at, *both))


def test_validate_says_whether_the_cluster_has_room(address: str, tmp_path: Path, capsys) -> None:
    """Beside what else is wrong: no file that the configuration names is there."""

    def said(*flags: str) -> str:
        at = ["--config", str(tmp_path / "rag.yaml"), f"--ray.address={address}", *flags]
        assert cli.main(["validate", *at]) != 0
        return capsys.readouterr().out

    values = config().model_dump(mode="json", exclude_defaults=True)
    (tmp_path / "rag.yaml").write_text(write_yaml(values))
    there = said("--refresh.workers=ray", "--index.holders=ray")
    assert f"ray.address {address}: there is room for encoding on cpu and the index in 1" in there
    lacking = said("--refresh.workers=ray", "--refresh.devices=cuda")
    assert f"ray.address {address}: no host of the cluster has 1 CPUs" in lacking
    assert "there is room" not in lacking


def test_a_cluster_that_is_not_there(capsys) -> None:
    with pytest.raises(ConfigError, match=r"ray\.address 127\.0\.0\.2:1: no Ray cluster can be"):
        ray_config.on_ray(config("--refresh.workers=ray", "--ray.address=127.0.0.2:1"))
    missing = config("--refresh.workers=ray", "--ray.address=127.0.0.2:1")
    assert validate(missing) == ConfigError.exit_code
    assert "ray.address 127.0.0.2:1: no Ray cluster can be" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["refresh.workers", "index.holders"])
def test_ray_that_is_not_installed(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_config.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"{option} ray needs Ray.*pixelrag-trainer\[ray\]"):
        ray_config.on_ray(config(f"--{option}=ray"))
