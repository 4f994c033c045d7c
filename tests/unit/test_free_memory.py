"""What a rank may still take of the host's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pixelrag.distributed import free_memory as module
from pixelrag.distributed.free_memory import free_memory

CPU = torch.device("cpu")


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /sys/fs/cgroup."""
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return tmp_path


def test_the_machine_without_limits(container: Path) -> None:
    assert 2**20 < free_memory(CPU) < 2**50
    (container / "memory.max").write_text("max\n")
    (container / "memory.current").write_text("5\n")
    (container / "memory.stat").write_text("inactive_file 7\n")
    assert 2**20 < free_memory(CPU) < 2**50


@pytest.mark.parametrize(
    ("prefix", "limit", "used", "idle"),
    [
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory/", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_containers_limit_counts(
    container: Path,
    monkeypatch: pytest.MonkeyPatch,
    prefix: str,
    limit: str,
    used: str,
    idle: str,
) -> None:
    """Cached files are in use and can be dropped; the ranks of a host share what is left."""
    (container / "memory").mkdir()
    (container / prefix / limit).write_text("10000\n")
    (container / prefix / used).write_text("6000\n")
    (container / prefix / "memory.stat").write_text(f"anon 5000\n{idle} 1000\n")
    assert free_memory(CPU) == 5000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(CPU) == 1250
    (container / prefix / used).write_text("20000\n")
    assert free_memory(CPU) == 0
