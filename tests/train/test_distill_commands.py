"""The commands around distillation, reached as users reach them; `eval.on_start` of both jobs."""

import json
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pixelrag.cli import main
from tests.train import nursery
from tests.train.material import command, lines_of, merged, series

pytestmark = pytest.mark.distributed


def asked(folder: Path, config: dict, name: str, *flags: str) -> list[str]:
    return [*command(folder, config, name), *flags]


@pytest.fixture(scope="module")
def live(classroom, tmp_path_factory) -> tuple[Path, dict]:
    """A run with a live teacher, and its configuration."""
    folder = tmp_path_factory.mktemp("live")
    config = {
        "output_dir": str(folder / "run"),
        "student": {"name_or_path": str(classroom / "tied")},
        "teacher": {"name_or_path": str(classroom / "teacher")},
        "data": {"train": str(classroom / "chats.jsonl"), "eval_samples": 8},
        "packing": {"length": 96},
        "batch": {"per_device_batch_size": 2},
        "optim": {"learning_rate": 1e-3, "max_steps": 3},
        # Averaged weights are what is measured and exported.
        "ema": {"decay": 0.5},
        "eval": {"on_start": True, "every_steps": 1},
        "engine": {"device": "cpu", "timeout_seconds": 60},
        "logging": {"every_steps": 1},
    }
    nursery.run(command(folder, config, "distill")).check()
    return folder / "run", config


def taught_by(live, tmp_path: Path, name: str, teacher: dict) -> Path:
    """The same run with another source of answers."""
    config = merged(live[1], {"teacher": {"name_or_path": None, **teacher}})
    config["output_dir"] = str(tmp_path / name)
    nursery.run(command(tmp_path, config, "distill")).check()
    return tmp_path / name


def refused(live, tmp_path: Path, teacher: dict) -> str:
    """What a run says that is asked to learn from another teacher than the answers' own."""
    config = merged(live[1], {"teacher": teacher, "output_dir": str(tmp_path / "refused")})
    ended = nursery.run(command(tmp_path, config, "distill"))
    assert ended.codes == [9]
    return ended.text


def same_losses(got: Path, expected: Path) -> None:
    for name in ("train/loss", "train/kd_loss", "eval/loss", "eval/agreement"):
        assert series(got, name) == pytest.approx(series(expected, name), rel=1e-5), name


def test_eval_measures_what_the_run_measured(live, tmp_path):
    run, config = live
    final = json.loads((run / "summary.json").read_text())["final"]
    assert final.keys() == {"eval/loss", "eval/ce_loss", "eval/kd_loss", "eval/agreement"}
    last = load_file(run / "last" / "model.safetensors")
    for kind, same in (("ema", True), ("model", False)):
        tensors = load_file(run / "checkpoint-3" / f"{kind}.safetensors")
        name = next(name for name in tensors if name.endswith("q_proj.weight"))
        assert last[name.removeprefix("student.lm.")].equal(tensors[name]) == same, kind
    assert json.loads((run / "last" / "pixelrag.json").read_text())["ema_decay"] == 0.5
    student = {"student": {"name_or_path": str(run / "last")}}
    output = tmp_path / "deep" / "figures.json"
    words = asked(tmp_path, merged(config, student), "eval", "--output", str(output))
    ended = nursery.run(words).check()
    content = json.loads(output.read_text())
    assert content["figures"] == pytest.approx(final, rel=1e-5)
    assert (content["model"], content["teacher"]) == (
        str(run / "last"),
        config["teacher"]["name_or_path"],
    )
    for name, value in final.items():
        assert f"{name:<16} {value:.4f}" in ended.text
    # The untrained student has other figures: those of step 0.
    ended = nursery.run(asked(tmp_path, config, "eval")).check()
    assert f"{'eval/loss':<16} {series(run, 'eval/loss')[0]:.4f}" in ended.text
    assert series(run, "eval/loss")[0] > 1.001 * final["eval/loss"]


def test_eval_without_held_out_rows(live, tmp_path, capsys):
    bare = merged(live[1], {"data": {"eval_samples": None}, "eval": {"on_start": False}})
    bare["eval"]["every_steps"] = None
    assert main(asked(tmp_path, bare, "eval")) == 2
    assert "data.eval" in capsys.readouterr().err


def test_an_evaluation_on_start_is_written_and_never_the_best(live, base, shelf, tmp_path):
    """Steps that only do harm: what was there before them is still not what `best/` is of."""
    harm = {"optim": {"learning_rate": 30.0, "max_steps": 2, "warmup_steps": 0}}
    contrastive = {
        "data": {"eval": str(shelf / "eval.jsonl")},
        "eval": {"on_start": True, "every_steps": 1},
        "checkpoint": {"best_metric": "eval/loss"},
    }
    jobs = {"distill": live[1], "contrastive": merged(base, contrastive)}
    for job, config in jobs.items():
        config = merged(config, harm, {"output_dir": str(tmp_path / job)})
        nursery.run(command(tmp_path, config, job)).check()
        records = lines_of(tmp_path / job)
        assert records[0]["step"] == 0
        assert not any(name.startswith("train/") for name in records[0])
        assert [r["step"] for r in records if "eval/loss" in r] == [0, 1, 2]
        losses = series(tmp_path / job, "eval/loss")
        assert losses[0] < min(losses[1:]), "the test wants steps that do harm"
        summary = json.loads((tmp_path / job / "summary.json").read_text())
        assert summary["best"] == {"eval/loss": min(losses[1:])}
        # Going on from a checkpoint is no start.
        more = merged(config, {"optim": {"max_steps": 3}})
        nursery.run(command(tmp_path, more, job)).check()
        steps = [r["step"] for r in lines_of(tmp_path / job) if "eval/loss" in r]
        assert steps == [0, 1, 2, 3]


