"""The command table. Everything a command needs is imported once it is chosen, never for `--help`.

`pixelrag X`, `python -m pixelrag X`, and both under torchrun and the deepspeed launcher, end here.
The launchers' own flags are dropped: rank and world are read from the environment alone, that
of srun and mpirun too.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import NoReturn

from pixelrag.distributed import launched
from pixelrag.errors import ConfigError, PixelragError


@dataclass(frozen=True, slots=True)
class Command:
    """A command: what it does in a line, its handler's module, and how its arguments are read.

    With `job` the arguments are options of that job and flags of the command's `own` (name ->
    meaning), and the handler gets the built configuration; with "any", of the job that they name
    (the first word, or else most of the configuration). Without, the handler gets the arguments as
    they stand. What `trains`, or tells of it, must be told for how long.
    """

    summary: str
    module: str
    job: str | None = None
    own: Mapping[str, str] = field(default_factory=dict)
    trains: bool = False


_FOLDER = "folder to write (required)"
_CODEC = "exact, or int8: half the size and inexact (default exact)"


COMMANDS = {
    "init": Command(
        "write a commented starter configuration for your own files", "pixelrag.init.command"
    ),
    "contrastive": Command(
        "train a retriever on (query, document) rows",
        "pixelrag.train.contrastive",
        "contrastive",
        trains=True,
    ),
    "distill": Command(
        "train a small language model on a larger one's distributions",
        "pixelrag.train.distill",
        "distill",
        trains=True,
    ),
    "rag": Command(
        "train encoders and generator together on a knowledge base that renews itself",
        "pixelrag.train.rag",
        "rag",
        trains=True,
    ),
    "validate": Command(
        "check a configuration and every row of its data",
        "pixelrag.validate.command",
        "any",
        {
            "world_size": "processes that the run will have (default: the launcher's, else 1)",
            "device": "device of `pixelrag plan` to estimate the time for (default: this one's)",
        },
        trains=True,
    ),
    "plan": Command(
        "predict memory, traffic and time of a job on hardware that is not here",
        "pixelrag.plan.command",
        "any",
        {
            "device": "b200, h200, h100, a100 or l40s (default h200)",
            "nodes": "how many (default 1)",
            "devices_per_node": "how many (default 8)",
            "network": "GB/s between nodes, for each device (default 50)",
            "link": "GB/s between devices of a node (default: the device's)",
            "mfu": "share of the peak that arithmetic reaches (default 0.4)",
            "query_tokens": "length of queries (default: as long as may be)",
            "document_tokens": "length of documents (default: as long as may be)",
            "image_tokens": "tokens of the image of each document (default: texts)",
            "passages": "of the knowledge base, to plan its index (rag only)",
            "supervised": "share of a packed row's tokens that are learnt from (default 1)",
            "search": "on: compare engines, find the largest chunk or micro-batch, suggest options",
            "output": "JSON file to write",
        },
    ),
    "verify": Command(
        "prove on this machine that the gradients are those of the full batch",
        "pixelrag.verify.command",
    ),
    "inspect": Command(
        "say what a folder is, and whether two belong together", "pixelrag.provenance.command"
    ),
    "launch-check": Command(
        "look at every host, device and path of the cluster before a run",
        "pixelrag.launch_check.command",
    ),
    "eval": Command(
        "measure a model on held-out data without training",
        "pixelrag.train.evaluate",
        "any",
        {
            "output": "FILE.json to write, with what is measured of every query",
            "answers": "rag: FOLDER for answers and their passages, JSONL and an HTML page",
            "samples": "distill: FILE.html to write, prompts with what student and teacher write",
            "baseline": "retrievers: model, or FILE.json of --output, to compare with (paired)",
            "gallery": "retrievers: FILE.html to write, queries and what was found, worst first",
            "run_file": "retrievers: TREC run to write, the first 100 documents of each query",
            "qrels_file": "retrievers: TREC qrels to write, that judge the run",
        },
    ),
    "plot": Command("draw what runs have logged, over each other", "pixelrag.plot.command"),
    "compare": Command(
        "test two measurements of the same queries against each other (paired)",
        "pixelrag.evaluate.compare_command",
    ),
    "mine": Command(
        "find hard negatives for the rows of data.train with a model",
        "pixelrag.train.mine",
        "mine",
        {"output": _FOLDER},
    ),
    "export": Command(
        "make of a checkpoint what other tools load", "pixelrag.train.export_command"
    ),
    "index": Command(
        "encode and index a knowledge base without training, to serve it or to start from it",
        "pixelrag.train.build_index",
        "rag",
        {"output": "folder of generations to write to (required)"},
    ),
    "cache-states": Command(
        "write a teacher's final hidden states, to distil from later",
        "pixelrag.train.cache_states",
        "distill",
        {"output": _FOLDER, "codec": _CODEC},
    ),
    "cache-logits": Command(
        "write a teacher's likeliest tokens, to distil from later",
        "pixelrag.train.cache_logits",
        "distill",
        {"output": _FOLDER, "k": "tokens kept of each distribution (default 64)"},
    ),
    "teacher": Command(
        "serve a teacher to jobs that run elsewhere",
        "pixelrag.train.serve_teacher",
        "distill",
        {"listen": "path of a Unix socket, or host:port (required)", "codec": _CODEC},
    ),
    "bench": Command(
        "measure speed and memory on this machine, and report them", "pixelrag.bench.command"
    ),
    "demo": Command("run a job on real data that needs no download", "pixelrag.demo"),
}
DEMOS = {
    "contrastive": "pixelrag.demo.contrastive",
    "distill": "pixelrag.demo.distill",
    "rag": "pixelrag.demo.rag",
}

_WIDTH = max(len(name) for name in COMMANDS)
USAGE = f"""\
usage: pixelrag COMMAND [arguments]      (also python -m pixelrag, torchrun -m pixelrag)

