"""What was truncated, altered or exchanged after it was written is named, never believed."""

import json
import os
from pathlib import Path

import pytest
import torch

from pixelrag.errors import IndexError_, ProvenanceError
from pixelrag.models.answer_cache import CachedTeacher
from pixelrag.models.tiny_causal import save_tiny_causal
from pixelrag.train.checkpoint import find_latest, inspect
from tests.unit.test_checkpoint_files import save
from tests.unit.test_generations import generations, make_generation  # noqa: F401 - fixture
from tests.unit.test_teacher import CPU, live, request, write_cache

LENGTHS = ((9, 14, 7), (20, 4, 6))


def flip(path: Path, share: float = 0.9) -> None:
    """One bit of a file, in its last tenth: behind the header, among the numbers."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * share)] ^= 1
    path.write_bytes(content)


def exchange(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    os.rename(one, aside)
    os.rename(other, one)
    os.rename(aside, other)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("teacher") / "m"
    return live(save_tiny_causal(folder, "llama", hidden_size=72), torch.float32)


@pytest.fixture(params=["hidden_states", "top_k"])
def cache(request: pytest.FixtureRequest, teacher, tmp_path: Path) -> Path:
    """Of two ranks, each with a document of its own of the same lengths."""
    kind = {"kind": "top_k", "k": 5, "temperature": 2.0, "codec": ""}
    changes = kind if request.param == "top_k" else {"dtype": "float32"}
    write_cache(tmp_path / "c", teacher, ASKED, ranks=2, **changes)
    return tmp_path / "c"


ASKED = [request(seed, LENGTHS) for seed in (0, 1)]


def _answers(folder: Path) -> None:
    cached = CachedTeacher(folder, CPU)
    for asked in ASKED:
        cached.answer(asked)


def test_a_whole_cache_answers(cache: Path) -> None:
    _answers(cache)


@pytest.mark.parametrize("file", ["part-001-00000.safetensors", "index.safetensors"])
def test_a_flipped_bit_in_a_cache_is_found_where_it_is_read(cache: Path, file: str) -> None:
    flip(cache / file)
    with pytest.raises(ProvenanceError, match=r"altered, or another's|no answer for a document"):
        _answers(cache)


def test_exchanged_parts_of_a_cache_are_found(cache: Path) -> None:
    exchange(cache / "part-000-00000.safetensors", cache / "part-001-00000.safetensors")
    with pytest.raises(
        ProvenanceError, match=r"part-00\d-\S+ .*or another's|index.safetensors: rows"
    ):
        _answers(cache)


def test_a_truncated_part_of_a_cache_is_found(cache: Path) -> None:
    path = cache / "part-000-00000.safetensors"
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(ProvenanceError, match="write the cache anew"):
        _answers(cache)


@pytest.mark.parametrize("cache", ["hidden_states"], indirect=True)
def test_a_flipped_bit_in_a_teachers_head_is_found(cache: Path) -> None:
    flip(cache / "head.safetensors")
    with pytest.raises(ProvenanceError, match=r"head.safetensors is altered"):
        _answers(cache)


@pytest.mark.parametrize("cache", ["top_k"], indirect=True)
def test_another_temperature_in_a_caches_manifest_is_found(cache: Path) -> None:
    path = cache / "manifest.json"
    path.write_text(path.read_text().replace('"temperature": 2.0', '"temperature": 3.0'))
    assert json.loads(path.read_text())["temperature"] == 3.0
    with pytest.raises(ProvenanceError, match=r"manifest.json.*it is altered"):
        _answers(cache)


@pytest.mark.parametrize("file", ["vectors.npy", "index.faiss", "manifest.json"])
def test_exchanged_files_of_two_generations_are_found(generations, file: str) -> None:  # noqa: F811
    """Of equal sizes, so that their hashes and numbers alone tell."""
    one, other = (make_generation(generations.root, number) for number in (1, 2))
    flip(other.path / "vectors.npy", 0.99)  # else both hold the same vectors
    flip(other.path / "index.faiss", 0.99)
    exchange(one.path / file, other.path / file)
    with pytest.raises(IndexError_, match=r"damaged|generation"):
        generations.open(1).verify()


def test_exchanged_parts_of_a_checkpoint_are_found(tmp_path: Path) -> None:
    parts = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for step in (5, 10):
        folder = save(tmp_path, step, dict(zip(parts, (b"a" * 99, b"b" * 99), strict=True)))
    exchange(*(folder / part for part in parts))
    assert len(inspect(folder)) == 2
    assert find_latest(tmp_path) == tmp_path / "checkpoint-5"


def test_states_are_what_was_written(cache: Path, teacher) -> None:
    """The digests refuse nothing that is right."""
    cached = CachedTeacher(cache, CPU)
    again = cached.answer(ASKED[0])
    if cached.manifest.kind == "hidden_states":
        torch.testing.assert_close(again.hidden_TH, teacher.answer(ASKED[0]).hidden_TH)
