"""A Ray cluster of this machine, of two CPUs, for as long as a module of tests needs it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import pytest

_TOKEN = secrets.token_hex(32)


@contextlib.contextmanager
def ray_cluster() -> Iterator[str]:
    """Start it; yields its address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Ray would leave a token in the home folder; one for all, as it remembers its first.
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", _TOKEN)
        import ray

        ray.init(
            num_cpus=2,
            include_dashboard=False,
            _node_ip_address="127.0.0.2",  # of the loopback; Ray replaces 127.0.0.1
            object_store_memory=80 << 20,
            log_to_driver=False,
            logging_level="ERROR",
        )
        try:
            yield ray.get_runtime_context().gcs_address
        finally:
            ray.shutdown()
