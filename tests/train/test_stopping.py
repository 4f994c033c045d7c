"""Being asked to stop: by a signal or a file, while loading, training, evaluating or indexing."""

import json

import pytest

from pixelrag.train.checkpoint import verify_dir
from tests.distributed.rag_runs import flags, make_material
from tests.train import nursery
from tests.train.material import assert_equal_runs, command, lines_of, merged

pytestmark = pytest.mark.distributed

STOPPED_AT = "tests.train.faults:signal_at_stop_point"
ENCODE = "pixelrag.retrieval.encode"


@pytest.mark.parametrize(
    ("engine", "fault", "step"),
    [
        ("ddp", {"setup": "tests.train.faults:signal_self", "payload": {"batch": 9}}, 5),
        # Queries are encoded, documents not yet.
        ("zero3", {"setup": STOPPED_AT, "payload": {"module": ENCODE, "call": 2}}, 2),
    ],
)
def test_sigterm_saves_and_resumes(start, tmp_path, engine, fault, step):
    """One rank of two gets the signal, in the middle of a step, or of an evaluation."""
    settings = {"engine": {"name": engine}, "ema": {"decay": 0.7, "start_step": 1}}
    start("straight", settings, nproc=2).wait().check()
    stopped = tmp_path / "stopped"
    fault["payload"]["rank"] = 1
    ended = start("stopped", settings, nproc=2, **fault).wait().check()
    assert f"stopped at step {step} of 6: SIGTERM (rank 1)" in ended.outputs[0]
    assert ended.outputs[1] == ""
    checkpoint = stopped / f"checkpoint-{step}"
    assert (stopped / "PREEMPTED").read_text() == f"SIGTERM (rank 1)\n{checkpoint}\n"
    verify_dir(checkpoint)
    assert not (stopped / "last").exists()
    was_evaluated = json.loads((stopped / "metrics.jsonl").read_text().splitlines()[-1])
    assert ("eval/loss" in was_evaluated) == (engine == "ddp")
    start("stopped", settings, nproc=2).wait().check()
    assert not (stopped / "PREEMPTED").exists()
    assert_equal_runs(stopped, tmp_path / "straight")


def test_a_run_that_is_still_loading_stops(start, tmp_path):
    """With nothing to save, and nothing to go on from."""
    code = {"checkpoint": {"preempted_exit_code": 75}}
    fault = {"module": "pixelrag.train.run_state", "call": 1, "rank": 1}
    ended = start("run", code, nproc=2, setup=STOPPED_AT, payload=fault).wait()
    assert ended.codes == [75, 75]
    assert "stopped before training began: SIGTERM (rank 1)" in ended.outputs[0]
    assert ended.outputs[1] == ""
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["PREEMPTED"]


def test_a_distillation_stops_in_its_evaluation(lesson, tmp_path):
    often = {"eval": {"every_steps": 1, "batch_size": 1}}
    for name in ("straight", "stopped"):
        config = merged(lesson, often, {"output_dir": str(tmp_path / name)})
        arguments = command(tmp_path, config, "distill")
        if name == "stopped":
            fault = {"module": "pixelrag.train.distill_eval", "call": 2}
            ended = nursery.run(arguments, setup=STOPPED_AT, payload=fault).check()
            assert "stopped at step 1 of 3: SIGTERM" in ended.text
        nursery.run(arguments).check()
    assert lines_of(tmp_path / "stopped") == lines_of(tmp_path / "straight")


