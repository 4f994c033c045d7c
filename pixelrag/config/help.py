"""The `--help` of a command that takes a job's configuration: every option, default and meaning."""

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pixelrag.config.flags import SHORTCUTS
from pixelrag.config.problems import describe, options_of
from pixelrag.config.yaml_file import write_yaml


def help_text(
    program: str,
    summary: str,
    config_class: type[BaseModel],
    own: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The help text of `program`, its options grouped by section, at most 100 columns wide.

    `own` holds the command's own flags: name -> meaning.
    """
    usage = f"usage: {program} [--config FILE ...]"
    if own:
        indent = " " * len(f"usage: {program}")
        usage += "".join(f" [--{name} VALUE]" for name in own) + f"\n{indent}"
    lines = [
        f"{usage} [--SECTION.OPTION VALUE ...]",
        "",
        f"{summary[0].upper()}{summary[1:]}.",
        "",
        "Files are read in order, later ones win, flags win over files. Lists are written",
        "[a, b] or a,b; true and false are spelled out; null is nothing.",
        *(f"--{short} VALUE is short for --{path} VALUE." for short, path in SHORTCUTS.items()),
    ]
    lines += [
        f"--preset {name} takes the flags and defaults of that trainer as well."
        for name in getattr(config_class, "presets", ())
    ]
    if own:
        lines += ["", "this command", *(f"  --{name}  {text}" for name, text in own.items())]
    section = None
    for path, field in options_of(config_class).items():
        here = path.rpartition(".")[0]
        if here != section:
            lines += ["", here or "the run"]
            section = here
        lines += _option(path, field)
    return "\n".join(lines) + "\n"


def _option(path: str, field: FieldInfo) -> list[str]:
    default = "required" if field.is_required() else f"default {default_of(field)}"
    return [f"  --{path}  {describe(field)}  ({default})", f"      {field.description}"]


def default_of(field: FieldInfo) -> str:
    """The default of an option that has one, as a file would have it."""
    value = field.get_default(call_default_factory=True)
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return write_yaml({"v": value}).removeprefix("v: ").strip()
