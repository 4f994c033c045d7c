"""What a run leans on: loader workers, and the machine's clock."""

import json
import re

import pytest

from tests.faults.jobs import JOBS, arguments, make_material
from tests.train import nursery
from tests.train.material import lines_of

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("slow", None),
        ("stuck", r"rank 1: One of 1 data workers gave nothing for 4 seconds \(data\.worker_time"),
        ("killed", r"rank 1.*data workers? failed: .*killed"),
    ],
)
def test_a_loader_worker(tmp_path, how, says):
    """Of one rank of two; where it is only slow, nothing changes."""
    make_material(tmp_path / "material", "contrastive")
    flags = ["--optim.max_steps=4", "--data.num_workers=1", "--data.worker_timeout_seconds=4"]
    command = arguments(tmp_path / "material", "contrastive", tmp_path / "run", *flags)
    fault = {"setup": "tests.faults.inject:worker", "payload": {"how": how, "rank": 1}}
    ended = nursery.run(command, nproc=2, **fault)
    if says is None:
        ended.check()
        others = ["--data.num_workers=0", f"--output_dir={tmp_path / 'straight'}"]
        nursery.run([*command, *others], nproc=2).check()
        assert lines_of(tmp_path / "run") == lines_of(tmp_path / "straight")
        return
    # A dead worker is told of where the main thread is, in a collective perhaps: not together.
    assert ended.codes in ([3, 3], [6, 3]), ended.text
    assert len(re.findall("error: ", ended.outputs[0])) == 1
    assert re.search(says, ended.outputs[0]), ended.text
    assert "data.num_workers: 0" in ended.outputs[0]
    assert "Traceback" not in ended.text


@pytest.mark.parametrize("job", JOBS)
def test_a_clock_that_jumps_changes_nothing(tmp_path, job):
    """Rates, time-outs and schedules go by a clock that nobody sets."""
    make_material(tmp_path / "material", job)
    for name in ("straight", "run"):
        command = arguments(tmp_path / "material", job, tmp_path / name, "--optim.max_steps=4")
        fault = {} if name == "straight" else {"setup": "tests.faults.inject:jumping_clock"}
        nursery.run(command, **fault, payload={}).check()
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "straight")
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    rates = {k: v for line in lines for k, v in line.items() if k.startswith("perf/")}
    assert rates
    assert all(0 < value < 1e9 for value in rates.values()), rates
    assert 0 < json.loads((tmp_path / "run" / "summary.json").read_text())["seconds"] < 3600