Trains retrievers with the exact gradients of very large batches, and distils language models.

commands
{chr(10).join(f"  {name:<{_WIDTH}}  {command.summary}" for name, command in COMMANDS.items())}

  pixelrag COMMAND --help   what the command takes
  pixelrag --version        the version
  --debug                   (anywhere) show the traceback of an error

exit codes
  0 done   1 fault of pixelrag   2 configuration   3 data   4 model   5 checkpoint
  6 engine   7 loss or gradient not finite   8 index   9 provenance
"""


def strip_launcher_flags(argv: Sequence[str]) -> list[str]:
    """`argv` without the launchers' `--local_rank=N`, which stands before the command's name."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        if word in ("--local_rank", "--local-rank"):
            next(words, None)
        elif not word.startswith(("--local_rank=", "--local-rank=")):
            kept.append(word)
    return kept


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code; errors of the user's are told in one message."""
    words = strip_launcher_flags(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        launched.adopt(os.environ)
        code = _run(words)
        sys.stdout.flush()  # a reader that went away must be noticed here, not at exit
        return code
    except PixelragError as error:
        if debug:
            raise
        if not (error.told_by_main and os.environ.get("RANK", "0") != "0"):
            sys.stderr.write(f"{_who()}error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        if debug:
            raise
        sys.stderr.write(f"{_who()}interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`| head`); the interpreter must not flush into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def run() -> NoReturn:
    """Entry point of the console script and of `python -m pixelrag`: `main`, then exit."""
    code = main()
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        # All is done: a request to stop that comes in the interpreter's exit changes nothing.
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    if os.environ.get("WORLD_SIZE", "1") != "1" or code == 130:
        # gloo's threads can abort a rank in the interpreter's exit although all went well, and
        # the launcher would call the whole job failed. Threads of what was interrupted can, too.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _who() -> str:
    """Who speaks: with several ranks their messages mix on one terminal."""
    many = os.environ.get("WORLD_SIZE", "1") != "1"
    return f"pixelrag: [rank {os.environ.get('RANK', '?')}] " if many else "pixelrag: "


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0 if words else ConfigError.exit_code
    if words[0] in ("-V", "--version", "version"):
        from pixelrag import __version__

        sys.stdout.write(f"pixelrag {__version__}\n")
        return 0
    name, arguments = words[0], words[1:]
    if name not in COMMANDS:
        raise ConfigError(_unknown_command(name))
    command = COMMANDS[name]
    if name == "demo":
        return _run_demo(arguments)
    if command.job is None:
        return import_module(command.module).main(arguments)
    return _run_configured(name, command, arguments)


def _unknown_command(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"got command {name!r}, expected one of {', '.join(COMMANDS)}{hint}"


def _run_demo(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(f"usage: pixelrag demo {{{','.join(DEMOS)}}} [--help]\n")
        return 0
    job = arguments[0] if arguments else "nothing"
    if job not in DEMOS:
        raise ConfigError(f"got demo {job!r}, expected one of {', '.join(DEMOS)}")
    return import_module(DEMOS[job]).main(arguments[1:])


def _run_configured(name: str, command: Command, arguments: list[str]) -> int:
    from pixelrag.config import jobs

    job = command.job or "any"
    if job == "any" and arguments and arguments[0] in jobs.JOBS:
        job, *arguments = arguments
        name = f"{name} {job}"
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(jobs.help_of(f"pixelrag {name}", command.summary, job, command.own))
        return 0
    from pixelrag.config.base import load

    try:
        job = jobs.job_of(arguments) if job == "any" else job
        config, own = load(
            jobs.config_class(job), arguments, tuple(command.own), trains=command.trains
        )
    except ConfigError as error:
        # Every rank of a host reads the same files; one of them tells what is wrong.
        error.told_by_main = os.environ.get("LOCAL_RANK", "0") != "0"
        raise
    handler = import_module(command.module).main
    return (handler(config, own) if command.own else handler(config)) or 0
