"""The gate of `benchmarks/counts.py`: what it lets pass, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import counts

FOUND = SimpleNamespace(
    calls={"all_reduce": 3}, bytes={"all_reduce": 40}, flops=1000, allocations=200, launches=300
)


def _check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, torch: str, **recorded: int) -> str:
    """What is said of `FOUND` where these were recorded, with this version of torch."""
    was = counts.counts_of(FOUND) | recorded
    record = {"versions": counts.versions() | {"torch": torch}, "cases": {"a job": was}}
    monkeypatch.setattr(counts, "RECORD", tmp_path / "counts.json")
    counts.RECORD.write_text(json.dumps(record))
    return "\n".join(counts.check("a job", FOUND))


@pytest.mark.parametrize("quantity", ["all_reduce calls", "all_reduce bytes", "flops"])
def test_what_must_be_equal(quantity: str, monkeypatch, tmp_path: Path) -> None:
    was = counts.counts_of(FOUND)[quantity] + 1
    for torch in (counts.versions()["torch"], "1.0"):
        said = _check(monkeypatch, tmp_path, torch, **{quantity: was})
        assert f"a job: {quantity}: was {was:,}, is {was - 1:,}" in said
        assert "python -m benchmarks.counts --write" in said


def test_what_varies_with_versions(monkeypatch, tmp_path: Path) -> None:
    """3 % with the recorded versions; with others it tells, and is not compared."""
    now = counts.versions()["torch"]
    assert _check(monkeypatch, tmp_path, now, allocations=205, launches=295) == ""
    said = _check(monkeypatch, tmp_path, now, allocations=210)
    assert "a job: allocations: was 210, is 200" in said
    assert _check(monkeypatch, tmp_path, "1.0", allocations=400) == ""
    said = _check(monkeypatch, tmp_path, "1.0", allocations=400, flops=1)
    assert "'torch': '1.0'" in said
    assert "allocations and launches are not compared" in said


def test_what_was_never_recorded(monkeypatch, tmp_path: Path) -> None:
    _check(monkeypatch, tmp_path, "1.0")
    assert counts.check("a new job", FOUND)[0].startswith("a new job: not recorded")
    (gone,) = counts.differences("a job", {"send calls": 2}, {}, same_versions=True)
    assert gone == "a job: send calls: was 2, is 0"
