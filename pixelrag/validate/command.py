"""The command: what is checked depends on the job that the configuration is of."""

from pixelrag.config.contrastive import ContrastiveConfig
from pixelrag.config.distill import DistillConfig
from pixelrag.config.rag import RagConfig
from pixelrag.console import say


def main(config: ContrastiveConfig | DistillConfig | RagConfig) -> int:
    """Print what is wrong and a summary; return 0, or the exit code of the first fault.

    The configuration itself has been checked before this is called. What can still be checked
    after a fault is.
    """
    if isinstance(config, DistillConfig):
        from pixelrag.validate.texts import check
    elif isinstance(config, RagConfig):
        from pixelrag.validate.rag import check
    else:
        from pixelrag.validate.pairs import check
    code = check(config)
    say("not valid" if code else "valid")
    return code
