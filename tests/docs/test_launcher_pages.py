"""The pages on launchers: commands reach `pixelrag`, YAML loads, and no variable is missing.

torchrun, deepspeed, srun, sbatch, kubectl and sky are stand-ins here; `tests/distributed` runs the
first two for real, and each page says what has run where.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from pixelrag.cli import COMMANDS
from pixelrag.config.base import load
from pixelrag.config.flags import SHORTCUTS
from pixelrag.config.jobs import JOBS, config_class, job_of
from pixelrag.config.problems import options_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "launchers.md", *sorted((ROOT / "docs" / "launchers").glob("*.md"))]
STAND_INS = {
    "torchrun": 'echo "ran $@"',
    "deepspeed": 'echo "ran $@"',
    "srun": 'echo "ran $@"',
    "scontrol": "echo node7",
    # sbatch [--nodes N] SCRIPT ...: here and now, with what Slurm would set.
    "sbatch": 'shift 2; SLURM_SUBMIT_DIR=$PWD SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n exec bash "$@"',
    "kubectl": 'for word; do case $word in *.yaml) ls $word ;; esac; done; echo "ran $1"',
    "sky": 'for word; do case $word in *.yaml) ls $word ;; esac; done; echo "ran $1"',
}


def blocks(page: Path, language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


LINES = [
    pytest.param(line, id=f"{page.stem}: {line[:60]}")
    for page in PAGES
    for block in blocks(page, "bash")
    for line in block.splitlines()
]
CONFIGS = [pytest.param(block, id=page.stem) for page in PAGES for block in blocks(page, "yaml")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a reader would stand, with the stand-ins in `bin`."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("launchers", "ds_configs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "hosts").write_text("# two of eight\nhost1 slots=8\nhost2 slots=8\n")
    (folder / "bin").mkdir()
    for name, body in STAND_INS.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("line", LINES)
def test_a_command_reaches_what_it_names(line: str, place: Path) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=place,
        env={"PATH": f"{place / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout[done.stdout.index("ran ") :])
    if shlex.split(line)[0] in ("kubectl", "sky"):
        return
    module = next(i for i, word in enumerate(words) if word in ("-m", "--module"))
    assert words[module + 1] == "pixelrag"
    name, *arguments = words[module + 2 :]
    assert name in COMMANDS
    options = set().union(*(options_of(config_class(job)) for job in JOBS))
    known = {*options, *SHORTCUTS, "config", "path", "quick"}
    for word in arguments:
        assert not word.startswith("--") or word[2:] in known, word


@pytest.mark.parametrize("block", CONFIGS)
def test_a_configuration_loads(block: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "run.yaml").write_text(block)
    argv = ["--config", str(tmp_path / "run.yaml")]
    config, _ = load(config_class(job_of(argv)), argv)
    assert config.output_dir.startswith("/shared/runs/")


def test_every_variable_that_is_read_is_told() -> None:
    told = set()
    for page in PAGES:
        rows = re.findall(r"^\|(.*?)\|", page.read_text("utf-8"), re.MULTILINE)
        told |= {name for row in rows for name in re.findall(r"`([A-Z][A-Z_]+)`", row)}
    sources = [path.read_text("utf-8") for path in (ROOT / "pixelrag").rglob("*.py")]
    sources = [text for text in sources if "environ" in text]
    read = set(re.findall(r"environ(?:\.\w+\(|\[)\s*\"([A-Z][A-Z_]+)\"", "\n".join(sources)))
    read |= set(re.findall(r"\"((?:OMPI|SLURM)_[A-Z_]+)\"", "\n".join(sources)))
    for script in (ROOT / "launchers").iterdir():
        lines = [x for x in script.read_text("utf-8").splitlines() if not x.startswith("#")]
        read |= set(re.findall(r"\$\{?([A-Z][A-Z_]+)", "\n".join(lines)))
    ours = {"PIXELRAG_RENDEZVOUS_FILE", "BASH_SOURCE", "PWD"}  # our own processes; the shell
    assert len(read) > 30
    assert read - told - ours == set()


def test_every_launcher_has_a_page_with_its_four_parts() -> None:
    overview = PAGES[0].read_text("utf-8")
    assert len(PAGES) == 6
    for page in PAGES[1:]:
        assert f"(launchers/{page.name})" in overview
        text = page.read_text("utf-8")
        for part in (
            "**What has run where.**",
            "## A worked example",
            "## Batch arithmetic",
            "## Environment variables",
        ):
            assert part in text, (page.name, part)
