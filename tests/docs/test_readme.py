"""What the README shows is what there is: its quick commands run, its names exist."""

import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pixelrag.cli import COMMANDS
from pixelrag.config.flags import SHORTCUTS
from pixelrag.config.jobs import JOBS, config_class
from pixelrag.config.problems import options_of

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
QUICK = [block for block in BLOCKS if "--help" in block or "pixelrag validate" in block]
COMMAND_LINES = [
    shlex.split(line, comments=True)
    for block in BLOCKS
    for line in block.splitlines()
    if re.match(r"(pixelrag|torchrun|deepspeed|make)\b", line)
]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory):
    """Runs bash in a folder where `pixelrag` is the code under test; a script that ran is kept."""
    tmp_path = tmp_path_factory.mktemp("readme")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "pixelrag").write_text(f'#!/bin/sh\nexec {sys.executable} -m pixelrag "$@"\n')
    (folder / "pixelrag").chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    environment = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }

    @functools.cache
    def _run(script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return _run


def test_there_are_quick_blocks():
    assert len(QUICK) == 3


@pytest.mark.parametrize("block", QUICK, ids=lambda block: block.split("\n")[0][:30])
def test_the_quick_commands_run(block: str, shell):
    done = shell(block)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_the_example_is_valid_and_counts_its_rows(shell):
    pairs, chats = [block for block in QUICK if "validate" in block]
    assert "my/train.jsonl: 3 rows, 6 distinct documents, 0 bad rows" in shell(pairs).stdout
    assert "my/chats.jsonl: 2 rows, 0 bad" in shell(chats).stdout
    assert max(len(pairs.splitlines()), len(chats.splitlines())) <= 22


def test_every_command_and_only_those_is_described():
    assert re.findall(r"^\| `pixelrag ([\w-]+)` \|", README, re.MULTILINE) == list(COMMANDS)


def test_every_command_line_names_what_exists():
    options = set().union(*(options_of(config_class(job)) for job in JOBS))
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(COMMAND_LINES) >= 8
    for words in COMMAND_LINES:
        if words[0] == "make":
            assert words[1] in targets
            continue
        job = words[words.index("pixelrag") + 1 :]
        assert job[0] in COMMANDS or job[0] == "--help"
        for word in job[1:]:
            if word.startswith("--"):
                name = word[2:]
                own = COMMANDS[job[0]].own if job[0] in COMMANDS else ()
                assert name in options | {*SHORTCUTS, *own, "config", "help"}, word


def test_every_file_that_is_named_exists():
    named = set(re.findall(r"\b((?:recipes|ds_configs)/[\w.]+\.\w+)", README))
    assert len(named) >= 4
    for name in named:
        assert (ROOT / name).is_file(), name


def test_the_exit_codes_are_those_of_the_errors():
    from pixelrag import errors

    codes = {int(code) for code in re.findall(r"^\| (\d) \|", README, re.MULTILINE)}
    raised = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type)}
    assert codes == raised | {0}
