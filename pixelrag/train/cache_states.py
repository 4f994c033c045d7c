"""`pixelrag cache-states`: the teacher's final hidden states, exact or int8."""

from collections.abc import Mapping

from pixelrag.config.distill import DistillConfig
from pixelrag.train import cache_answers


def main(config: DistillConfig, own: Mapping[str, str]) -> int:
    """Write the cache to `output`, by `codec` (exact or int8); returns the exit code."""
    return cache_answers.main(config, own, "hidden_states")
