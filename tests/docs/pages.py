"""The blocks of the documentation's pages, and how a command line of theirs is checked."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from pixelrag import cli

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(
        page for page in (ROOT / "docs").rglob("*.md")
        if "_build" not in page.parts
    ),
]  # fmt: skip
_FENCE = re.compile(
    r"^(?P<fence>`{3,})(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)$", re.M | re.S
)
_HEREDOC = re.compile(
    r"^(?:mkdir -p [^\n;&]+ && )?cat > \S+ <<'(?P<tag>\w+)'\n.*?^(?P=tag)$\n?", re.M | re.S
)
_LAUNCHERS = {"torchrun": "-m", "deepspeed": "--module"}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; ``needs`` is what the line above it says that it needs, or empty."""

    page: Path
    line: int
    language: str
    text: str
    needs: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def files(self) -> list[str]:
        """Commands that write a file (`cat > FILE <<'TAG'`)."""
        return [match[0] for match in _HEREDOC.finditer(self.text)]

    @property
    def commands(self) -> list[list[str]]:
        """The other lines as words, without comments and leading variables."""
        lines = _HEREDOC.sub("", self.text).replace("\\\n", " ").splitlines()
        found = [shlex.split(line, comments=True) for line in lines]
        return [words for words in found if words]


def blocks_of(page: Path) -> Iterator[Block]:
    """Every fenced block of a page, in order."""
    text = page.read_text("utf-8")
    for match in _FENCE.finditer(text):
        above = text[: match.start()].rstrip().rpartition("\n\n")[2].strip()
        yield Block(
            page,
            text.count("\n", 0, match.start()) + 1,
            match["language"].strip(),
            match["text"],
            above.removeprefix("Needs:").strip() if above.startswith("Needs:") else "",
        )


def pixelrag_of(words: list[str]) -> list[str] | None:
    """What a command line gives to `pixelrag`; None where it starts something else."""
    if words[0] == "pixelrag":
        return words[1:]
    flag = _LAUNCHERS.get(words[0])
    if flag is None or flag not in words:
        return None
    place = words.index(flag)
    return words[place + 2 :] if words[place + 1] == "pixelrag" else None


def starts_something_known(words: list[str]) -> bool:
    """Whether a line that is not pixelrag's names a target or a benchmark, and its flags."""
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        return all(word in targets or "=" in word for word in words[1:])
    if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        source = ROOT.joinpath(*words[2].split(".")).with_suffix(".py")
        flags = [word.partition("=")[0] for word in words[3:] if word.startswith("--")]
        texts = [path.read_text("utf-8") for path in (source, source.with_name("common.py"))]
        return all(any(f'"{flag}"' in text for text in texts) for flag in flags)
    return False


class _Read(Exception):
    """The command line was read to its end."""


def read(arguments: list[str], patch: pytest.MonkeyPatch) -> int:
    """Let the command read its arguments as ever, configurations and all, and then do nothing.

    Returns the exit code: 0 where they are right.
    """
    if arguments[0] == "bench" and "--report" not in arguments:
        return cli.main([*arguments, "--dry-run"])
    parse = argparse.ArgumentParser.parse_args
    load = cli.import_module

    def stopped(self, *args, **kwargs):
        parse(self, *args, **kwargs)
        raise _Read

    def without_handler(name: str):
        done = SimpleNamespace(main=lambda *_: 0)
        configured = any(c.module == name and c.job is not None for c in cli.COMMANDS.values())
        return done if configured else load(name)

    patch.setattr(argparse.ArgumentParser, "parse_args", stopped)
    patch.setattr(cli, "import_module", without_handler)
    try:
        return cli.main(arguments)
    except _Read:
        return 0
    except SystemExit as left:
        return int(left.code or 0)
    finally:
        patch.undo()


def at_home(folder: Path) -> None:
    """What stands beside a reader who has cloned the repository."""
    for name in ("recipes", "ds_configs", "launchers", "benchmarks", "README.md", "docs"):
        os.symlink(ROOT / name, folder / name)
