"""The jobs and their configurations, and which of them a command line is about."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from pixelrag.config.base import JobConfig
from pixelrag.config.help import help_text
from pixelrag.config.problems import sections_of
from pixelrag.config.yaml_file import read_yaml

JOBS = {
    "contrastive": "pixelrag.config.contrastive:ContrastiveConfig",
    "distill": "pixelrag.config.distill:DistillConfig",
    "rag": "pixelrag.config.rag:RagConfig",
}
# Commands that take a job's configuration with sections of their own added.
EXTENDED = {"mine": "pixelrag.config.mine:MineConfig"}


def config_class(job: str) -> type[JobConfig]:
    """The configuration of a job of `JOBS`, or of a command of `EXTENDED`."""
    module, _, name = (JOBS | EXTENDED)[job].partition(":")
    return getattr(import_module(module), name)


def job_of(argv: Sequence[str]) -> str:
    """The job that `--config` files and flags are about: the one most of whose own sections occur.

    Sections that all jobs have say nothing. Where nothing speaks for any job it is the first, whose
    errors then tell what is missing.
    """
    files = [Path(value) for flag, value in _flags(argv) if flag == "config"]
    named = {name for file in files for name in read_yaml(file).values}
    named |= {flag.partition(".")[0].replace("-", "_") for flag, _ in _flags(argv)}
    sections = {job: set(sections_of(config_class(job))) for job in JOBS}
    shared = set.intersection(*sections.values())
    return max(JOBS, key=lambda job: len(named & (sections[job] - shared)))


def _flags(argv: Sequence[str]) -> list[tuple[str, str]]:
    """(name, value) of each flag, for a first look; `load` judges them."""
    found = []
    for index, word in enumerate(argv):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            follows = argv[index + 1] if index + 1 < len(argv) else ""
            found.append((name, value if equals else follows))
    return found


def help_of(program: str, summary: str, job: str, own: Mapping[str, str]) -> str:
    """The help text of a command of one job, or of "any"."""
    if job != "any":
        return help_text(program, summary, config_class(job), own)
    flags = "".join(f"  --{name}  {meaning}\n" for name, meaning in own.items())
    options = "\n".join(f"  pixelrag {name} --help" for name in JOBS)
    return (
        f"usage: {program} [{'|'.join(JOBS)}] [--config FILE ...] [--SECTION.OPTION VALUE ...]\n\n"
        f"{summary[0].upper()}{summary[1:]}.\n\n{flags}"
        "The other options are those of the job: the one that is named, else the one that the\n"
        f"configuration is of; see\n{options}\n"
    )
