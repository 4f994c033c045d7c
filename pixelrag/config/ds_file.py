"""What the configuration must know of a DeepSpeed JSON file: its stage and its optimizer offload.

The rest of the file is the engine's to resolve; only these two pick fields of ours.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class DeepSpeedFileError(ValueError):
    """The file cannot serve; the text says what was expected instead."""


@dataclass(frozen=True, slots=True)
class DeepSpeedFile:
    """The parts of a DeepSpeed file that decide `engine.name` and `engine.offload_optimizer`."""

    stage: int
    offload_optimizer: bool


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise DeepSpeedFileError(f"each key once ({key!r} stands twice in the file)")
        seen[key] = value
    return seen


def read_deepspeed_file(path: Path) -> DeepSpeedFile:
    """Read stage and offload of the DeepSpeed file at `path`.

    Raises `DeepSpeedFileError` where the file is missing, no JSON object, or has no stage 0 to 3.
    """
    try:
        content = json.loads(path.read_text("utf-8"), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise DeepSpeedFileError(f"a readable JSON file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DeepSpeedFileError("a JSON file in UTF-8") from error
    except json.JSONDecodeError as error:
        raise DeepSpeedFileError(f"valid JSON (line {error.lineno}: {error.msg})") from error
    zero = content.get("zero_optimization") if isinstance(content, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if type(stage) is not int or stage not in range(4):
        found = "none" if stage is None else repr(stage)
        raise DeepSpeedFileError(f"a file with zero_optimization.stage 0 to 3 (it has {found})")
    offload = zero.get("offload_optimizer")
    device = offload.get("device") if isinstance(offload, dict) else None
    return DeepSpeedFile(stage, offload_optimizer=device not in (None, "none"))