def test_a_loss_that_is_not_finite_names_the_rows_of_its_micro_batch(live, tmp_path):
    steps = {"learning_rate": 1e38, "scheduler": "constant", "warmup_ratio": 0.0, "max_steps": 9}
    config = merged(live[1], {"optim": steps, "eval": {"on_start": False, "every_steps": None}})
    config = merged(config, {"output_dir": str(tmp_path / "run"), "checkpoint": {"every_steps": 1}})
    ended = nursery.run(command(tmp_path, config, "distill"))
    assert ended.codes == [7]
    assert "the loss is nan; all ranks stop here" in ended.text
    named = ended.text.partition("Rows that it comes from: rank 0: ")[2].partition(". Rows of")[0]
    assert re.fullmatch(r"chats\.jsonl:\d+(, chats\.jsonl:\d+)*", named), ended.text
    assert not any("nan" in line.lower() for line in (tmp_path / "run" / "metrics.jsonl").open())


def test_cached_states_teach_as_the_teacher_does(live, tmp_path):
    cache = tmp_path / "states"
    words = asked(tmp_path, live[1], "cache-states", "--output", str(cache))
    nursery.run(words).check()
    manifest = json.loads((cache / "manifest.json").read_text())
    assert (manifest["kind"], manifest["codec"]) == ("hidden_states", "exact")
    teacher = {"source": "hidden_states", "path": str(cache)}
    same_losses(taught_by(live, tmp_path, "cached", teacher), live[0])
    again = nursery.run(words)
    assert again.codes == [9]
    assert "holds a cache already" in again.text
    other = refused(live, tmp_path, {**teacher, "name_or_path": "another"})
    assert f"teacher: the cache has {live[1]['teacher']['name_or_path']}" in other


def test_cached_logits_teach_as_the_teacher_restricted_to_them(live, tmp_path):
    cache = tmp_path / "logits"
    nursery.run(
        asked(tmp_path, live[1], "cache-logits", "--output", str(cache), "--k", "5")
    ).check()
    manifest = json.loads((cache / "manifest.json").read_text())
    assert (manifest["kind"], manifest["k"], manifest["temperature"]) == ("top_k", 5, 2.0)
    cached = taught_by(live, tmp_path, "cached", {"source": "cache", "path": str(cache)})
    restricted = merged(live[1], {"loss": {"top_k": 5}, "output_dir": str(tmp_path / "top")})
    nursery.run(command(tmp_path, restricted, "distill")).check()
    # The cache keeps 16-bit log-probabilities.
    expected = series(tmp_path / "top", "train/loss")
    assert series(cached, "train/loss") == pytest.approx(expected, rel=3e-3)
    assert series(live[0], "train/loss") != pytest.approx(expected, rel=3e-3)


def test_a_served_teacher_teaches_as_one_beside_the_student(live, tmp_path):
    # The path of a Unix socket may have about a hundred characters.
    folder = Path(tempfile.mkdtemp(prefix="pixelrag-"))
    try:
        job = nursery.start(asked(tmp_path, live[1], "teacher", "--listen", str(folder / "socket")))
        try:
            job.wait_until((folder / "socket").exists)
            teacher = {"source": "remote", "path": str(folder / "socket")}
            same_losses(taught_by(live, tmp_path, "remote", teacher), live[0])
            other = refused(live, tmp_path, {**teacher, "name_or_path": "another"})
            assert "but teacher.name_or_path is another" in other
            job.signal(signal.SIGINT)
            ended = job.wait(30)
        finally:
            job.kill()
        assert ended.codes == [130]
        assert "interrupted" in ended.text
        assert not (folder / "socket").exists()
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("cache-states", [], "--output: got nothing"),
        ("cache-states", ["--codec=int4"], "--output: got nothing"),
        ("cache-states", ["--output=o", "--codec=int4"], "--codec: got 'int4', expected one of"),
        ("cache-states", ["--output=o", "--k=3"], "--k"),
        ("cache-states", ["--output"], "--output\n      got nothing"),
        ("cache-states", ["--output=o", "--teacher.source=remote"], "expected live"),
        ("cache-states", ["--output=o", "--packing.attention=concatenated"], "expected isolated"),
        ("cache-logits", ["--k=3"], "--output: got nothing"),
        ("cache-logits", ["--output=o", "--k=0"], "--k: got '0', expected an integer of 1"),
        ("cache-logits", ["--output=o", "--k=-2"], "--k: got '-2'"),
        ("cache-logits", ["--output=o", "--k=many"], "--k: got 'many'"),
        ("cache-logits", ["--output=o", "--codec=exact"], "--codec"),
        ("teacher", [], "--listen: got nothing"),
        ("teacher", ["--listen=localhost:99999"], "--listen: got port 99999"),
        ("teacher", ["--listen=s", "--codec=zip"], "--codec: got 'zip'"),
        ("teacher", ["--listen=s", "--teacher.source=cache"], "expected live"),
    ],
)
def test_wrong_arguments_end_in_2(live, tmp_path, monkeypatch, capsys, name, flags, says):
    monkeypatch.chdir(tmp_path)
    if any("source" in flag for flag in flags):
        flags = [*flags, "--teacher.path=p"]
    assert main(asked(tmp_path, live[1], name, *flags)) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
