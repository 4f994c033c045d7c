"""The command: what is checked depends on the job that the configuration is of."""

from collections.abc import Mapping

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.distill import DistillConfig
from pixelrag.config.rag import RagConfig
from pixelrag.console import say
from pixelrag.errors import ConfigError


def main(
    config: ContrastiveConfig | DistillConfig | RagConfig, own: Mapping[str, str] | None = None
) -> int:
    """Print what is wrong, then the run in figures; return 0, or the exit code of the first fault.

    The configuration itself has been checked before this is called. What can still be checked
    after a fault is.

    Args:
        config: the job's.
        own: perhaps `world_size`, the processes that the run will have.

    Raises:
        ConfigError: `world_size` is no number of processes.
    """
    if isinstance(config, DistillConfig):
        from pixelrag.validate.texts import check
    elif isinstance(config, RagConfig):
        from pixelrag.validate.rag import check
    else:
        from pixelrag.validate.pairs import check
    code = check(config, _world_size(own or {}))
    say("not valid" if code else "valid")
    return code


def _world_size(own: Mapping[str, str]) -> int:
    text = own.get("world_size")
    if text is None:
        from pixelrag.distributed.env import read_ranks

        return read_ranks()[1]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--world_size: got {text!r}, expected a number of processes, 1 or more")
    return int(text)
