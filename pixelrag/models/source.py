"""Where a model's files lie, and the small JSON files beside its weights that pixelrag reads."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from pixelrag.errors import ModelError
from pixelrag.json_text import read_json
from pixelrag.models.pooling import POOLING_MODES, PoolingMode

SETTINGS_FILE = "pixelrag.json"
SETTINGS_FORMAT = 1
ADAPTER_FILE = "adapter_config.json"
_PACKAGE = "package:"

# What sentence-transformers calls our modes, in its old (one flag each) and new spelling.
_ST_FLAGS: dict[str, PoolingMode | None] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": None,
    "pooling_mode_mean_sqrt_len_tokens": None,
    "pooling_mode_weightedmean_tokens": None,
}
_ST_MODES: dict[str, PoolingMode] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_ST_HARMLESS = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as the user named it, and where it is.

    Attributes:
        name: the user's spelling; goes into exported files, since it holds on other machines too.
        location: a folder's path, or a Hugging Face name.
        setting: configuration path that named it, for messages.
        gguf_file: name of the GGUF file that holds the whole model, or None.
    """

    name: str
    location: str
    setting: str = "model.name_or_path"
    gguf_file: str | None = None

    def file(self, filename: str) -> Path | None:
        """The path of a file of the model (downloaded if need be), or None if it has no such."""
        folder = Path(self.location)
        if folder.is_dir():
            return folder / filename if (folder / filename).is_file() else None
        try:
            found = cached_file(
                self.location, filename, _raise_exceptions_for_missing_entries=False
            )
        except OSError as error:
            raise not_found(self, error) from error
        return None if found is None else Path(found)

    def json(self, filename: str) -> Any:
        """The parsed file, or None if the model has no such file.

        Raises:
            ModelError: the file is not JSON.
        """
        path = self.file(filename)
        if path is None:
            return None
        try:
            return read_json(path, finite=False)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.name}: {filename} cannot be read: {error}") from error


def resolve_source(
    name: str, *, setting: str = "model.name_or_path", gguf_file: str | None = None
) -> ModelSource:
    """Turn `model.name_or_path` (or another `setting`) into a place.

    `package:NAME/FOLDER` is a folder inside an installed Python package, found without running
    any of the package's code. Anything else is a folder, or else a Hugging Face name. A name that
    ends in `.gguf` is the folder (or name) before its last part, with that part as `gguf_file`.

    Raises:
        ModelError: the package is not installed or lacks the folder; or the name can only be a
            path and no folder is there; or the folder lacks the GGUF file.
    """
    if gguf_file is None and name.endswith(".gguf"):
        folder, _, gguf_file = name.rpartition("/")
        source = resolve_source(folder or ".", setting=setting, gguf_file=gguf_file)
        return replace(source, name=name)
    if name.startswith(_PACKAGE):
        source = ModelSource(name, str(_package_folder(name, setting)), setting, gguf_file)
    else:
        source = _folder_or_hub_name(name, setting, gguf_file)
    home = Path(source.location)
    if gguf_file is not None and home.is_dir() and not (home / gguf_file).is_file():
        there = sorted(path.name for path in home.glob("*.gguf"))
        raise ModelError(
            f"{setting} {name!r} has no GGUF file {gguf_file!r}; there are "
            f"{', '.join(there) or 'none'}"
        )
    return source


def _folder_or_hub_name(name: str, setting: str, gguf_file: str | None) -> ModelSource:
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelSource(name, str(path), setting, gguf_file)
    if path.exists():
        raise ModelError(f"{setting} {name!r} is a file; expected a model's folder")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip():
        raise ModelError(
            f"{setting} {name!r}: there is no such folder. Give a folder, a Hugging Face "
            "name (owner/model) or package:NAME/FOLDER"
        )
    return ModelSource(name, name, setting, gguf_file)


def not_found(source: ModelSource, error: Exception) -> ModelError:
    """The error for a model that neither this machine nor the Hub yields."""
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return ModelError(
        f"{source.setting} {source.name!r} is no folder here and could not be fetched from Hugging "
        f"Face: {reason[0]} Give a folder, or check the name, the network and your access rights"
    )


