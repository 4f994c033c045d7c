"""What the configuration must know of a DeepSpeed JSON file: its stage and its optimizer offload.

The rest of the file is the engine's to resolve; only these two pick fields of ours.
"""

from dataclasses import dataclass
from pathlib import Path

from pixelrag.json_text import read_json


class DeepSpeedFileError(ValueError):
    """The file cannot serve; the text says what was expected instead."""


@dataclass(frozen=True, slots=True)
class DeepSpeedFile:
    """The parts of a DeepSpeed file that decide `engine.name`, `offload_optimizer` and `precision`.

    None where the file says "auto" or nothing, and so leaves the choice to the job.
    """

    stage: int | None
    offload_optimizer: bool | None
    bf16: bool | None


def read_deepspeed_file(path: Path) -> DeepSpeedFile:
    """Read stage and offload of the DeepSpeed file at `path`.

    Raises `DeepSpeedFileError` where the file is missing, no JSON object, or of an unknown stage.
    """
    try:
        content = read_json(path)
    except OSError as error:
        raise DeepSpeedFileError(f"a readable JSON file ({error.strerror})") from error
    except ValueError as error:
        raise DeepSpeedFileError(f"a JSON file ({error})") from error
    if not isinstance(content, dict):
        raise DeepSpeedFileError(f"a JSON object (it holds a {type(content).__name__})")
    zero = content.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise DeepSpeedFileError("a file whose zero_optimization is an object")
    stage = zero.get("stage", "auto")
    if stage != "auto" and (type(stage) is not int or stage not in range(4)):
        raise DeepSpeedFileError(f"a file with zero_optimization.stage 0 to 3 (it has {stage!r})")
    offload = zero.get("offload_optimizer")
    device = offload.get("device", "auto") if isinstance(offload, dict) else "auto"
    half = content.get("bf16")
    enabled = half.get("enabled", "auto") if isinstance(half, dict) else "auto"
    return DeepSpeedFile(
        stage=None if stage == "auto" else stage,
        offload_optimizer=None if device == "auto" else device != "none",
        bf16=enabled if isinstance(enabled, bool) else None,
    )
