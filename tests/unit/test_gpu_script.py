"""`benchmarks/gpu.sh`, with a stand-in for `pixelrag`: shares of time, what stays, what it says."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.sh"
# Writes a row and then takes its time, as a suite that measures case after case.
STAND_IN = """\
#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
[ "$2" = --report ] && exit 0
while [ "$1" != --output ]; do suite=${suite:-$2}; shift; done
[ "$suite" = broken ] && exit 4
echo '{}' > "$2/$suite.jsonl"
[ "$suite" = slow ] && exec sleep 30
exit 0
"""


@pytest.fixture
def bench(tmp_path):
    stand_in = tmp_path / "pixelrag"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)

    def _bench(shares: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PIXELRAG": str(stand_in), "SHARES": shares, **variables}
        command = [str(SCRIPT), str(tmp_path / "out")]
        return subprocess.run(command, env=env, text=True, capture_output=True, timeout=60)

    return _bench


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def test_a_late_suite_ends_and_keeps_its_rows(bench, tmp_path):
    ended = bench("slow 1 data 20", PROFILE="b200")
    assert ended.returncode == 0, ended.stderr
    assert "ended before they were done: slow (1 s)" in ended.stdout
    *suites, report = calls(tmp_path)
    assert [call.split()[1] for call in suites] == ["slow", "data"]
    assert all("--profile b200" in call for call in suites)
    assert "slow.jsonl" in report
    assert "data.jsonl" in report


def test_a_suite_that_fails_is_named_and_the_others_run(bench, tmp_path):
    ended = bench("broken 20 data 20", PROFILE="b200")
    assert ended.returncode == 1
    assert "failed: broken" in ended.stderr
    assert "--report" in calls(tmp_path)[-1]


@pytest.mark.parametrize(("gpu", "profile"), [("NVIDIA B200", "b200"), ("NVIDIA H100", "h200")])
def test_the_profile_is_the_devices(bench, tmp_path, gpu, profile):
    there = tmp_path / "bin"
    there.mkdir()
    (there / "nvidia-smi").write_text(f"#!/bin/sh\necho {gpu}\n")
    (there / "nvidia-smi").chmod(0o755)
    assert bench("data 20", PATH=f"{there}:{os.environ['PATH']}", PROFILE="").returncode == 0
    assert f"--profile {profile}" in calls(tmp_path)[0]


def test_without_a_gpu_it_says_so(bench, tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    ended = bench("data 20", PATH=f"{tmp_path}:{os.environ['PATH']}", PROFILE="")
    assert ended.returncode == 2
    assert "no GPU" in ended.stderr


def test_its_shares_fit_into_eight_minutes():
    (line,) = [text for text in SCRIPT.read_text().splitlines() if text.startswith("shares=")]
    seconds = [int(word.rstrip('"}')) for word in line.split()[1::2]]
    assert sum(seconds) + 20 <= 480
