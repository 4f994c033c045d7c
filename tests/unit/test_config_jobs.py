"""Which job a command line is about, and what every command's help says without loading torch."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pixelrag import cli
from pixelrag.config.base import JobConfig
from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.distill import DistillConfig
from pixelrag.config.jobs import JOBS, config_class, job_of

CONTRASTIVE = {"model": {"name_or_path": "m"}, "data": {"train": "t"}, "optim": {"max_steps": 1}}
DISTILL = {"student": {"name_or_path": "s"}, "data": {"train": "t"}, "optim": {"max_steps": 1}}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Configuration files c.yaml, d.yaml, and common.yaml of what all jobs have."""
    monkeypatch.chdir(tmp_path)
    common = {"seed": 3, "data": {"train": "t"}, "batch": {"per_device_batch_size": 2}}
    for name, content in (("c", CONTRASTIVE), ("d", DISTILL), ("common", common)):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(content))  # JSON is YAML


def test_every_job_has_a_configuration():
    assert config_class("contrastive") is ContrastiveConfig
    assert config_class("distill") is DistillConfig
    assert all(issubclass(config_class(job), JobConfig) for job in JOBS)


@pytest.mark.parametrize(
    ("words", "job"),
    [
        (["--config", "c.yaml"], "contrastive"),
        (["--config=c.yaml"], "contrastive"),
        (["--config", "d.yaml"], "distill"),
        (["--config=d.yaml", "--engine.device=cpu"], "distill"),
        (["--config", "common.yaml", "--config", "d.yaml"], "distill"),
        (["--config", "d.yaml", "--config", "common.yaml"], "distill"),
        (["--config", "common.yaml", "--student.name_or_path", "s"], "distill"),
        (["--teacher.name-or-path=t"], "distill"),
        (["--packing.length", "128"], "distill"),
        (["--model.name_or_path=m"], "contrastive"),
        (["--student.name_or_path=s", "--seed", "1"], "distill"),
        # A file of one job with a single flag of another: the file has more to say.
        (["--config", "d.yaml", "--teacher.path=p", "--model.pooling=cls"], "distill"),
        # Nothing that only one job has: the first one, whose errors tell what is missing.
        ([], "contrastive"),
        (["--config", "common.yaml"], "contrastive"),
        (["--seed", "1", "--data.train=t"], "contrastive"),
        (["--config", "gone.yaml", "--student.name_or_path=s"], "distill"),
        (["--config"], "contrastive"),
        # The value of a flag is no flag.
        (["--data.train", "student.jsonl", "--model.name_or_path", "teacher"], "contrastive"),
    ],
)
def test_the_job_is_that_of_the_files_and_flags(files, words, job):
    assert job_of(words) == job


def test_a_file_that_is_no_yaml_is_reported_once_the_job_is_known(files, tmp_path, capsys):
    (tmp_path / "broken.yaml").write_text("student: [")
    assert cli.main(["validate", "--config", "broken.yaml"]) == 2
    assert "broken.yaml line 1" in capsys.readouterr().err


def test_what_is_missing_is_told_of_the_job_that_was_meant(files, capsys):
    assert cli.main(["validate", "--config", "d.yaml"]) == 2
    shown = capsys.readouterr().err
    assert "teacher.name_or_path" in shown
    assert "model.name_or_path" not in shown
    assert cli.main(["validate"]) == 2
    assert "model.name_or_path" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "validate"])
def test_the_job_may_be_named(files, capsys, command):
    """Here against the file, which speaks for another one: the word counts."""
    assert cli.main([command, "rag", "--config", "d.yaml"]) == 2
    assert "question_encoder.name_or_path" in capsys.readouterr().err
    assert cli.main([command, "rags", "--config", "d.yaml"]) == 2
    assert "rags\n      unexpected word" in capsys.readouterr().err
    assert cli.main([command, "distill", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: pixelrag {command} distill [--config FILE ...]")
    assert "--student.name_or_path" in shown


def test_answers_are_only_of_rag(files, capsys):
    flags = ["--data.eval=t", "--answers", "a"]
    assert cli.main(["eval", "--config", "c.yaml", *flags]) == 2
    assert "--answers: only a RAG model writes answers" in capsys.readouterr().err
    rag = ["--question_encoder.name_or_path=q", "--generator.name_or_path=g"]
    rag += ["--knowledge_base.source=k", "--data.train=t", "--optim.max_steps=1"]
    without = ["--eval.answers=false", "--checkpoint.best_metric=eval/recall@1"]
    assert cli.main(["eval", *rag, *flags, *without]) == 2
    assert "--answers with eval.answers false" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "mine", "index", "cache-states", "validate"])
def test_only_training_must_be_told_for_how_long(files, capsys, command, monkeypatch):
    """Nothing of it is needed elsewhere; what was given stays."""
    called = []
    module = SimpleNamespace(main=lambda config, *own: called.append(config))
    monkeypatch.setattr(cli, "import_module", lambda name: module)
    rag = ["--question_encoder.name_or_path=q", "--generator.name_or_path=g"]
    rag += ["--knowledge_base.source=k", "--data.train=t"]
    name = {"index": "rag", "cache-states": "distill"}.get(command)
    flags = {"rag": rag, "distill": ["--student.name_or_path=s", "--data.train=t"]}.get(name)
    flags = flags or ["--model.name_or_path=m", "--data.train=t"]
    flags += ["--teacher.name_or_path=t"] if name == "distill" else []
    code = cli.main([command, *flags, "--optim.warmup_steps=3"])
    if command == "validate":
        assert code == 2
        assert "neither optim.max_steps nor optim.num_epochs" in capsys.readouterr().err
        return
    assert (code, called[-1].optim.num_epochs, called[-1].optim.max_steps) == (0, 1, None)
    assert cli.main([command, *flags, "--optim.max_steps=7"]) == 0
    assert (called[-1].optim.num_epochs, called[-1].optim.max_steps) == (None, 7)


HELP = """
import contextlib, io, json, sys
from pixelrag import cli
found = {}
for words in [*([name] for name in cli.COMMANDS), *(["demo", name] for name in cli.DEMOS)]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            code = cli.main([*words, "--help"])
        except SystemExit as end:
            code = end.code or 0
    heavy = {"torch", "transformers", "deepspeed", "peft", "datasets", "PIL"} & set(sys.modules)
    found[" ".join(words)] = [code, out.getvalue(), sorted(heavy)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, list]:
    done = subprocess.run(
        [sys.executable, "-c", HELP], capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", [*cli.COMMANDS, *(f"demo {job}" for job in cli.DEMOS)])
def test_help(helps, name):
    code, text, heavy = helps[name]
    assert (code, heavy) == (0, [])
    assert text.startswith(f"usage: pixelrag {name}")
    # An option's line holds whatever it accepts.
    assert max(len(line) for line in text.splitlines() if not line.startswith("  --")) <= 100
    command = cli.COMMANDS[name.partition(" ")[0]]
    for flag, meaning in command.own.items():
        assert f"  --{flag}  {meaning}\n" in text
    if command.job == "any":
        assert all(f"pixelrag {job} --help" in text for job in JOBS)
    elif command.job is not None:
        assert "  --output_dir  " in text
        assert f"default {config_class(command.job).model_fields['output_dir'].default}" in text
    if name == "demo":
        assert all(job in text for job in cli.DEMOS)
