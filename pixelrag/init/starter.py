"""A configuration as a file that explains itself: every option with the reason for its value."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pixelrag.config.yaml_file import write_yaml

_WIDTH = 98


@dataclass(frozen=True, slots=True)
class Choice:
    """An option's value and why it has it; `off` ones are written as comments, to be considered."""

    path: str
    value: Any
    why: str
    off: bool = False


def override(choices: Iterable[Choice], given: Mapping[str, Any]) -> list[Choice]:
    """The choices with the values that the command line gave in the place of their own."""
    asked = {
        f"{name}.{leaf}" if leaf else name: value
        for name, values in given.items()
        for leaf, value in (values.items() if isinstance(values, dict) else [("", values)])
    }
    kept = [choice for choice in choices if choice.path not in asked]
    return kept + [Choice(path, value, "As asked for.") for path, value in asked.items()]


def render(head: Sequence[str], choices: Iterable[Choice], sections: Sequence[str]) -> str:
    """The file's text.

    Args:
        head: paragraphs of the comment at the top.
        choices: what to set, in any order.
        sections: the job's options and sections, in the order in which to write them.
    """
    lines = [line for paragraph in head for line in _comment(paragraph, "")]
    by_section: dict[str, list[Choice]] = {}
    for choice in choices:
        by_section.setdefault(choice.path.partition(".")[0], []).append(choice)
    for section in sorted(by_section, key=list(sections).index):
        inner = by_section[section]
        indent = "  " if "." in inner[0].path else ""
        lines += ["", f"{section}:"] if indent else [""]
        for choice in sorted(inner, key=lambda choice: choice.off):
            lines += _comment(choice.why, indent)
            name = choice.path.rpartition(".")[2]
            is_list = isinstance(choice.value, list)  # JSON's are YAML's, on one line
            text = json.dumps(choice.value) if is_list else _scalar(choice.value)
            lines.append(f"{indent}{'# ' if choice.off else ''}{name}: {text}")
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: str) -> list[str]:
    lines = textwrap.wrap(text, _WIDTH - len(indent) - 2, break_on_hyphens=False)
    return [f"{indent}# {line}" for line in lines]


def _scalar(value: Any) -> str:
    return write_yaml({"v": value}).removeprefix("v: ").strip()
