"""`pixelrag cache-logits`: the teacher's k likeliest tokens at every supervised position."""

from collections.abc import Mapping

from pixelrag.config.distill import DistillConfig
from pixelrag.train import cache_answers


def main(config: DistillConfig, own: Mapping[str, str]) -> int:
    """Write the cache to `output`, `k` tokens a position (default 64); returns the exit code."""
    return cache_answers.main(config, own, "top_k")
