"""Threads and workers of a rank: its share of the host, or what the launcher bound it to."""

import logging
import os

import pytest
import torch

from pixelrag.distributed import cores


@pytest.fixture
def host(monkeypatch):
    """A host of 16 cores with 4 ranks, of which this one may use those that are given."""

    def _host(bound: int = 16, **variables: str) -> None:
        monkeypatch.setattr(os, "cpu_count", lambda: 16)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound)))
        for name in ("OMP_NUM_THREADS", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return _host


@pytest.mark.parametrize(
    ("bound", "variables", "expected"),
    [
        (16, {}, 16),
        (16, {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}, 4),
        (16, {"WORLD_SIZE": "8"}, 2),
        (3, {"LOCAL_WORLD_SIZE": "4"}, 3),
        (16, {"LOCAL_WORLD_SIZE": "32"}, 1),
    ],
)
def test_cores_of_a_rank(host, bound, variables, expected):
    host(bound, **variables)
    assert cores.cores_per_rank() == expected


def test_threads_yield_to_the_environment(host, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    host(LOCAL_WORLD_SIZE="4")
    cores.set_threads()
    host(LOCAL_WORLD_SIZE="4", OMP_NUM_THREADS="9")
    cores.set_threads()
    assert chosen == [4]


def test_workers_are_bounded_and_it_is_said(host, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("pixelrag"), "propagate", True)
    host(LOCAL_WORLD_SIZE="4")
    assert cores.bounded_workers(3) == 3
    assert not caplog.records
    assert cores.bounded_workers(9) == 4
    assert "data.num_workers 9: this rank has 4 cores, so it starts 4" in caplog.text
