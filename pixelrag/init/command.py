"""The command: look at the files, write the configuration, say what to run next."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from pixelrag.arguments import Parser
from pixelrag.config.base import JobConfig, load
from pixelrag.config.flags import parse_flags
from pixelrag.config.jobs import JOBS, config_class
from pixelrag.config.problems import report
from pixelrag.console import say
from pixelrag.errors import ConfigError
from pixelrag.init.starter import Choice, override, render


def main(argv: Sequence[str]) -> int:
    """Write a starter configuration; returns the exit code.

    Raises:
        ConfigError: the command line is wrong, or the file to write is there already.
        DataError: a data file cannot be used for this job; names file and line.
        ModelError: a model that was asked for is not there.
    """
    parser = Parser(
        prog="pixelrag init",
        description="Write a commented starter configuration for your own files, after a look at "
        "them. Further options of the job (--SECTION.OPTION VALUE) are taken into it.",
        epilog="pixelrag JOB --help lists the options, docs and README the forms of rows.",
        allow_abbrev=False,
    )
    parser.add_argument("job", choices=list(JOBS))
    parser.add_argument(
        "--data", nargs="+", required=True, metavar="FILE",
        help="your files: rows to train on, held-out ones (told by names such as dev.jsonl or "
        "test.jsonl), and for contrastive a corpus, for rag the knowledge base",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, default=Path("config.yaml"),
        help="file to write (default config.yaml); one that is there is never overwritten",
    )  # fmt: skip
    options, rest = parser.parse_known_args(list(argv))
    kind = config_class(options.job)
    line = parse_flags(rest, kind)
    if line.problems:
        raise ConfigError(report(line.problems))
    if options.output.exists():
        raise ConfigError(f"--output {options.output} exists; nothing is overwritten, name another")
    looking = import_module(f"pixelrag.init.{options.job}")
    choices = override(looking.choices(options.data, line.values), line.values)
    text = _text(options.job, kind, choices)
    _require_valid(text, options.output.name, kind)
    _write(options.output, text)
    say(f"wrote {options.output}; read it: each value has its reason beside it")
    for words in _next(options.job, str(options.output)):
        say(f"  {words}")
    return 0


def _text(job: str, kind: type[JobConfig], choices: list[Choice]) -> str:
    head = [
        f"A start for pixelrag {job}, chosen by pixelrag init after a look at the files. Paths are "
        "relative to the folder that commands are run in. Lines that are commented out are "
        f"options to consider; pixelrag {job} --help lists all of them."
    ]
    return render(head, choices, list(kind.model_fields))


def _require_valid(text: str, name: str, kind: type[JobConfig]) -> None:
    """What was asked for on the command line may contradict what was chosen, or itself."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_text(text, encoding="utf-8")
        try:
            load(kind, ["--config", str(path)])
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{folder}/", "")) from error


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.link(temporary, path)  # unlike a rename, never over another file
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _next(job: str, path: str) -> list[str]:
    config = f"--config {shlex.quote(path)}"
    lines = {
        f"pixelrag validate {config}": "checks every row, and says how long the run will be",
        f"pixelrag plan {config} --device h100": "predicts memory and time on such GPUs",
        f"pixelrag {job} {config}": "trains",
        f"torchrun --nproc_per_node 2 -m pixelrag {job} {config}": "trains on two devices",
    }
    width = max(map(len, lines))
    return [f"{words:<{width}}  # {why}" for words, why in lines.items()]
