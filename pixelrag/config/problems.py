"""What is wrong with a configuration: every mistake with its place, got, expected and remedy."""

import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pixelrag.config.section import accepts

# What other trainers call the options of ours that no spelling comparison would find.
SYNONYMS = {
    "lr": "optim.learning_rate",
    "num_train_epochs": "optim.num_epochs",
    "gradient_clipping": "optim.max_grad_norm",
    "per_device_train_batch_size": "batch.per_device_batch_size",
    "batch_size": "batch.per_device_batch_size",
    "grad_cache_chunk": "batch.chunk_size",
    "gc_chunk_size": "batch.chunk_size",
    "mini_batch_size": "batch.chunk_size",
    "bf16": "engine.precision",
    "model_name_or_path": "model.name_or_path",
    "lora_r": "lora.r",
    "lora_alpha": "lora.alpha",
}


URL_USER = re.compile(r"(\w+://)[^/@\s]+@")
"""What stands before the host of a URL: a name, and mostly a password or token."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake. `where` is a file with its line, or a flag; None where nothing was written."""

    path: str
    says: str
    where: str | None = None
    remedy: str | None = None

    def __str__(self) -> str:
        head = self.path if self.where is None else f"{self.path} ({self.where})"
        tail = "" if self.remedy is None else f"\n      fix: {self.remedy}"
        return f"{head}\n      {self.says}{tail}"


@dataclass(frozen=True, slots=True)
class Conflict:
    """Settings that are each valid and cannot stand together. `paths` are those involved."""

    paths: tuple[str, ...]
    got: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.got}: {self.remedy}"


def report(problems: Sequence[Problem]) -> str:
    """All problems as the text of one error, in the order given."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"{count} in the configuration\n" + "\n".join(f"  - {item}" for item in problems)


def shown(value: Any) -> str:
    """`value` as YAML would have it, cut to a readable length."""
    text = {True: "true", False: "false", None: "null"}.get(value) if _is_word(value) else None
    text = repr(value) if text is None else text
    text = URL_USER.sub(r"\1***@", text)
    # What tells long values apart is as often at their end, a file's name above all.
    return text if len(text) <= 80 else f"{text[:27]}...{text[-50:]}"


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def sections_of(config_class: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The fields of a job that are sections, by name."""
    return {
        name: field.annotation
        for name, field in config_class.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def options_of(config_class: type[BaseModel]) -> dict[str, FieldInfo]:
    """Every option of a job by its dotted path, in the order of the models."""
    sections = sections_of(config_class)
    options: dict[str, FieldInfo] = {}
    for name, field in config_class.model_fields.items():
        if name in sections:
            inner = sections[name].model_fields.items()
            options |= {f"{name}.{leaf}": leaf_field for leaf, leaf_field in inner}
        else:
            options[name] = field
    return options


def nearest(path: str, valid: Iterable[str]) -> str | None:
    """The valid path that `path` was most likely meant to be, or None where nothing is near."""
    valid = list(valid)
    section, _, leaf = path.rpartition(".")
    same_leaf = [other for other in valid if other.rpartition(".")[2] == leaf]
    if len(same_leaf) == 1:
        return same_leaf[0]
    if SYNONYMS.get(leaf) in valid:
        return SYNONYMS[leaf]
    prefix = f"{section}." if section else ""
    siblings = [other[len(prefix) :] for other in valid if other.startswith(prefix)]
    close = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6)
    if close:
        return prefix + close[0]
    leaves = {other.rpartition(".")[2]: other for other in valid}
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    if close:
        return leaves[close[0]]
    return next(iter(difflib.get_close_matches(path, valid, n=1, cutoff=0.6)), None)


def describe(field: FieldInfo) -> str:
    """What a field accepts, in words: `an integer of 1 or more, or null`."""
    return _type_in_words(field.annotation, _bounds(field.metadata))


def _bounds(metadata: Iterable[Any]) -> str:
    bounds = ""
    for item in metadata:
        if isinstance(item, annotated_types.Ge):
            bounds += f" of {_number(item.ge)} or more"
        elif isinstance(item, annotated_types.Gt):
            bounds += f" above {_number(item.gt)}"
        elif isinstance(item, annotated_types.Lt):
            bounds += f"{' and' if bounds else ''} below {_number(item.lt)}"
        elif isinstance(item, annotated_types.Le):
            bounds += f"{' and' if bounds else ' of'} at most {_number(item.le)}"
        elif isinstance(item, annotated_types.MinLen):
            bounds += " that is not empty"
    return bounds


