"""A run that dies and is started again is the run that never died."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from pixelrag.train.checkpoint import verify_dir
from tests.train import nursery
from tests.train.material import (
    assert_equal_runs,
    command,
    lines_of,
    merged,
    series,
    text_rows,
    weights_of,
    write_jsonl,
)

pytestmark = pytest.mark.distributed


@pytest.fixture
def one_step(tmp_path, base):
    """Runs a single step with a checkpoint; returns its folder."""

    def _run(*overrides: dict, **options: Any) -> tuple[Path, nursery.Ended]:
        small = {"optim": {"max_steps": 1, "warmup_steps": 0}}
        config = merged(base, small, *overrides, {"output_dir": str(tmp_path / "run")})
        return tmp_path / "run", nursery.run(command(tmp_path, config), **options)

    return _run


@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3", "fsdp2"])
def test_killed_and_resumed_equals_straight_bit_for_bit(start, tmp_path, engine):
    """SIGKILL inside step 4, on both ranks, in the second of its batches."""
    settings = {"engine": {"name": engine}, "ema": {"decay": 0.7, "start_step": 1}}
    settings["optim"] = {"temperature_learning_rate": 5e-3}
    if engine in ("ddp", "zero3"):  # what the first step finds is kept for the resumed run
        settings["batch"] = {"chunk_size": "auto"}
    if engine == "zero2":  # documents are embedded anew, to the same bits
        settings["train"] = ["query"]
    start("straight", settings, nproc=2).wait().check()
    job = start("killed", settings, nproc=2, setup="tests.train.faults:kill", payload={"batch": 8})
    assert job.wait().codes == [-signal.SIGKILL] * 2
    killed = tmp_path / "killed"
    assert [record["step"] for record in lines_of(killed)] == [2, 2]
    verify_dir(killed / "checkpoint-3")
    ended = start("killed", settings, nproc=2).wait().check()
    assert "resuming from" in ended.outputs[0]
    assert "checkpoint-3, step 3 of 6" in ended.outputs[0]
    assert "batch.chunk_size auto" not in ended.outputs[0]
    assert_equal_runs(killed, tmp_path / "straight")
    assert (killed / "run_id").read_text() != (tmp_path / "straight" / "run_id").read_text()


def test_workers_ahead_of_training_do_not_skip_rows(start, tmp_path):
    """Loader workers have prepared later batches when the checkpoint is written."""
    start("straight").wait().check()
    workers = {"data": {"num_workers": 2}}
    job = start("killed", workers, setup="tests.train.faults:kill", payload={"batch": 7})
    assert job.wait().codes == [-signal.SIGKILL]
    start("killed", workers).wait().check()
    assert lines_of(tmp_path / "killed") == lines_of(tmp_path / "straight")


def test_other_engines_and_worlds_go_on(start, tmp_path, shelf):
    """Four parts of one run on four engines and numbers of ranks, within rounding."""
    plain = {
        "model": {"name_or_path": str(shelf / "bert")},
        "batch": {"global_batch_size": 8},
        "ema": {"decay": 0.7},
        "optim": {"max_steps": 8},
        "checkpoint": {"every_steps": 2},
    }
    start("straight", plain).wait().check()
    parts = [("zero3", 4), ("fsdp2", 2), ("ddp", 1), ("zero2", 3)]
    for done, (engine, nproc) in zip((0, 2, 4, 6), parts, strict=True):
        fault: dict[str, Any] = {}
        if done < 6:  # in the third step of this part, one behind its checkpoint
            fault = {"setup": "tests.train.faults:kill", "payload": {"batch": 5}}
        ended = start("parts", plain, {"engine": {"name": engine}}, nproc=nproc, **fault).wait()
        assert set(ended.codes) == {-signal.SIGKILL if fault else 0}, ended.text
        if done:
            assert f"checkpoint-{done}, step {done} of 8" in ended.outputs[0]
    run, straight = tmp_path / "parts", tmp_path / "straight"
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        assert series(run, name) == pytest.approx(series(straight, name), rel=2e-4), name
    # The averages were resharded with the rest, and are what is exported.
    for folder in (run, straight):
        averages, last = weights_of(folder / "checkpoint-8", "ema"), weights_of(folder / "last")
        assert all(averages[f"encoder.backbone.{name}"].equal(last[name]) for name in last)
        raw = weights_of(folder / "checkpoint-8")
        assert not any(raw[name].equal(averages[name]) for name in raw)


def test_a_global_batch_is_shared_by_any_number_of_ranks(one_step):
    """Resumed on fewer ranks with nothing else changed, as when torchrun has lost a host."""
    whole = {"batch": {"global_batch_size": 8, "per_device_batch_size": 77}}
    folder, ended = one_step(whole, nproc=2)
    assert "a step sees 8 rows (8 over 2 ranks x 1 accumulated)" in ended.check().outputs[0]
    _, ended = one_step(whole, {"optim": {"max_steps": 2}})
    assert "8 over 1 ranks" in ended.check().text
    assert "checkpoint-1, step 1 of 2" in ended.text
    assert [record["step"] for record in lines_of(folder)] == [1, 2]


def test_no_optimizer_state_is_told(one_step, tmp_path):
    folder, ended = one_step({"checkpoint": {"save_optimizer": False}}, nproc=2)
    ended.check()
    assert not list((folder / "checkpoint-1").glob("optimizer*"))
    verify_dir(folder / "checkpoint-1")
    _, ended = one_step({"optim": {"max_steps": 2}}, nproc=2)
    ended.check()
    assert "checkpoint-1 holds no optimizer state" in ended.outputs[0]
    assert ended.outputs[1] == ""
    assert [record["step"] for record in lines_of(folder)] == [1, 2]


@pytest.fixture(scope="module")
def one_run(base, tmp_path_factory) -> dict[str, Any]:
    """The configuration of a run of one step on two ranks that has ended."""
    settings = {"optim": {"max_steps": 1, "warmup_steps": 0}}
    folder = tmp_path_factory.mktemp("one")
    config = merged(base, settings, {"output_dir": str(folder / "run")})
    nursery.run(command(folder, config), nproc=2).check()
    return config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed: was 0, is 1"),
        ({"model": {"pooling": "cls"}}, "model.pooling: was 'auto', is 'cls'"),
        ({"loss": {"temperature": 0.1}}, "loss.temperature: was None, is 0.1"),
        ({"loss": {"hardness_alpha": 1}}, "loss.hardness_alpha: was 0.0, is 1.0"),
        ({"lora": {"enabled": True}}, "lora.enabled: was False, is True"),
        ({"data": {"drop_last": True}}, "data.drop_last: was False, is True"),
        ({"batch": {"gradient_accumulation_steps": 2}}, "batch.gradient_accumulation_steps: was 1"),
        ({"batch": {"per_device_batch_size": 4}}, "global_batch_size was 16, is 8"),
    ],
)
def test_another_experiment_is_refused_by_name(one_run, tmp_path, change, named):
    folder = Path(one_run["output_dir"])
    before = (folder / "metrics.jsonl").read_bytes()
    config = merged(one_run, {"optim": {"max_steps": 2}}, change)
    ended = nursery.run(command(tmp_path, config), nproc=2)
    assert ended.codes == [5, 5]
    assert named in ended.outputs[0]
    assert ended.outputs[0].count("error:") == 1
    assert ended.outputs[1] == ""
    assert "Traceback" not in ended.text
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_changed_rows_are_refused(one_step, tmp_path):
    """As many rows as before, other content."""
    path = tmp_path / "rows.jsonl"
    data = {"data": {"train": write_jsonl(path, text_rows(12))}}
    one_step(data)[1].check()
    write_jsonl(path, text_rows(12, first=1))
    _, ended = one_step(data, {"optim": {"max_steps": 2}})
    assert ended.codes == [5]
    assert "the content of data.train or data.text has changed" in ended.text


def test_a_changed_tokenizer_is_refused(one_step, shelf, tmp_path):
    """The same path, other files."""
    model = {"model": {"name_or_path": str(shutil.copytree(shelf / "bert", tmp_path / "bert"))}}
    one_step(model)[1].check()
    path = tmp_path / "bert" / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["file"], words["list"] = words["list"], words["file"]
    path.write_text(json.dumps(content))
    more = {"optim": {"max_steps": 2}}
    _, ended = one_step(model, more)
    assert ended.codes == [5]
    assert "was written with another tokenizer" in ended.text
    allowed = {"checkpoint": {"allow_changes": ["model.name_or_path"]}}
    one_step(model, more, allowed)[1].check()


def test_what_may_change_does(one_step):
    """The machine's own settings change silently, the optimizer's with a warning."""
    folder, ended = one_step()
    ended.check()
    machine = {"data": {"num_workers": 1}, "batch": {"per_device_batch_size": 4}}
    _, ended = one_step(
        machine, {"optim": {"max_steps": 2}}, {"logging": {"every_steps": 5}}, nproc=2
    )
    ended.check()
    assert "optim.max_steps: was 1, is 2" in ended.text
    changed = {"optim": {"max_steps": 3, "learning_rate": 1e-4}, "batch": {"chunk_size": 2}}
    _, ended = one_step(changed)
    ended.check()
    assert "optim.learning_rate: was 0.001, is 0.0001" in ended.text
    assert "batch.chunk_size: was 3, is 2" in ended.text
    assert "num_workers" not in ended.text
    assert (folder / "checkpoint-3").is_dir()


def test_other_versions_of_libraries_are_told(one_step):
    folder, ended = one_step()
    manifest = folder / "checkpoint-1" / "COMPLETE"
    content = json.loads(manifest.read_text())
    content["versions"] |= {"torch": "1.0"}
    manifest.write_text(json.dumps(content))
    _, ended = one_step({"optim": {"max_steps": 2}})
    told = "written by other versions, whose figures may differ in rounding: torch: was 1.0, is "
    assert told in ended.check().text


def test_a_complete_run_does_nothing(one_step):
    folder, ended = one_step(nproc=2)
    ended.check()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    _, ended = one_step(nproc=2)
    ended.check()
    assert "has all 1 steps; nothing to do" in ended.outputs[0]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_run_that_ends_before_its_checkpoint_is_refused(one_step):
    one_step({"optim": {"max_steps": 2}})[1].check()
    _, ended = one_step()
    assert ended.codes == [5]
    for named in ("checkpoint-2", "is at step 2", "this run ends at step 1", "optim.max_steps"):
        assert named in ended.text


def test_a_run_killed_behind_its_last_checkpoint_still_ends(start, tmp_path):
    start("straight").wait().check()
    start("killed", setup="tests.train.faults:kill_before_last_export").wait()
    killed = tmp_path / "killed"
    assert (killed / "checkpoint-6").is_dir()
    assert not (killed / "last").exists()
    start("killed").wait().check()
    assert_equal_runs(killed, tmp_path / "straight")
    summaries = [
        json.loads((f / "summary.json").read_text()) for f in (killed, tmp_path / "straight")
    ]
    for name in ("step", "best", "final"):
        assert summaries[0][name] == summaries[1][name]


def test_a_truncated_checkpoint_is_passed_over(start, tmp_path):
    start("straight", {"checkpoint": {"every_steps": 2}}).wait().check()
    run = tmp_path / "run"
    shutil.copytree(tmp_path / "straight", run)
    shutil.rmtree(run / "last")
    with open(run / "checkpoint-6" / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    ended = start("run", {"checkpoint": {"every_steps": 2}}).wait().check()
    assert "passed over a broken checkpoint" in ended.text
    assert "model.safetensors: truncated (1000 bytes" in ended.text
    assert "step 4 of 6" in ended.text
    assert_equal_runs(run, tmp_path / "straight")


def test_a_named_checkpoint_that_is_broken_is_refused(one_step):
    folder, ended = one_step()
    ended.check()
    os.truncate(folder / "checkpoint-1" / "optimizer.safetensors", 10)
    named = {"checkpoint": {"resume": str(folder / "checkpoint-1")}, "optim": {"max_steps": 2}}
    _, ended = one_step(named, nproc=2)
    assert ended.codes == [5, 5]
    assert "optimizer.safetensors: truncated" in ended.outputs[0]
    assert ended.outputs[1] == ""


def test_resume_never_does_not_mix_two_runs(one_step):
    one_step()[1].check()
    _, ended = one_step({"checkpoint": {"resume": "never"}}, nproc=2)
    assert ended.codes == [5, 5]
    assert "holds checkpoints of an earlier run" in ended.outputs[0]
    assert ended.outputs[1] == ""


def test_two_runs_do_not_share_a_folder(start, one_step, tmp_path):
    """The second is refused before it loads anything; one that was killed is in nobody's way."""
    first = start("run", setup="tests.train.faults:hang")
    first.wait_until((tmp_path / "run" / ".owner.json").exists)
    _, ended = one_step(nproc=2)
    assert ended.codes == [5, 5]
    assert "lives; two runs cannot share a folder" in ended.outputs[0]
    assert ended.outputs[1] == ""
    first.kill()
    assert (tmp_path / "run" / ".owner.json").exists()
    one_step(nproc=2)[1].check()


