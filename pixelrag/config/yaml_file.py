"""Reads and writes configuration as YAML, keeping the line on which each option stands.

YAML 1.2's words are used, not 1.1's: `2e-5` is a number, `on` and `no` are texts. A key that
stands twice is a mistake, and only plain data is ever built.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pixelrag.config.problems import Problem

_WORDS = (
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
)


_MAX_CHARACTERS, _MAX_NODES = 1 << 20, 100_000


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012  # its class's own, as there


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or the loader above would take for something else."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {  # noqa: RUF012
        key: list(v) for key, v in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


for _tag, _pattern, _first in _WORDS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
        )


@dataclass(slots=True)
class YamlFile:
    """A file's options, the place of each (`file line N` by path), and what is wrong with it."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[tuple[str, ...], str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_yaml(path: Path) -> YamlFile:
    """Read one configuration file; nothing is raised, all that is wrong is in `problems`."""
    result = YamlFile()
    name = str(path)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            text = file.read(_MAX_CHARACTERS + 1)
    except OSError as error:
        result.problems.append(
            Problem("--config", f"got {name}, expected a readable YAML file ({error.strerror})")
        )
        return result
    except UnicodeDecodeError as error:
        result.problems.append(
            Problem("--config", f"got {name}, expected UTF-8 (byte {error.start} is not)")
        )
        return result
    if len(text) > _MAX_CHARACTERS:
        said = f"got {name}, expected at most {_MAX_CHARACTERS:,} characters"
        result.problems.append(Problem("--config", said))
        return result
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        _refuse_blow_up(root)
        # Building the content merges `<<` into the nodes: what was written is noted before.
        if root is not None:
            _note_places(root, (), name, result)
        content = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name} line {mark.line + 1}" if mark else name
        result.problems.append(Problem("--config", f"no valid YAML: {error.problem}", where))
        return result
    except yaml.YAMLError as error:
        result.problems.append(Problem("--config", f"no valid YAML: {error}", name))
        return result
    except RecursionError:
        result.problems.append(Problem("--config", "no valid YAML: nested too deeply", name))
        return result
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        # What PyYAML lets through of values that their own tag or form makes impossible.
        reason = str(error) or type(error).__name__
        result.problems.append(Problem("--config", f"no valid YAML: {reason}", name))
        return result
    finally:
        if loader is not None:
            loader.dispose()
    if content is None:
        return result
    if not isinstance(content, dict):
        result.problems.append(
            Problem("--config", f"got a {type(content).__name__}, expected options by name", name)
        )
        return result
    # The names that are no text were reported; they can name no option.
    result.values = {key: value for key, value in content.items() if isinstance(key, str)}
    return result


def _refuse_blow_up(root: yaml.Node | None) -> None:
    """Refuse aliases that name themselves, or whose values, written out, would be endless."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = _MAX_NODES + 1  # what is met again within itself
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            if isinstance(node, yaml.MappingNode):
                parts = [part for pair in parts for part in pair]
            sizes[id(node)] = 1 + sum(map(size, parts))
        return sizes[id(node)]

    if root is not None and size(root) > _MAX_NODES:
        raise ValueError(f"with its aliases written out it has more than {_MAX_NODES:,} values")


def _note_places(node: yaml.Node, path: tuple[str, ...], name: str, result: YamlFile) -> None:
    """Note each key's line, and report keys that stand twice or are no texts.

    Options stand two deep, and four deep in a profile of a benchmark's suite.
    """
    if not isinstance(node, yaml.MappingNode) or len(path) > 3:
        return
    own: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        where = f"{name} line {line}"
        if not isinstance(key_node, yaml.ScalarNode):
            continue  # the loader refuses it, with its line
        if not key_node.tag.endswith((":str", ":merge")):
            shown = ".".join((*path, key_node.value))
            kind = key_node.tag.rpartition(":")[2]
            result.problems.append(Problem(shown, f"expected a name, got {kind} as a key", where))
            continue
        key = key_node.value
        here = (*path, key)
        if key in own:
            result.problems.append(
                Problem(".".join(here), f"stands twice, first on line {own[key]}", where)
            )
        own[key] = line
        result.places[here] = where
        _note_places(value_node, here, name, result)


def parse_yaml_list(text: str) -> list[Any] | None:
    """Parse a flag's `[a, b]`; None where the text is no list."""
    try:
        value = yaml.load(text, _Loader)  # noqa: S506 - _Loader is a SafeLoader
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return value if isinstance(value, list) else None


def write_yaml(values: Mapping[str, Any]) -> str:
    """Plain data as YAML text that `read_yaml` reads back unchanged."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