def test_a_stop_file_stops_with_the_code_that_the_user_chose(start, tmp_path):
    """One that appears in a step, and one that is there from the start."""
    code = {"checkpoint": {"preempted_exit_code": 75}}
    stop, fault = tmp_path / "run" / "STOP", {"setup": "tests.train.faults:touch"}
    ended = start("run", code, nproc=2, **fault, payload={"path": str(stop), "batch": 1}).wait()
    assert ended.codes == [75, 75]
    assert "stopped at step 1 of 6: STOP file" in ended.outputs[0]
    assert not stop.exists()
    assert (tmp_path / "run" / "checkpoint-1").is_dir()
    stop.touch()
    ended = start("run", code, nproc=2).wait()
    assert ended.codes == [75, 75]
    assert "stopped before training began: STOP file" in ended.outputs[0]
    assert not stop.exists()
    assert (tmp_path / "run" / "PREEMPTED").read_text().splitlines() == [
        f"STOP file {stop}",
        str(tmp_path / "run" / "checkpoint-1"),
    ]


def test_a_rag_run_stops_while_it_indexes_and_while_it_answers(tmp_path):
    make_material(tmp_path)
    run = tmp_path / "run"
    arguments = ["rag", *flags(tmp_path, run), "--optim.max_steps=1", "--checkpoint.every_steps=1"]

    fault = {"module": "pixelrag.retrieval.switch", "call": 1}
    ended = nursery.run(arguments, setup=STOPPED_AT, payload=fault).check()
    assert "stopped before training began: SIGTERM" in ended.text
    assert (run / "PREEMPTED").read_text() == "SIGTERM\nno checkpoint\n"
    assert (run / "index" / "gen-000001.part" / "work" / "spec.json").exists()

    fault = {"module": "pixelrag.train.rag_eval", "call": 1}
    ended = nursery.run(arguments, setup=STOPPED_AT, payload=fault).check()
    assert "stopped at step 1 of 1: SIGTERM" in ended.text
    assert len(lines_of(run)) == 1
    assert json.loads((run / "checkpoint-1" / "state.json").read_text())["evaluation_due"]


def test_a_signal_when_all_is_written_changes_nothing(start, tmp_path):
    ended = start("run", setup="tests.train.faults:signal_when_all_is_written").wait().check()
    assert "done: the model is in" in ended.text
    assert not (tmp_path / "run" / "PREEMPTED").exists()


def test_a_storm_of_signals_is_one(start, tmp_path):
    """All three kinds, hundreds of them, to both ranks: as from one."""
    storm = {"setup": "tests.train.faults:storm", "payload": {"batch": 5}}
    start("straight", nproc=2).wait().check()
    ended = start("stopped", nproc=2, **storm).wait().check()
    assert "stopped at step 3 of 6: SIG" in ended.outputs[0]
    assert ended.outputs[1] == ""
    start("stopped", nproc=2).wait().check()
    assert_equal_runs(tmp_path / "stopped", tmp_path / "straight")


@pytest.mark.parametrize(("lag", "step"), [(0, 2), (1, 3)])
def test_a_rag_step_that_waits_for_its_index_stops(tmp_path, lag, step):
    """Behind the snapshot that it has just handed over, and a step later; resumed alike."""
    make_material(tmp_path)
    fault = {"setup": "tests.train.faults:signal_while_it_waits"}
    for name in ("straight", "stopped"):
        arguments = [
            *("rag", *flags(tmp_path, tmp_path / name)),
            *("--refresh.every_steps=2", f"--refresh.deterministic_lag={lag}"),
            "--batch.per_device_batch_size=4",
        ]
        if name == "stopped":
            payload = {"step": step, "rank": 1}
            ended = nursery.run(arguments, nproc=2, **fault, payload=payload).check()
            assert f"stopped at step {step} of 4: SIGTERM (rank 1)" in ended.outputs[0]
        nursery.run(arguments, nproc=2).check()
    figures = [lines_of(tmp_path / name) for name in ("stopped", "straight")]
    for line in (line for lines in figures for line in lines):
        line.pop("index/generation", None)  # counts attempts
    assert figures[0] == figures[1]
    states = [
        json.loads((tmp_path / name / "checkpoint-4" / "state.json").read_text())
        for name in ("stopped", "straight")
    ]
    events = [[(e["step"], e["kind"]) for e in s["position"]["index"]["history"]] for s in states]
    assert events[0] == events[1]