def test_only_the_newest_checkpoints_stay(start, tmp_path):
    start("run", {"checkpoint": {"every_steps": 1, "keep_last": 2}}).wait().check()
    names = sorted(path.name for path in (tmp_path / "run").glob("*checkpoint-*"))
    assert names == ["checkpoint-5", "checkpoint-6"]


def test_every_rank_writes_its_part(one_step):
    folder, ended = one_step({"engine": {"name": "fsdp2"}}, nproc=2)
    ended.check()
    checkpoint = folder / "checkpoint-1"
    parts = [f"model-{part}.safetensors" for part in ("00001-of-00002", "00002-of-00002")]
    names = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    assert names == [*parts, *(part.replace("model", "optimizer") for part in parts)]
    sizes = [(checkpoint / part).stat().st_size for part in parts]
    assert max(sizes) < 0.7 * sum(sizes)
    parameters = [load_file(checkpoint / part) for part in parts]
    assert not parameters[0].keys() & parameters[1].keys()


def test_steps_go_on_while_a_checkpoint_is_written(start, tmp_path):
    """The disk takes half a second; the steps behind the checkpoint do not wait for it."""
    often = {"checkpoint": {"every_steps": 2, "async_save": True}, "eval": {"every_steps": None}}
    slow = {"setup": "tests.train.faults:slow_disk", "payload": {"seconds": 0.5}}
    ended = start("beside", often, nproc=2, **slow).wait().check()
    start("straight", often, {"checkpoint": {"every_steps": 2}}, nproc=2).wait().check()
    assert_equal_runs(tmp_path / "beside", tmp_path / "straight")
    lines = ended.outputs[0].splitlines()
    saved = next(i for i, line in enumerate(lines) if "saved" in line and "checkpoint-2 " in line)
    assert any("step 4/6" in line for line in lines[:saved])
    waited, disk = re.search(r"waited ([\d.]+) s, the disk ([\d.]+) s", lines[saved]).groups()
    assert float(waited) < 0.5 <= float(disk)
    lines = (tmp_path / "beside" / "metrics.jsonl").read_text().splitlines()
    taken = {line["step"]: line for line in map(json.loads, lines) if "train/loss" in line}
    assert "checkpoint/stall_seconds" not in taken[2]
    # The second save waits for the first one's disk.
    assert taken[4]["checkpoint/stall_seconds"] < 0.5 <= taken[6]["checkpoint/write_seconds"]
    summary = json.loads((tmp_path / "beside" / "summary.json").read_text())
    assert summary["checkpoint/stall_seconds"] > taken[4]["checkpoint/stall_seconds"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_fails_beside_the_training_stops_it(start, tmp_path, rank):
    """On the rank that did not write well and on the one that did, with what was wrong.

    Nothing of it stays, although the other rank is still writing its part when the first fails.
    """
    often = {"checkpoint": {"every_steps": 2, "async_save": True}}
    broken = {"setup": "tests.train.faults:broken_part", "payload": {"rank": rank, "step": 4}}
    ended = start("run", often, nproc=2, **broken).wait()
    assert ended.codes == [5, 5]
    assert f"{'rank 1: ' if rank else ''}no space left for this part" in ended.outputs[0]
    assert ended.outputs[0].count("error:") == 1
    names = [path.name for path in (tmp_path / "run").glob("*checkpoint-*")]
    assert names == ["checkpoint-2"]


def test_the_best_and_every_other_checkpoint_stay(start, tmp_path):
    options = {"every_steps": 1, "keep_last": 1, "keep_every": 4, "keep_best": True}
    rates = {"optim": {"learning_rate": 0.5}}  # training only spoils it: the first is the best
    start("run", {"checkpoint": options, "eval": {"every_steps": 1}}, rates).wait().check()
    losses = series(tmp_path / "run", "eval/loss")
    best = losses.index(min(losses)) + 1
    names = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    assert names == {f"checkpoint-{step}" for step in (best, 4, 6)}
    assert best not in (4, 6)


def test_a_new_run_starts_from_the_weights_of_another(one_step, start, tmp_path):
    folder, ended = one_step()
    ended.check()
    source = str(folder / "checkpoint-1")
    still = {"optim": {"learning_rate": 1e-12, "max_steps": 1, "warmup_steps": 0}}
    again = {"checkpoint": {"init_from": source}, "loss": {"temperature": 0.2}}
    ended = (
        start("new", {"model": {"name_or_path": _model_of(folder)}}, still, again).wait().check()
    )
    assert f"a new run, with the weights of {source}" in ended.text
    mine, theirs = (
        weights_of(tmp_path / "new" / "checkpoint-1"),
        weights_of(folder / "checkpoint-1"),
    )
    for name in theirs:
        assert mine[name].sub(theirs[name]).abs().max() < 1e-6, name
    ended = start("other", {"checkpoint": {"init_from": str(folder / "last")}}).wait()
    assert ended.codes == [5]
    assert "name it as the model instead" in ended.text


def _model_of(run: Path) -> str:
    return yaml.safe_load((run / "config.yaml").read_text())["model"]["name_or_path"]


def test_changes_of_meaning_are_allowed_by_name(one_step, tmp_path):
    path = tmp_path / "rows.jsonl"
    data = {"data": {"train": write_jsonl(path, text_rows(12))}}
    one_step(data)[1].check()
    write_jsonl(path, text_rows(15, first=1))
    more = {"optim": {"max_steps": 2}, "loss": {"label_smoothing": 0.1}}
    _, ended = one_step(data, more, {"checkpoint": {"allow_changes": ["data"]}})
    assert ended.codes == [5]
    assert "loss.label_smoothing: was 0.0, is 0.1" in ended.text
    assert "checkpoint.allow_changes" in ended.text
    names = {"checkpoint": {"allow_changes": ["data", "loss"]}}
    trained = {"loss": {"temperature": 0.1}}
    _, ended = one_step(data, trained, names)
    assert ended.codes == [5]
    assert "a temperature that is trained goes on from the checkpoint's" in ended.text
    _, ended = one_step(data, more, names)
    ended.check()
    assert "resuming with changed settings: loss.label_smoothing: was 0.0, is 0.1" in ended.text
    assert "the data begin at their first batch" in ended.text
    _, ended = one_step(data, {"checkpoint": {"allow_changes": ["los.temperature"]}})
    assert ended.codes == [2]
    assert "checkpoint.allow_changes 'los.temperature', which is no option" in ended.text