@contextlib.contextmanager
def as_model_error(source: ModelSource) -> Iterator[None]:
    """Turn whatever transformers and safetensors raise while reading a model into one error."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if not Path(source.location).is_dir() and isinstance(error, OSError):
            raise not_found(source, error) from error
        reason = (str(error).strip().splitlines() or [""])[0] or type(error).__name__
        raise ModelError(f"{source.name} ({source.location}) does not load: {reason}") from error


def _package_folder(name: str, setting: str) -> Path:
    package, _, inside = name.removeprefix(_PACKAGE).partition("/")
    # A dotted name would make find_spec import the parent package.
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"{setting} {name!r}: no Python package {package!r} is installed here; "
            f"pip install {package.replace('_', '-')}, or give a folder"
        )
    roots = [Path(location) for location in spec.submodule_search_locations]
    for root in roots:
        if (root / inside).is_dir():
            return root / inside
    raise ModelError(f"{setting} {name!r}: package {package} has no folder {inside!r}")


def saved_settings(source: ModelSource) -> dict[str, Any]:
    """Contents of an exported folder's `pixelrag.json`; empty for any other model.

    Raises:
        ModelError: written by a newer pixelrag.
    """
    settings = source.json(SETTINGS_FILE)
    if settings is None:
        return {}
    if not isinstance(settings, dict) or settings.get("format") != SETTINGS_FORMAT:
        got = settings.get("format") if isinstance(settings, dict) else type(settings).__name__
        raise ModelError(
            f"{source.name}: {SETTINGS_FILE} has format {got!r}, expected {SETTINGS_FORMAT}; "
            "was it written by a newer pixelrag?"
        )
    return settings


def declared_pooling(source: ModelSource) -> PoolingMode | None:
    """Pooling that a sentence-transformers folder declares, or None where it declares none.

    Raises:
        ModelError: a mode, or a further layer such as Dense, that pixelrag cannot reproduce.
    """
    config = source.json("1_Pooling/config.json")
    if config is None:
        return None
    if "pooling_mode" in config:
        given = config["pooling_mode"]
        modes = [given] if isinstance(given, str) else list(given)
        known = [_ST_MODES.get(mode) for mode in modes]
    else:
        modes = [flag for flag in _ST_FLAGS if config.get(flag)]
        known = [_ST_FLAGS[flag] for flag in modes]
    if len(known) != 1 or known[0] is None:
        raise ModelError(
            f"{source.name} pools by {', '.join(modes) or 'nothing'} (1_Pooling/config.json); "
            f"pixelrag pools by {', '.join(POOLING_MODES)}. Set model.pooling to train it with one"
        )
    kinds = [str(module.get("type")).split(".")[-1] for module in source.json("modules.json") or []]
    extra = [kind for kind in kinds if kind not in _ST_HARMLESS]
    if extra:
        raise ModelError(
            f"{source.name} puts {', '.join(extra)} behind the pooling (modules.json), which "
            "pixelrag would drop. Set model.pooling to train it without"
        )
    return known[0]


def declared_prompts(source: ModelSource) -> dict[str, str]:
    """Prompts of a sentence-transformers folder by name (`query`, `document`), if it has any."""
    config = source.json("config_sentence_transformers.json") or {}
    prompts = config.get("prompts") or {}
    if "document" not in prompts and "passage" in prompts:
        prompts = prompts | {"document": prompts["passage"]}
    return {name: text for name, text in prompts.items() if isinstance(text, str)}


def base_of(source: ModelSource) -> tuple[ModelSource, ModelSource | None]:
    """The model itself, and the folder of the adapter on it if `source` is one."""
    adapter = source.json(ADAPTER_FILE) if source.gguf_file is None else None
    if not adapter:
        return source, None
    name = adapter.get("base_model_name_or_path") or ""
    return resolve_source(name, setting=f"{source.name}'s base model"), source
