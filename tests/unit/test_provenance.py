"""`pixelrag inspect`: every kind of artifact is told, and two that differ are kept apart."""

import json
import re
import shutil
from pathlib import Path

import pytest

from pixelrag.cli import main
from pixelrag.train.atomic import atomic_dir


def checkpoint(folder: Path, *, data: str = "a" * 64, config: str = "c1") -> Path:
    """A checkpoint without weights worth the name."""
    info = {"step": 3, "world_size": 2, "engine": "zero3"}
    with atomic_dir(folder, info=info) as path:
        (path / "model.safetensors").write_bytes(b"x" * 100)
        state = {"step": 3, "position": {"data": data, "sampler": {"position": 4}}, "best": 0.5}
        (path / "state.json").write_text(json.dumps(state | {"fingerprint": config}))
    return folder


def model(folder: Path, *, tokens: tuple[str, ...] = ("a", "b"), template: str = "{{x}}") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 9}))
    (folder / "model.safetensors").touch()
    vocabulary = {token: i for i, token in enumerate(tokens)}
    added = [{"id": 8, "content": "<end>"}]
    text = json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added})
    (folder / "tokenizer.json").write_text(text)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def generation(folder: Path, passages: str = "p1") -> Path:
    folder.mkdir(parents=True)
    (folder / "vectors.npy").write_bytes(b"1234")
    manifest = {
        "format": 1, "generation": 2, "step": 40, "num_passages": 9, "dim": 4,
        "metric": "inner_product", "index": {"factory": "Flat"}, "index_files": [],
        "fingerprints": {"passages": passages}, "validation": {"recall": 1.0},
        "files": {"vectors.npy": {"size": 4, "sha256": ""}},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (checkpoint, ["checkpoint", "zero3, 2 ranks", "optimizer state  no"]),
        (model, ["model", "qwen3", "chat template"]),
        (generation, ["index generation", "num_passages", "measured recall"]),
    ],
)
def test_it_says_what_a_folder_is(tmp_path, capsys, make, words):
    assert main(["inspect", str(make(tmp_path / "it"))]) == 0
    told = capsys.readouterr().out
    assert all(word in told for word in words), told


def test_a_run_shows_its_checkpoints(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    checkpoint(tmp_path / "checkpoint-3")
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "run"
    assert told["facts"]["checkpoints"] == "checkpoint-3"
    assert told["marks"]["configuration"] == "c1"
    best = {"eval/ndcg@10": 0.5}
    summary = {"step": 3, "best": best, "engine": "ddp", "world_size": 1, "seconds": None}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\n  best +eval/ndcg@10 0\.5\n", shown)
    assert re.search(r"\n  seconds +none\n  the same in what belongs together:\n  conf", shown)
    assert not set("{}()") & set(shown.partition("\n")[2])


def test_two_that_belong_together(tmp_path, capsys):
    one = checkpoint(tmp_path / "checkpoint-1")
    other = checkpoint(tmp_path / "checkpoint-2")
    assert main(["inspect", str(one), str(other)]) == 0
    assert "they agree in configuration, data" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pair", "named"),
    [
        (lambda f: (checkpoint(f / "a"), checkpoint(f / "b", data="b" * 64)), "data: aaa"),
        (lambda f: (model(f / "a"), model(f / "b", tokens=("a", "c"))), "vocabulary: "),
        (lambda f: (model(f / "a"), model(f / "b", template="")), "chat template: "),
        (lambda f: (generation(f / "a"), generation(f / "b", "p2")), "passages: p1 in"),
        (lambda f: (generation(f / "a"), model(f / "b")), "no mark in common"),
    ],
)
def test_two_that_do_not(tmp_path, capsys, pair, named):
    one, other = pair(tmp_path)
    assert main(["inspect", str(one), str(other)]) == 9
    assert named in capsys.readouterr().err


def test_what_is_not_whole(tmp_path, capsys):
    broken = checkpoint(tmp_path / "checkpoint-1")
    (broken / "model.safetensors").write_bytes(b"y" * 100)
    assert main(["inspect", str(broken)]) == 9
    assert "model.safetensors: altered" in capsys.readouterr().err
    short = generation(tmp_path / "gen")
    (short / "vectors.npy").write_bytes(b"1")
    assert main(["inspect", str(short)]) == 9
    assert "vectors.npy: 1 bytes, expected 4" in capsys.readouterr().err
    empty = model(tmp_path / "model")
    (empty / "model.safetensors").unlink()
    assert main(["inspect", str(empty)]) == 9
    assert "no weights" in capsys.readouterr().err


def test_what_is_not_known(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "no")]) == 9
    assert "got no folder" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "x", ignore_errors=True)
    (tmp_path / "x").mkdir()
    assert main(["inspect", str(tmp_path / "x")]) == 9
    assert "not an artifact that is known here" in capsys.readouterr().err