def _number(value: Any) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _type_in_words(annotation: Any, bounds: str = "") -> str:
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(
            "null" if member is type(None) else _type_in_words(member, bounds) for member in members
        )
    if origin is typing.Annotated:  # a member of a union with bounds of its own
        return _type_in_words(members[0], _bounds(members[1].metadata))
    if origin is typing.Literal and len(members) == 1:
        return str(members[0])
    if origin is typing.Literal:
        return "one of " + ", ".join(str(member) for member in members)
    if origin is list and typing.get_origin(members[0]) is typing.Literal:
        return f"a list of some of {', '.join(typing.get_args(members[0]))}{bounds}"
    if origin is list:
        return f"a list of {'texts' if accepts(members[0], str) else 'numbers'}{bounds}"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
    return words.get(annotation, "a section of options") + bounds


def problems_of(
    errors: Iterable[ErrorDetails],
    config_class: type[BaseModel],
    places: Mapping[tuple[str, ...], str],
    ignore: frozenset[str] = frozenset(),
) -> Iterator[Problem]:
    """Turn pydantic's errors into problems; `places` maps a path to where it was written.

    Conflicts that involve a path of `ignore` are left out: they would follow from another mistake.
    """
    options, sections = options_of(config_class), sections_of(config_class)
    told: set[str] = set()
    for error in errors:
        if error["type"] == "conflicts":
            for conflict in error["ctx"]["conflicts"]:
                if ignore.isdisjoint(conflict.paths):
                    where = _places_of_conflict(conflict, places)
                    yield Problem(conflict.paths[0], f"got {conflict.got}", where, conflict.remedy)
            continue
        loc = error["loc"]
        path = ".".join(str(part) for part in loc[:2] if isinstance(part, str))
        full = path + "".join(f"[{part}]" for part in loc if isinstance(part, int))
        where = place_of(loc, places)
        if error["type"] == "extra_forbidden":
            yield unknown_name(path, where, options, sections)
        elif error["type"] == "missing":
            expected = describe(options[path]) if path in options else "a section"
            yield Problem(path, f"missing, expected {expected}", None, f"--{path} VALUE")
        elif full not in told:  # a union has an error for each of its members
            told.add(full)
            yield Problem(full, _got_expected(error, options.get(path)), where)


def place_of(loc: Sequence[Any], places: Mapping[tuple[str, ...], str]) -> str | None:
    """Where `loc`, or the nearest thing around it, was written."""
    for length in range(len(loc), 0, -1):
        if (where := places.get(tuple(loc[:length]))) is not None:
            return where
    return None


def _places_of_conflict(conflict: Conflict, places: Mapping[tuple[str, ...], str]) -> str | None:
    found = [places.get(tuple(path.split("."))) for path in conflict.paths]
    return ", ".join(dict.fromkeys(where for where in found if where)) or None


def unknown_name(
    path: str,
    where: str | None,
    options: Mapping[str, FieldInfo],
    sections: Mapping[str, type[BaseModel]],
) -> Problem:
    """The problem of a name that no option has, with the nearest valid one."""
    if path in sections:
        first = next(name for name in options if name.startswith(f"{path}."))
        return Problem(path, f"is a section, expected one of its options, as in {first}", where)
    meant = nearest(path, [*options, *sections])
    hint = "" if meant is None else f"; did you mean {meant}?"
    return Problem(path, f"unknown option{hint}", where)


def _got_expected(error: ErrorDetails, field: FieldInfo | None) -> str:
    got = f"got {shown(error['input'])}, expected "
    if error["type"] in ("deepspeed_file", "paths"):
        return got + error["msg"]
    if error["type"] == "finite_number":
        return got + "a finite number"
    expected = "a section of options" if field is None else describe(field)
    if isinstance(error["input"], str):
        choices = [str(member) for member in _choices(field.annotation)] if field else []
        close = difflib.get_close_matches(error["input"], choices, n=1, cutoff=0.6)
        return got + expected + (f"; did you mean {close[0]}?" if close else "")
    return got + expected


def _choices(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    return tuple(choice for member in typing.get_args(annotation) for choice in _choices(member))
