"""The command table: fast help, launcher flags, errors as one message with the right exit code."""

import importlib.util
import os
import subprocess
import sys
import time

import pytest

from pixelrag import cli, errors

PYTHON = [sys.executable, "-m", "pixelrag"]
HEAVY = "{'torch', 'transformers', 'deepspeed', 'peft', 'datasets', 'numpy', 'PIL', 'rich'}"


def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PYTHON, *words], capture_output=True, text=True, timeout=60, env=os.environ | (env or {})
    )


def loaded_by(words: list[str], heavy: str) -> str:
    """Which modules of the set `heavy` (Python text) a command line imports."""
    code = (
        f"import sys; from pixelrag.cli import main; main({words!r});"
        f" print('LOADED', sorted(({heavy}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.rpartition("LOADED ")[2].strip()


def test_help_imports_neither_torch_nor_pydantic():
    assert loaded_by(["--help"], HEAVY + " | {'pydantic', 'pydantic_settings', 'yaml'}") == "[]"


@pytest.mark.parametrize("words", [["contrastive"], ["bench", "kd-chunk"]])
def test_help_of_a_command_imports_no_torch(words: list[str]):
    assert loaded_by([*words, "--help"], HEAVY) == "[]"


@pytest.mark.parametrize(("words", "bound"), [(["--help"], 0.5), (["contrastive", "--help"], 1.0)])
def test_help_is_fast(words: list[str], bound: float):
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run(*words)
        times.append(time.perf_counter() - start)
    assert min(times) < bound, times


def test_help_lists_exactly_the_commands():
    shown = run("--help")
    assert shown.returncode == 0
    listed = shown.stdout.partition("commands\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == list(cli.COMMANDS)


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_listed_command_is_there(name: str):
    modules = list(cli.DEMOS.values()) if name == "demo" else [cli.COMMANDS[name].module]
    for module in modules:
        assert importlib.util.find_spec(module) is not None, f"{name} needs {module}"


def test_no_command_shows_the_usage_and_fails():
    shown = run()
    assert shown.returncode == 2
    assert "usage: pixelrag" in shown.stdout


def test_version():
    assert run("--version").stdout.startswith("pixelrag ")


def test_unknown_command_names_the_nearest():
    shown = run("contrastiv")
    assert shown.returncode == 2
    assert shown.stderr.startswith("pixelrag: error: ")
    assert "did you mean contrastive?" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_config_mistakes_end_in_code_2_without_traceback():
    shown = run("contrastive", "--optim.learning_rte", "1", "--nonsense")
    assert shown.returncode == 2
    assert "did you mean optim.learning_rate?" in shown.stderr
    assert "--nonsense" in shown.stderr
    assert "model.name_or_path" in shown.stderr
    assert "Traceback" not in shown.stderr
    assert shown.stdout == ""


@pytest.mark.parametrize("place", [0, 1, 2])
def test_debug_anywhere_shows_the_traceback(place: int):
    words = ["contrastive", "--seed=x"]
    words.insert(place, "--debug")
    shown = run(*words)
    assert shown.returncode == 1
    assert "Traceback" in shown.stderr
    assert "ConfigError" in shown.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--local_rank=1", "validate", "--x", "1"],
        ["--local-rank=1", "validate", "--x", "1"],
        ["--local_rank", "1", "validate", "--x", "1"],
        ["validate", "--local-rank", "1", "--x", "1"],
        ["validate", "--x", "1", "--local_rank=1"],
    ],
)
def test_launcher_flags_are_stripped_anywhere(words: list[str]):
    assert cli.strip_launcher_flags(words) == ["validate", "--x", "1"]


def test_flags_that_only_begin_alike_are_kept():
    words = ["validate", "--local_ranks=1"]
    assert cli.strip_launcher_flags(words) == words


def test_a_rank_says_which_one_it_is():
    shown = run("nothing-like-it", env={"WORLD_SIZE": "4", "RANK": "3"})
    assert shown.stderr.startswith("pixelrag: [rank 3] error: ")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("ConfigError", 2),
        ("DataError", 3),
        ("ModelError", 4),
        ("CheckpointError", 5),
        ("EngineError", 6),
        ("NonFiniteError", 7),
        ("IndexError_", 8),
        ("ProvenanceError", 9),
    ],
)
def test_each_error_ends_in_its_code(name, code, monkeypatch, capsys):
    def fail(_: list[str]) -> int:
        raise getattr(errors, name)("what, where, got, expected, remedy")

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["verify"]) == code
    assert capsys.readouterr().err.endswith("error: what, where, got, expected, remedy\n")


def test_a_fault_of_ours_is_not_dressed_up(monkeypatch):
    def fail(_: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["verify"])


def test_an_interrupt_ends_in_130(monkeypatch, capsys):
    def fail(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["verify"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m pixelrag contrastive --help | true; echo ${{PIPESTATUS[0]}}"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert shown.stderr == ""
    assert shown.stdout.strip() == "141"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("export a --to onnx --output b", "export: --to: got 'onnx', expected one of hf, adapter"),
        ("verify --nproc two", "verify: --nproc: got 'two', expected a whole number"),
        ("launch-check --timeout", "launch-check: --timeout: got no value, expected one"),
        ("inspect", "inspect: got too few arguments, expected also path"),
        ("compare a b --c", "compare: got --c, expected no such argument; see pixelrag compare"),
        ("demo rag --seeds 0", "demo rag: --seeds: got 0, expected at least 1"),
    ],
)
def test_every_command_says_what_it_got_and_expected(words, told, capsys):
    assert cli.main(words.split()) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"pixelrag: error: pixelrag {told}")
    assert "usage:" not in shown


def test_demo_wants_a_known_job():
    shown = run("demo", "contrastve")
    assert shown.returncode == 2
    assert "contrastive" in shown.stderr


def test_the_console_script_is_declared():
    import tomllib
    from pathlib import Path

    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"pixelrag": "pixelrag.cli:run"}
    assert project["project"]["name"] == "pixelrag-trainer"


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_signal_in_the_interpreters_exit_changes_nothing(ranks):
    script = """
import atexit, os, signal
from pixelrag import cli
def all_is_done():
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)
    return 0
cli.main = all_is_done
cli.run()
"""
    environment = os.environ | {"WORLD_SIZE": ranks}
    done = subprocess.run([sys.executable, "-c", script], timeout=60, env=environment)
    assert done.returncode == 0
