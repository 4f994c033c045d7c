"""The command: what is checked depends on the job that the configuration is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.distill import DistillConfig
from pixelrag.config.rag import RagConfig
from pixelrag.console import say
from pixelrag.errors import ConfigError

if TYPE_CHECKING:
    from pixelrag.validate.duration import Hardware


def main(
    config: ContrastiveConfig | DistillConfig | RagConfig, own: Mapping[str, str] | None = None
) -> int:
    """Print what is wrong, then the run in figures; return 0, or the exit code of the first fault.

    The configuration itself has been checked before this is called. What can still be checked
    after a fault is.

    Args:
        config: the job's.
        own: perhaps `world_size`, the processes that the run will have, and `device`, on which.

    Raises:
        ConfigError: `world_size` is no number of processes, or no device is called `device`.
    """
    hardware = _hardware(own or {})
    if isinstance(config, DistillConfig):
        from pixelrag.validate import texts

        code = texts.check(config, hardware)
    elif isinstance(config, RagConfig):
        from pixelrag.validate import rag

        code = rag.check(config, hardware)
    else:
        from pixelrag.validate import pairs

        code = pairs.check(config, hardware)
    say("not valid" if code else "valid")
    return code


def _hardware(own: Mapping[str, str]) -> Hardware:
    from pixelrag.distributed.env import read_ranks
    from pixelrag.plan.hardware import device_named
    from pixelrag.validate.duration import Hardware

    device = own.get("device")
    if device is not None:
        device_named(device)
    text = own.get("world_size", str(read_ranks()[1]))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--world_size: got {text!r}, expected a number of processes, 1 or more")
    return Hardware(int(text), device)
