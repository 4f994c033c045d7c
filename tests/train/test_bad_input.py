"""What cannot work ends in one clear message, the right exit code, and nothing half-written."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pixelrag.train.checkpoint import verify_dir
from tests.train import nursery
from tests.train.material import command, merged, text_rows, write_jsonl

pytestmark = pytest.mark.distributed

IS_ROOT = os.geteuid() == 0
CONFIG, DATA, MODEL, CHECKPOINT, ENGINE = 2, 3, 4, 5, 6


@pytest.fixture
def run(tmp_path, base):
    """Runs a configuration on two ranks; returns how it ended."""

    def _run(*overrides: dict, nproc: int = 2, **options: Any):
        config = merged(base, {"output_dir": str(tmp_path / "run")}, *overrides)
        return nursery.run(command(tmp_path, config), nproc=nproc, **options)

    return _run


def assert_refused(ended: nursery.Ended, code: int, *named: str) -> None:
    """All ranks end with `code`; rank 0 says why, once, the others nothing."""
    assert set(ended.codes) == {code}, ended.text
    assert "Traceback" not in ended.text
    told = re.findall(r"^pixelrag: .*error: ", ended.outputs[0], re.MULTILINE)
    assert len(told) == 1, ended.text
    for text in named:
        assert text in ended.outputs[0]
    assert "".join(ended.outputs[1:]) == ""


def assert_nothing_half_written(folder: Path) -> None:
    """No hidden leftovers; what has the name of a checkpoint is one."""
    if not folder.exists():
        return
    assert [path for path in folder.rglob("*") if path.name.startswith(".")] == []
    for checkpoint in folder.glob("checkpoint-*"):
        verify_dir(checkpoint)
    for name in ("best", "last"):
        assert not (folder / name).exists() or (folder / name / "pixelrag.json").exists()
    if (folder / "metrics.jsonl").exists():
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            json.loads(line)


def _data(**files: Any) -> dict[str, Any]:
    return {"data": files}


# --- before the model is loaded -----------------------------------------------------------------


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_missing_data_file(run, tmp_path, nproc):
    missing = str(tmp_path / "no.jsonl")
    assert_refused(run(_data(train=missing), nproc=nproc), DATA, missing)
    assert not (tmp_path / "run").exists()


def test_a_missing_held_out_file(run, tmp_path):
    assert_refused(run(_data(eval=str(tmp_path / "no.jsonl"))), DATA, "no.jsonl")
    assert not (tmp_path / "run").exists()


def test_a_missing_corpus(run, tmp_path, shelf):
    corpus = {"eval": {"corpus": str(tmp_path / "no.jsonl")}}
    assert_refused(run(_data(eval=str(shelf / "eval.jsonl")), corpus), DATA, "no.jsonl")
    assert not (tmp_path / "run").exists()


def test_an_empty_query(run, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [*text_rows(9), {"query": " ", "passage": "x"}])
    assert_refused(run(_data(train=path)), DATA, "rows.jsonl:10", "query")
    assert not (tmp_path / "run").exists()


def test_a_truncated_image(run, tmp_path, shelf):
    Image.new("RGB", (64, 64), "red").save(tmp_path / "whole.png")
    content = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "half.png").write_bytes(content[: len(content) // 2])
    rows = [{"query": "q", "chunk_path": f"{name}.png"} for name in ("whole", "half")]
    model = {"model": {"name_or_path": str(shelf / "qwen3_vl")}}
    ended = run(model, _data(train=write_jsonl(tmp_path / "rows.jsonl", rows)))
    assert_refused(ended, DATA, "rows.jsonl:2", "half.png")
    assert not (tmp_path / "run").exists()


def test_fewer_rows_than_ranks(run, tmp_path):
    path = write_jsonl(tmp_path / "two.jsonl", text_rows(2))
    ended = run(_data(train=path), nproc=3)
    assert_refused(ended, DATA, "2 usable rows, expected at least 3: one for each process")
    assert not (tmp_path / "run").exists()


def test_held_out_rows_outside_the_corpus(run, tmp_path, shelf):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"id": "1", "text": "something else"}])
    ended = run(_data(eval=str(shelf / "eval.jsonl")), {"eval": {"corpus": corpus}})
    assert_refused(ended, DATA, "9 rows of data.eval are not in it", "eval.jsonl:1")
    assert not (tmp_path / "run").exists()


def test_images_for_a_text_model(run, tmp_path, shelf):
    ended = run(_data(train=str(shelf / "mixed.jsonl")))
    assert_refused(ended, DATA, "mixed.jsonl:1", "0.png", "is an image", "model.name_or_path")
    assert not (tmp_path / "run").exists()


# --- configuration ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"batch": {"chunk_size": 0}}, ["batch.chunk_size"]),
        ({"batch": {"per_device_batch_size": 0}}, ["batch.per_device_batch_size"]),
        ({"engine": {"name": "zero4"}}, ["engine.name", "zero3"]),
        ({"optim": {"learnin_rate": 1}}, ["optim.learnin_rate", "learning_rate"]),
        ({"engine": {"name": "zero2", "deepspeed": "broken.json"}}, ["broken.json", "line 2"]),
    ],
)
def test_a_wrong_configuration(run, tmp_path, monkeypatch, overrides, named):
    (tmp_path / "broken.json").write_text('{"zero_optimization":\n {"stage": 2,}}')
    if "deepspeed" in overrides.get("engine", {}):
        overrides = merged(overrides, {"engine": {"deepspeed": str(tmp_path / "broken.json")}})
    ended = run(overrides, nproc=1)
    assert_refused(ended, CONFIG, *named)
    assert not (tmp_path / "run").exists()


def test_a_wrong_configuration_is_told_once_by_two_ranks(run):
    assert_refused(run({"batch": {"chunk_size": 0}}), CONFIG, "batch.chunk_size")


def test_a_deepspeed_file_that_contradicts_the_job(run, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"gradient_clipping": 3.0, "zero_optimization": {"stage": 2}}))
    ended = run({"engine": {"name": "zero2", "deepspeed": str(path)}})
    assert_refused(ended, CONFIG, "ds.json", "gradient_clipping: got 3.0")
    assert not (tmp_path / "run").exists()


# --- the model ----------------------------------------------------------------------------------


def test_a_model_that_is_not_there(run, tmp_path):
    ended = run({"model": {"name_or_path": str(tmp_path / "nothing")}})
    assert_refused(ended, MODEL, str(tmp_path / "nothing"))
    assert not (tmp_path / "run").exists()


def test_adapters_for_layers_that_are_not_there(run, tmp_path):
    ended = run({"lora": {"enabled": True, "target_modules": ["no_proj"]}})
    assert_refused(ended, MODEL, "lora.target_modules 'no_proj'")
    assert not (tmp_path / "run").exists()


# --- the disk -----------------------------------------------------------------------------------


def test_an_output_folder_that_is_a_file(run, tmp_path):
    (tmp_path / "run").write_text("mine")
    assert_refused(run(), CHECKPOINT, str(tmp_path / "run"), "is not a folder")
    assert (tmp_path / "run").read_text() == "mine"


def test_a_key_that_deepspeed_does_not_know(run, tmp_path):
    (tmp_path / "odd.json").write_text('{"zero_optimization": {"stage": 2, "fooo": 1}}')
    engine = {"engine": {"name": "zero2", "deepspeed": str(tmp_path / "odd.json")}}
    assert_refused(run(engine, nproc=1), ENGINE, "fooo", "engine.deepspeed")


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_no_permission_to_write(run, tmp_path, mode):
    """A folder that may only be read, and one that may not even be entered."""
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(mode)
    ended = run({"output_dir": str(closed / "run")}, powerless=True)
    assert_refused(ended, CHECKPOINT, str(closed))
    assert "parameters train" not in ended.outputs[0], "the model was loaded in vain"
    closed.chmod(0o755)
    assert list(closed.iterdir()) == []


def test_a_run_whose_record_may_not_be_written(run, tmp_path):
    """The folder is ours, an older metrics.jsonl in it is not: said before the first step."""
    run({"optim": {"max_steps": 1, "warmup_steps": 0}}).check()
    (tmp_path / "run").chmod(0o555)
    ended = run({"optim": {"max_steps": 2}}, powerless=True)
    (tmp_path / "run").chmod(0o755)
    assert_refused(ended, CHECKPOINT, str(tmp_path / "run"))
    assert_nothing_half_written(tmp_path / "run")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    if not IS_ROOT:
        pytest.skip("needs root to mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("may not mount a file system here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("held_out", [False, True])
def test_a_disk_that_fills(run, small_disk, shelf, held_out):
    """A checkpoint a step, all kept, until there is no room; also where `best/` finds none."""
    settings = {
        "output_dir": str(small_disk / "run"),
        "optim": {"max_steps": 30},
        "checkpoint": {"every_steps": 1, "keep_last": 40},
    }
    if held_out:
        ballast = {"data": {"eval": str(shelf / "eval.jsonl")}, "eval": {"every_steps": 4}}
        ballast["checkpoint"] = {"every_steps": 30}
        settings = merged(settings, ballast)
        (small_disk / "ballast").write_bytes(bytes(3 * 2**20 - 130_000))
    ended = run(settings)
    assert_refused(ended, CHECKPOINT, "best" if held_out else "checkpoint-")
    assert_nothing_half_written(small_disk / "run")
    saved = list((small_disk / "run").glob("checkpoint-*"))
    assert held_out == (not saved)
    assert not (small_disk / "run" / "best").exists()


def test_a_file_that_may_not_grow(run, tmp_path):
    """The parameters' file meets the limit half-way through."""
    ended = run({"checkpoint": {"every_steps": 2}}, max_file_bytes=80_000)
    assert_refused(ended, CHECKPOINT, "checkpoint-2")
    assert_nothing_half_written(tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint-2").exists()


def test_an_export_that_may_not_grow(run, tmp_path, shelf):
    settings = {"data": {"eval": str(shelf / "eval.jsonl")}, "eval": {"every_steps": 2}}
    ended = run(settings, max_file_bytes=80_000)
    assert_refused(ended, CHECKPOINT, "best")
    assert_nothing_half_written(tmp_path / "run")
    assert not (tmp_path / "run" / "best").exists()


@pytest.mark.parametrize("held_out", [False, True])
def test_a_record_that_may_not_grow(run, tmp_path, shelf, held_out):
    """metrics.jsonl meets the limit, at a step's line or an evaluation's; no line is torn."""
    settings: dict[str, Any] = {"optim": {"max_steps": 40}}
    if held_out:
        settings["data"] = {"eval": str(shelf / "eval.jsonl")}
        settings["eval"] = {"every_steps": 1, "retrieval": False}
        settings["checkpoint"] = {"best_metric": "eval/accuracy"}
        settings["logging"] = {"every_steps": 100}
        settings["optim"]["max_steps"] = 2
    fault = {"setup": "tests.train.faults:full_record", "payload": {}} if held_out else {}
    ended = run(settings, max_file_bytes=None if held_out else 4_500, **fault)
    assert_refused(ended, CHECKPOINT, "metrics.jsonl", "the run stops here")
    assert_nothing_half_written(tmp_path / "run")
    assert held_out or (tmp_path / "run" / "metrics.jsonl").stat().st_size > 2_000


# --- in the middle of a run ---------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_an_image_that_goes_missing(run, tmp_path, shelf, num_workers, engine):
    """One rank needs it: all stop, and the message names rank and file."""
    path = tmp_path / "lost.png"
    Image.new("RGB", (64, 64), "blue").save(path)
    rows = [*text_rows(11), {"query": "blue", "chunk_path": "lost.png"}]
    settings = {
        "model": {"name_or_path": str(shelf / "qwen3_vl")},
        "data": {
            "train": write_jsonl(tmp_path / "rows.jsonl", rows),
            "num_workers": num_workers,
        },
        "batch": {"per_device_batch_size": 2},
        "engine": {"name": engine},
        "optim": {"max_steps": 20},
    }
    fault = {"setup": "tests.train.faults:lost_image", "payload": {"path": str(path)}}
    ended = run(settings, **fault)
    assert_refused(ended, DATA, str(path))
    assert_nothing_half_written(tmp_path / "run")


def test_a_held_out_image_that_goes_missing(run, tmp_path, shelf):
    path = tmp_path / "lost.png"
    Image.new("RGB", (64, 64), "blue").save(path)
    rows = [*text_rows(7), {"query": "blue", "chunk_path": "lost.png"}]
    settings = {
        "model": {"name_or_path": str(shelf / "qwen3_vl")},
        "data": {"eval": write_jsonl(tmp_path / "rows.jsonl", rows)},
        "engine": {"name": "fsdp2"},
        "eval": {"every_steps": 1, "batch_size": 2},
    }
    fault = {"setup": "tests.train.faults:lost_image", "payload": {"path": str(path)}}
    assert_refused(run(settings, **fault), DATA, str(path))


def test_a_picture_too_large_for_the_model(run, tmp_path, shelf):
    """Found by the rank that meets it, told by rank 0."""
    Image.new("RGB", (640, 640), "blue").save(tmp_path / "large.png")
    rows = [*text_rows(7), {"query": "blue", "chunk_path": "large.png"}]
    settings = {
        "model": {"name_or_path": str(shelf / "qwen3_vl"), "document_max_length": 64},
        "data": {"train": write_jsonl(tmp_path / "rows.jsonl", rows)},
        "batch": {"per_device_batch_size": 4},
    }
    assert_refused(run(settings), DATA, "large.png", "document_max_length")


def test_a_fault_of_our_own_shows_its_traceback_and_stops_the_others(run):
    fault = {"setup": "tests.train.faults:broken_code", "payload": {"rank": 1, "batch": 2}}
    ended = run(**fault)
    assert ended.codes == [ENGINE, 1]
    assert "rank 1: KeyError: 'a fault of ours'" in ended.outputs[0]
    assert "Traceback" not in ended.outputs[0]
    assert ended.outputs[1].count("Traceback") == 1
    assert "KeyError: 'a fault of ours'" in ended.outputs[1]
