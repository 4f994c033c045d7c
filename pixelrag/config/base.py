"""Loads a job's configuration: defaults, then YAML files in order, then flags; one validation.

The layers are merged by pydantic-settings, each of them one of its sources. Environment variables
are no source: what a run does must be readable from its files and its command line.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from pixelrag.config.flags import parse_flags, take_preset
from pixelrag.config.parts import (
    CheckpointConfig,
    EngineConfig,
    EvalEvery,
    LoggingConfig,
    OptimConfig,
)
from pixelrag.config.problems import (
    URL_USER,
    Conflict,
    Problem,
    problems_of,
    report,
    sections_of,
    shown,
)
from pixelrag.config.section import Section, accepts
from pixelrag.config.yaml_file import read_yaml, write_yaml
from pixelrag.errors import ConfigError

# Highest precedence first; set only while `load` builds a model.
_layers: ContextVar[tuple[Mapping[str, Any], ...]] = ContextVar("layers", default=())

# What may differ between a run and its continuation without changing what is being trained.
_NOT_IDENTITY = ("output_dir", "engine", "eval", "checkpoint", "logging")


class _Layer(PydanticBaseSettingsSource):
    """A file's or the flags' options, as pydantic-settings merges them."""

    def __init__(self, settings_cls: type[BaseSettings], values: Mapping[str, Any]) -> None:
        super().__init__(settings_cls)
        self._values = values

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return dict(self._values)


class JobConfig(BaseSettings, Section):
    """Base of a job's configuration: frozen, and checked across its sections when it is made."""

    model_config = SettingsConfigDict(**Section.model_config)
    if TYPE_CHECKING:  # what every job has; each declares its own, in its place
        output_dir: str
        seed: int
        loss: Section
        optim: OptimConfig
        engine: EngineConfig
        eval: EvalEvery
        checkpoint: CheckpointConfig
        logging: LoggingConfig
    adaptable: ClassVar[tuple[str, ...]] = ()
    """Options of this job's own that a run may change when it goes on from a checkpoint."""
    presets: ClassVar[Mapping[str, str]] = {}
    """Modules with the flags (`expand`) and `DEFAULTS` of other trainers, by `--preset` name."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, *(_Layer(settings_cls, values) for values in _layers.get()))

    def conflicts(self) -> Iterator[Conflict]:
        """Yield what cannot stand together; a job adds its own rules."""
        yield from ()

    @model_validator(mode="after")
    def _no_conflicts(self) -> Self:
        if found := [*_unfit(self.model_dump(mode="json")), *self.conflicts()]:
            text = "; ".join(str(conflict) for conflict in found)
            raise PydanticCustomError("conflicts", "{text}", {"text": text, "conflicts": found})
        return self


Config = TypeVar("Config", bound=JobConfig)


def load(
    config_class: type[Config],
    argv: Sequence[str],
    own: Sequence[str] = (),
    *,
    trains: bool = True,
) -> tuple[Config, dict[str, str]]:
    """Build `config_class` from `--config` files and flags; also the values of the flags in `own`.

    What does not train (`trains` false) need not be told for how long.

    Raises `ConfigError` naming every mistake at once, each with its path, file and line or flag,
    what was got and expected, and the nearest valid name.
    """
    argv, defaults, faults = _expand_preset(config_class, argv)
    line = parse_flags(argv, config_class, own)
    files = [read_yaml(path) for path in line.files]
    problems = [problem for file in files for problem in file.problems] + faults + line.problems
    if files and all(file.problems and not file.values for file in files):
        raise ConfigError(report(problems))  # what else is missing may well stand in them
    places = {path: where for file in files for path, where in file.places.items()} | line.places
    sections = sections_of(config_class)
    written = [_without_empty(file.values, sections) for file in files]
    layers = [line.values, *reversed(written), defaults]
    if not trains and not any(_says_how_long(layer) for layer in layers):
        layers.append({"optim": {"num_epochs": 1}})
    return build(config_class, layers, places, problems), line.own


def build(
    config_class: type[Config],
    layers: Sequence[Mapping[str, Any]],
    places: Mapping[tuple[str, ...], str],
    problems: Sequence[Problem] = (),
) -> Config:
    """Merge layers of options and validate what comes of it.

    Args:
        config_class: what to build.
        layers: options by section, highest precedence first.
        places: where each option was written, by its path.
        problems: what was found wrong already.

    Raises:
        ConfigError: names every mistake at once.
    """
    layers = [*layers, _required_sections(config_class)]
    config, errors = _build(config_class, layers)
    found = list(problems_of(errors, config_class, places))
    if any(error["type"] != "conflicts" for error in errors):
        # What spans sections is judged as well, on what is left without the fields reported above.
        bad = {
            tuple(part for part in error["loc"][:2] if isinstance(part, str)) for error in errors
        }
        pruned = [_without(layer, bad) for layer in layers]
        _, errors = _build(config_class, [*pruned, _stand_ins(config_class)])
        conflicts = [error for error in errors if error["type"] == "conflicts"]
        names = frozenset(".".join(path) for path in bad)
        found += problems_of(conflicts, config_class, places, ignore=names)
    if config is None or problems or found:
        raise ConfigError(report([*problems, *found]))
    return config


def _expand_preset(
    config_class: type[JobConfig], argv: Sequence[str]
) -> tuple[list[str], Mapping[str, Any], list[Problem]]:
    """The command line in our options, what the preset sets beneath the files, what is wrong."""
    words, name = take_preset(argv)
    if name is None:
        return words, {}, []
    if name not in config_class.presets:
        known = ", ".join(config_class.presets) or "none, this job has no presets"
        return words, {}, [Problem("--preset", f"got {shown(name)}, expected {known}")]
    preset = import_module(config_class.presets[name])
    words, problems = preset.expand(words)
    return words, preset.DEFAULTS, problems


def _build(
    config_class: type[Config], layers: Sequence[Mapping[str, Any]]
) -> tuple[Config | None, list[Any]]:
    token = _layers.set(tuple(layers))
    try:
        return config_class(), []
    except ValidationError as error:
        return None, error.errors(include_url=False)
    finally:
        _layers.reset(token)


def _without_empty(values: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """A section with nothing under its name is one whose lines are all commented out."""
    return {k: v for k, v in values.items() if not (v is None and k in sections)}


def _says_how_long(values: Mapping[str, Any]) -> bool:
    optim = values.get("optim")
    names = ("max_steps", "num_epochs")
    return isinstance(optim, Mapping) and any(optim.get(name) is not None for name in names)


def _required_sections(config_class: type[JobConfig]) -> dict[str, Any]:
    """Empty sections, so that what is missing is named by its own path."""
    fields = config_class.model_fields
    return {name: {} for name in sections_of(config_class) if fields[name].is_required()}


def _stand_ins(config_class: type[JobConfig]) -> dict[str, Any]:
    """Something valid for each required option: the rules that span sections need a whole model."""
    return {
        name: {
            leaf: ["-"] if accepts(field.annotation, list) else "-"
            for leaf, field in section.model_fields.items()
            if field.is_required()
        }
        for name, section in sections_of(config_class).items()
        if config_class.model_fields[name].is_required()
    }


def _without(values: Mapping[str, Any], bad: set[tuple[str, ...]]) -> dict[str, Any]:
    kept = {key: value for key, value in values.items() if (key,) not in bad}
    for key, value in kept.items():
        if isinstance(value, dict):
            kept[key] = {leaf: item for leaf, item in value.items() if (key, leaf) not in bad}
    return kept


def _unfit(values: Any, path: tuple[str, ...] = ()) -> Iterator[Conflict]:
    """Texts with a NUL, and URLs with a password, which config.yaml and model cards would show."""
    if isinstance(values, Mapping | list):
        pairs = values.items() if isinstance(values, Mapping) else enumerate(values)
        for name, value in pairs:
            yield from _unfit(value, path if isinstance(name, int) else (*path, name))
    elif isinstance(values, str) and URL_USER.search(values):
        name = ".".join(path)
        yield Conflict(
            (name,),
            got=f"{name}: a URL with a name or password in it",
            remedy="take it out; credentials come from the environment or from ~/.netrc",
        )
    elif isinstance(values, str) and "\0" in values:
        name = ".".join(path)
        yield Conflict((name,), got=f"{name}: a text with a NUL in it", remedy="take it out")


def dump(config: JobConfig) -> str:
    """The resolved configuration as YAML that `load` reads back to an equal one."""
    return write_yaml(config.model_dump(mode="json"))


def fingerprint(config: JobConfig) -> str:
    """SHA-256 (hex) of what is trained on what and how; engine, folder, logging, eval are not."""
    values = config.model_dump(mode="json", exclude=set(_NOT_IDENTITY))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
