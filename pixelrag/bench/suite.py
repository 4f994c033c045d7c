"""The suites, and how a suite's file, a profile and flags become its settings.

    suite: kd-chunk            # which workload
    work: {tokens: 2048}       # its settings, as in `pixelrag bench kd-chunk --help`
    profiles:                  # further layers, one of which is chosen by --profile
      h200: {run: {device: cuda}, work: {vocabularies: [151936]}}

Precedence: defaults < the file < the profile in it < flags.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from pixelrag.bench.rows import Case
from pixelrag.config import bench
from pixelrag.config.base import build
from pixelrag.config.bench import SuiteConfig
from pixelrag.config.flags import parse_flags
from pixelrag.config.problems import Problem, nearest, report, shown
from pixelrag.config.yaml_file import read_yaml
from pixelrag.errors import ConfigError

FOLDER = Path(__file__).parent / "suites"


@dataclass(frozen=True, slots=True)
class Suite:
    """A workload: `config` of `pixelrag.config.bench`, and a module with

    `groups(config) -> list[list[Case]]`, cases to be compared with one another, and
    `measure(config, cases) -> Iterator[Row]`; where cases run in this process, also
    `prepare(config, cases, device)`, see `cases.measure_in_turns`.
    """

    config: str
    module: str

    def config_class(self) -> type[SuiteConfig]:
        """The class of its settings."""
        return getattr(bench, self.config)

    def workload(self) -> ModuleType:
        """The module that runs it."""
        return import_module(f"pixelrag.bench.{self.module}")


SUITES = {
    "packing": Suite("PackingConfig", "packing"),
    "kd-chunk": Suite("KDChunkConfig", "kd_chunk"),
    "gradcache": Suite("GradCacheConfig", "gradcache"),
    "engine": Suite("EngineConfig", "engine"),
    "rag-refresh": Suite("RefreshConfig", "rag_refresh"),
    "data": Suite("DataConfig", "data"),
    "attention": Suite("AttentionConfig", "attention"),
    "peers": Suite("PeersConfig", "peers"),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a command line asks for.

    Attributes:
        name: of the suite, by which it is looked up.
        title: of the file, by which results are filed.
        profile: its name, or "".
        config: the suite's settings.
    """

    name: str
    title: str
    profile: str
    config: SuiteConfig

    @property
    def config_hash(self) -> str:
        """Of what is measured; how often, and which cases of it, is not part of that."""
        values = self.config.model_dump(mode="json")
        for key in ("rounds", "warmup", "memory", "at_once", "only"):
            del values["run"][key]
        text = json.dumps({"suite": self.name, **values}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def groups(self) -> list[list[Case]]:
        """Cases to run, those together that are compared.

        Raises:
            ConfigError: `run.only` names what no case has.
        """
        groups = SUITES[self.name].workload().groups(self.config)
        return chosen(groups, self.config.run.only)


def chosen(groups: Sequence[Sequence[Case]], only: Sequence[str]) -> list[list[Case]]:
    """The cases that hold every key's value of ``only``, or one of its values.

    Raises:
        ConfigError: no case has such a key or value.
    """
    wanted: dict[str, set[str]] = {}
    for word in only:
        key, equals, value = word.partition("=")
        values = {str(case[key]) for group in groups for case in group if key in case}
        if not equals or value not in values:
            keys = list(dict.fromkeys(key for group in groups for case in group for key in case))
            expected = f"one of {', '.join(sorted(values))}" if values else f"KEY=VALUE of {keys}"
            raise ConfigError(f"--only: got {word!r}, expected {expected}")
        wanted.setdefault(key, set()).add(value)
    kept = [
        [case for case in group if all(str(case.get(k)) in v for k, v in wanted.items())]
        for group in groups
    ]
    if wanted and not any(kept):
        raise ConfigError(f"--only: no case is {' '.join(only)}")
    return [group for group in kept if group]


def file_of(name: str) -> Path:
    """The file of a suite, or the user's own file.

    Raises:
        ConfigError: it is neither.
    """
    if name in SUITES:
        return FOLDER / f"{name}.yaml"
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    close = nearest(name, SUITES)
    hint = f"; did you mean {close}?" if close else ""
    raise ConfigError(
        f"bench: got suite {name!r}, expected one of {', '.join(SUITES)}, or a YAML file{hint}"
    )


def load_plan(name: str, profile: str | None, argv: Sequence[str]) -> Plan:
    """The settings of a suite.

    Args:
        name: a suite, or the path of a YAML file that names one.
        profile: a profile of the file; None = none.
        argv: flags, `--SECTION.OPTION VALUE`.

    Raises:
        ConfigError: names every mistake at once, with file and line or flag.
    """
    path = file_of(name)
    file = read_yaml(path)
    problems = list(file.problems)
    values, places = dict(file.values), dict(file.places)
    suite, profiles = values.pop("suite", None), values.pop("profiles", None) or {}
    if not isinstance(suite, str) or suite not in SUITES:
        where = places.get(("suite",), str(path))
        says = f"got {shown(suite)}, expected one of {', '.join(SUITES)}"
        raise ConfigError(report([*problems, Problem("suite", says, where)]))
    config_class = SUITES[suite].config_class()
    known = profiles if isinstance(profiles, dict) else {}
    layer = known.get(profile, {}) if profile is not None else {}
    if profile is not None and not (layer and isinstance(layer, dict)):
        says = f"got {shown(profile)}, {path} has {', '.join(map(str, known)) or 'no profiles'}"
        raise ConfigError(report([*problems, Problem("--profile", says)]))
    here = ("profiles", profile)
    places |= {key[2:]: where for key, where in places.items() if key[:2] == here}
    line = parse_flags(argv, config_class)
    problems += line.problems
    config = build(config_class, [line.values, layer, values], places | line.places, problems)
    return Plan(suite, path.stem, profile or "", config)
