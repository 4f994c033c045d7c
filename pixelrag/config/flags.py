"""Reads `--config FILE` and `--section.option VALUE` from a command line."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pixelrag.config.problems import Problem, nearest, options_of, sections_of, unknown_name
from pixelrag.config.section import accepts
from pixelrag.config.yaml_file import parse_yaml_list

# Flags that people expect at the top, and the options that they set.
PRESET = "preset"
SHORTCUTS = {"deepspeed": "engine.deepspeed", "resume": "checkpoint.resume"}

_NO_LIST = object()


@dataclass(slots=True)
class CommandLine:
    """A command line taken apart; `own` holds the values of the command's own flags, by name."""

    files: list[Path] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[tuple[str, ...], str] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def take_preset(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """`argv` without `--preset NAME`, and the name; the last one counts."""
    kept: list[str] = []
    name: str | None = None
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        if flag != f"--{PRESET}":
            kept.append(word)
        else:
            name = text if equals else (words.pop(0) if words else "")
    return kept, name


def parse_flags(
    argv: Sequence[str], config_class: type[BaseModel], own: Sequence[str] = ()
) -> CommandLine:
    """Take `argv` apart for `config_class`; `own` names further flags that take a value.

    A flag's value is the next word or what follows `=`. The last of a repeated flag counts. Nothing
    is raised, all that is wrong is in `problems`.
    """
    line = CommandLine()
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            line.problems.append(Problem(word, "unexpected word, expected --option VALUE"))
            continue
        flag, equals, joined = word.partition("=")
        follows = words and not words[0].startswith("--")
        text = joined if equals else words.pop(0) if follows else None
        _take(flag, text, line, config_class, own)
    return line


def _take(
    flag: str,
    text: str | None,
    line: CommandLine,
    config_class: type[BaseModel],
    own: Sequence[str],
) -> None:
    options, sections = options_of(config_class), sections_of(config_class)
    name = flag[2:].replace("-", "_")
    path = SHORTCUTS.get(name, name)
    if name != "config" and name not in own and path not in options:
        if meant := nearest(name, ["config", *own, *SHORTCUTS]):
            line.problems.append(Problem(flag, f"unknown option; did you mean --{meant}?"))
        else:
            line.problems.append(unknown_name(path, flag, options, sections))
        return
    if text is None:
        takes = "true or false" if path in options and accepts_bool(options[path]) else "a value"
        line.problems.append(Problem(flag, f"got nothing, expected {takes} after it"))
    elif name == "config":
        line.files.append(Path(text))
    elif name in own:
        line.own[name] = text
    else:
        value = _value(text, options[path].annotation)
        if value is _NO_LIST:
            line.problems.append(Problem(flag, f"got {text!r}, expected a list as in [a, b]"))
            return
        parts = tuple(path.split("."))
        target = line.values
        for part in parts[:-1]:
            target = target.setdefault(part, {})
        target[parts[-1]] = value
        line.places[parts] = flag


def accepts_bool(option: Any) -> bool:
    """Whether an option takes true or false."""
    return accepts(option.annotation, bool)


def _value(text: str, annotation: Any) -> Any:
    """The text of a flag as the option's type would have it; numbers are left to pydantic."""
    if accepts(annotation, type(None)):
        # "none" may be a wanted text, "null" is how YAML spells nothing.
        empty = ("null",) if accepts(annotation, str) else ("null", "none")
        if text.lower() in empty:
            return None
    if accepts(annotation, list):
        if text.lstrip().startswith("["):
            parsed = parse_yaml_list(text)
            return _NO_LIST if parsed is None else parsed
        return [part.strip() for part in text.split(",") if part.strip()]
    return text
