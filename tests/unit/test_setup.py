"""`make install`: installs once, again when what it installs changes, and never believes a ruin.

A stand-in for Python writes down what it is asked; the real installation is what CI itself runs on.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_IN = """\
#!/bin/bash
echo "$*" >> "$CALLS"
case "$*" in
  *version_info*) exit "${TOO_OLD:-0}" ;;
  *ensurepip*) exit "${NO_VENV:-0}" ;;
  "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  "-m pip install"*) touch installing; sleep "${PIP_SECONDS:-0}"; exit "${PIP_CODE:-0}" ;;
  "-m pytest"*) exit "${TESTS_CODE:-0}" ;;
  -V) echo "Python 3.0.0" ;;
esac
"""


class Project:
    """A copy of what `make install` reads, with the stand-in as the only Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.calls.touch()
        for name in ("Makefile", "pyproject.toml", "constraints-cpu.txt"):
            shutil.copy(ROOT / name, folder)
        self.python = folder / "standin"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "MFLAGS"}
        return subprocess.Popen(
            ["make", f"PYTHON={self.python}", *words],
            cwd=self.folder,
            env=clean | {"CALLS": str(self.calls)} | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def make(self, *words: str, **environment: str) -> tuple[int, str]:
        process = self.start(*words, **environment)
        output, _ = process.communicate(timeout=30)
        return process.returncode, output

    def installs(self) -> int:
        return self.calls.read_text().count("--editable")

    @property
    def stamps(self) -> list[Path]:
        return list((self.folder / ".venv").glob(".pixelrag-installed"))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    if shutil.which("make") is None:
        pytest.skip("there is no make here")
    return Project(tmp_path)


def test_the_second_run_installs_nothing(project: Project):
    code, output = project.make("install")
    assert code == 0, output
    assert project.installs() == 1
    assert "--constraint constraints-cpu.txt --editable .[cpu,demo,plot,st,ray,docs,dev]" in (
        project.calls.read_text()
    )
    calls = project.calls.read_text()
    assert project.make("install") == (0, "")
    assert project.calls.read_text() == calls


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints-cpu.txt"])
def test_a_change_installs_again(project: Project, name: str):
    project.make("install")
    with (project.folder / name).open("a") as file:
        file.write("# changed\n")
    project.make("install")
    assert project.installs() == 2


def test_a_failed_installation_leaves_no_stamp(project: Project):
    code, _ = project.make("install", PIP_CODE="1")
    assert code != 0
    assert project.stamps == []
    assert project.make("install")[0] == 0
    assert project.installs() == 2


def test_a_killed_installation_leaves_no_stamp(project: Project):
    project.make("install")
    (project.folder / "installing").unlink()
    with (project.folder / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    process = project.start("install", PIP_SECONDS="30")
    while not (project.folder / "installing").exists():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    assert project.stamps == []
    project.make("install")
    assert project.installs() == 3


def test_make_test_installs_and_passes_the_exit_code_on(project: Project):
    assert project.make("test")[0] == 0
    assert project.installs() == 1
    assert project.make("test", TESTS_CODE="1")[0] != 0
    assert project.installs() == 1


def test_an_old_python_is_refused_with_a_remedy(project: Project):
    code, output = project.make("install", TOO_OLD="1")
    assert code != 0
    assert "expected 3.11 or newer" in output
    assert "PYTHON=" in output


def test_a_python_without_venv_is_refused_with_a_remedy(project: Project):
    code, output = project.make("install", NO_VENV="1")
    assert code != 0
    assert "python3-venv" in output
    assert project.installs() == 0


def test_ci_fails_where_either_part_fails(tmp_path: Path):
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "make").write_text('#!/bin/bash\necho "$1" >> ran\n[ "$1" != "$BROKEN" ]\n')
    (tmp_path / "make").chmod(0o755)
    for broken, code in (("none", 0), ("lint", 1), ("test", 1)):
        (tmp_path / "ran").unlink(missing_ok=True)
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BROKEN": broken}
        done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, env=environment)
        assert done.returncode == code, broken
        assert (tmp_path / "ran").read_text().split() == ["lint", "test"]
